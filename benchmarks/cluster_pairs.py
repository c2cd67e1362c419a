"""Pairs of real training jobs on one device: does the pair theorem tell when they end?

Two worker processes hold six small jobs each. Every job is timed alone; every pair runs together for a moment, which
gives both slow-downs; then both run a set number of steps, the second entering at once, and the times at which they end
are compared with the closed form.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations_with_replacement
from multiprocessing.connection import Connection

import torch
from torch import nn

from gossamer.cluster import finish_together
from gossamer.core.measure import Bench, Row, claim, largest

ALONE_SECONDS = 1.5
TOGETHER_SECONDS = 2.5
RUN_SECONDS = 5.0

Step = Callable[[], None]


def _convolutions(channels: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.GroupNorm(8, channels), nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.GroupNorm(8, 2 * channels), nn.ReLU(),
        nn.Conv2d(2 * channels, 4 * channels, 3, stride=2, padding=1), nn.GroupNorm(8, 4 * channels), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, 100),
    )  # fmt: skip


def _transformer(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class _Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


JOBS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions, small": (lambda: _convolutions(32, 32), (64, 3, 32, 32)),
    "convolutions, large": (lambda: _convolutions(64, 64), (128, 3, 64, 64)),
    "transformer, small": (lambda: _transformer(256, 4), (16, 128, 256)),
    "transformer, large": (lambda: _transformer(1024, 6), (16, 256, 1024)),
    "recurrent": (lambda: _Recurrent(512), (64, 64, 512)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)), (1024, 2048)),
}


def _step(name: str, device: str) -> Step:
    make, shape = JOBS[name]
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(*shape, device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def _work(pipe: Connection, device: str) -> None:
    """Serve ``(job, begin, steps, seconds)``: run from ``begin`` on, as many steps or seconds; give both."""
    torch.set_num_threads(1)
    steps: dict[str, Step] = {}
    while (order := pipe.recv()) is not None:
        job, begin, count, seconds = order
        if job not in steps:
            steps[job] = _step(job, device)
            for _ in range(5):
                steps[job]()
        if begin is None:
            pipe.send(None)
            continue
        while time.monotonic() < begin:
            time.sleep(1e-4)
        done = 0
        while done < count and time.monotonic() - begin < seconds:
            steps[job]()
            done += 1
        pipe.send((done, time.monotonic() - begin))


class _Pair:
    """Two workers on one device, which share it by time-slices."""

    def __init__(self, device: str) -> None:
        context = mp.get_context("spawn")
        self._ends, self._processes = [], []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, device), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, orders: list[tuple[str, int, float] | None]) -> list[tuple[int, float]]:
        """Start both (or one) at one moment; give the steps done and the seconds taken."""
        chosen = [(end, order) for end, order in zip(self._ends, orders, strict=True) if order is not None]
        for end, order in chosen:
            end.send((order[0], None, 0, 0.0))
        for end, _ in chosen:
            end.recv()
        begin = time.monotonic() + 0.05
        for end, (job, count, seconds) in chosen:
            end.send((job, begin, count, seconds))
        return [end.recv() for end, _ in chosen]

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(10)


def _errors(device: str, bench: Bench) -> Iterator[Row]:
    pair, forever = _Pair(device), 10**9
    try:
        alone = {}
        for name in JOBS:
            done, seconds = pair.run([(name, forever, ALONE_SECONDS), None])[0]
            alone[name] = seconds / done
        for a, b in combinations_with_replacement(JOBS, 2):
            shared = pair.run([(a, forever, TOGETHER_SECONDS), (b, forever, TOGETHER_SECONDS)])
            slowed = {0: alone[a], 1: alone[b]}
            xi_a, xi_b = (max(1.0, seconds / done / slowed[side]) for side, (done, seconds) in enumerate(shared))
            counts = [max(10, round(share * RUN_SECONDS / alone[name])) for share, name in ((0.4, a), (0.8, b))]
            ends = pair.run([(a, counts[0], 600.0), (b, counts[1], 600.0)])
            predicted = finish_together(counts[0] * alone[a], counts[1] * alone[b], xi_a, xi_b)
            error = abs(statistics.fmean(seconds for _, seconds in ends) / predicted - 1)
            note = f"slow-downs {xi_a:.2f} and {xi_b:.2f}; predicted mean {predicted:.2f} s"
            yield bench.value(f"{a} + {b}", error, "share", note=note)
    finally:
        pair.close()


@claim(
    "h200-pair-jct",
    text="error of the predicted mean completion time of two real training jobs that share a GPU, the worst of 21 pairs",
    system=["SJF-BSBF", "Castor"],
    peer="none (the measured times)",
    unit="share",
    bar=0.10,
    better="lower",
    summary=largest,
    sources=("cluster/_pair.py",),
)
def pair_completion(bench: Bench) -> Iterator[Row]:
    """Time-slicing between two processes."""
    if not torch.cuda.is_available():
        raise RuntimeError("needs an NVIDIA GPU")
    yield from _errors("cuda", bench)
