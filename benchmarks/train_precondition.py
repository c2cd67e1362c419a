"""Preconditioned steps against the libraries that have them, and steps to a loss against Adam.

Step time: K-FAC is the whole training step (forward, loss, backward, Monte-Carlo factors, damped inverses, preconditioned
gradients); Shampoo is what its optimizer does with given gradients, roots included in every step. Memory is the peak of a
process of its own beyond what it had when the model, the batch and the libraries were there.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, worst
from gossamer.train.precondition import KFAC, Settings, Shampoo

DAMPING = 1e-3
SOURCES = ("train/precondition/*.py",)
Step = Callable[[], object]


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """Width 2048, three layers, a batch of 512 images of 784 pixels: the shape of ASDL's MNIST comparison."""
    net = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    return net, torch.randn(512, 784), torch.arange(512) % 10


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """Four convolutions on a batch of 64 images of 32 x 32 pixels."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(128, 128, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip
    return net, torch.randn(64, 3, 32, 32), torch.arange(64) % 10


def tiny() -> tuple[nn.Module, Tensor, Tensor]:
    """What loads the libraries before memory is measured."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    return net, torch.randn(4, 1, 4, 4), torch.arange(4)


NETS = {"mlp-2048x3 batch 512": mlp, "cnn-4 batch 64": cnn, "tiny": tiny}
MEASURED = tuple(NETS)[:2]


def kfac_ours(name: str) -> Step:
    torch.manual_seed(0)
    net, x, y = NETS[name]()
    kfac = KFAC(net, Settings(damping=DAMPING), fisher="mc")

    def step() -> None:
        net.zero_grad()
        output = net(x)
        kfac.backward(F.cross_entropy(output, y), output)
        kfac.step()

    return step


def kfac_curvlinops(name: str) -> Step:
    curvlinops = importlib.import_module("curvlinops")
    torch.manual_seed(0)
    net, x, y = NETS[name]()
    loss_function, parameters = nn.CrossEntropyLoss(), list(net.parameters())

    def step() -> None:
        net.zero_grad()
        loss_function(net(x), y).backward()
        factors = curvlinops.KFACLinearOperator(
            net, loss_function, parameters, [(x, y)], fisher_type="mc", mc_samples=1, separate_weight_and_bias=False,
            check_deterministic=False,
        )  # fmt: skip
        inverse = curvlinops.KFACInverseLinearOperator(factors, damping=DAMPING, use_heuristic_damping=True)
        for parameter, direction in zip(parameters, inverse @ [p.grad for p in parameters], strict=True):
            parameter.grad = direction

    return step


SHAPES = {"512-1024-512": (512, 1024, 512), "768-768-768-768": (768, 768, 768, 768), "tiny": (8, 8)}


def _layers(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    widths = SHAPES[name]
    net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    return net, [torch.randn_like(p) for p in net.parameters()]


def _with_gradients(net: nn.Module, gradients: list[Tensor], step: Callable[[], object]) -> Step:
    parameters = list(net.parameters())

    def run() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()  # some libraries write on it
        step()

    return run


def shampoo_ours(name: str, block: int, decay: float = 0.0) -> Step:
    net, gradients = _layers(name)
    shampoo = Shampoo(net, Settings(damping=1e-6, decay=decay), block_size=block)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        shampoo.step()
        optimizer.step()

    return _with_gradients(net, gradients, step)


def shampoo_whole(name: str) -> Step:
    net, gradients = _layers(name)
    optimizer = importlib.import_module("pytorch_optimizer").Shampoo(net.parameters(), preconditioning_compute_steps=1)
    return _with_gradients(net, gradients, optimizer.step)


def shampoo_blocks(name: str, block: int) -> Step:
    net, gradients = _layers(name)
    optimizer = importlib.import_module("pytorch_optimizer").ScalableShampoo(
        net.parameters(), betas=(0.0, 0.999), start_preconditioning_step=1, preconditioning_compute_steps=1,
        block_size=block, nesterov=False,
    )  # fmt: skip
    return _with_gradients(net, gradients, optimizer.step)


def peak(maker: str, *arguments: Any) -> float:
    """Bytes that three steps of a contender add to a fresh process of one thread."""
    code = (
        "import json, resource, sys, torch; torch.set_num_threads(1)\n"
        "from benchmarks import train_precondition as b\n"
        "maker, arguments = json.loads(sys.argv[1])\n"
        "getattr(b, maker)('tiny', *arguments[1:])()\n"
        "step = getattr(b, maker)(*arguments)\n"
        "before = int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize()\n"
        "for _ in range(3): step()\n"
        "print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    root = Path(__file__).resolve().parents[1]
    places = [str(root), str(root / "src"), *(path for path in sys.path if path)]
    # One arena, and large blocks from the system: what is freed is given back, so that the peak is what was in use.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
                   "MALLOC_MMAP_THRESHOLD_": "65536"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([maker, arguments])], env=environment, cwd=root, capture_output=True,
        text=True, check=True, timeout=600,
    )  # fmt: skip
    return float(done.stdout)


def _memory_row(case: str, ours: tuple[Any, ...], peers: dict[str, tuple[Any, ...]]) -> Row:
    mine = peak(*ours)
    theirs = {name: peak(*peer) for name, peer in peers.items()}
    least = min(theirs, key=theirs.__getitem__)
    others = {name: size for name, size in theirs.items() if name != least}
    return Row(f"{case}: peak memory", mine, "bytes", theirs[least], theirs[least] / mine, None, least, others)


@claim(
    "kfac-step", text="K-FAC training step, time and peak memory, factors and inverses made in every step",
    system=["ASDL"], peer="curvlinops-for-pytorch", peer_package="curvlinops-for-pytorch", unit="ratio", bar=1.0,
    better="higher", summary=worst, sources=SOURCES,
)  # fmt: skip
def kfac_step(bench: Bench) -> Iterator[Row]:
    for name in MEASURED:
        yield bench.compare(f"{name}: time", kfac_ours(name), {"curvlinops": kfac_curvlinops(name)})
        yield _memory_row(name, ("kfac_ours", name), {"curvlinops": ("kfac_curvlinops", name)})


@claim(
    "shampoo-step", text="Shampoo step on given gradients, time and peak memory, statistics and roots made in every step",
    system=["ASDL"], peer="pytorch-optimizer, Shampoo without blocks and ScalableShampoo with blocks of 512",
    peer_package="pytorch-optimizer", unit="ratio", bar=1.0, better="higher", summary=worst, sources=SOURCES,
)  # fmt: skip
def shampoo_step(bench: Bench) -> Iterator[Row]:
    for name in tuple(SHAPES)[:2]:
        yield bench.compare(f"{name}: time", shampoo_ours(name, 1024), {"Shampoo": shampoo_whole(name)})
        yield _memory_row(name, ("shampoo_ours", name, 1024), {"Shampoo": ("shampoo_whole", name)})
        blocks = f"{name} in blocks of 512"
        yield bench.compare(
            f"{blocks}: time", shampoo_ours(name, 512, 0.999), {"ScalableShampoo": shampoo_blocks(name, 512)}
        )
        yield _memory_row(
            blocks, ("shampoo_ours", name, 512, 0.999), {"ScalableShampoo": ("shampoo_blocks", name, 512)}
        )
