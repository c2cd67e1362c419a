"""Phase-functioned networks for 1 to 64 characters on CPUs against NumPy and torch; one thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from gossamer.core.measure import Bench, Row, claim, geometric_mean
from gossamer.gated import PhaseFunctionedMLP, catmull_rom

SOURCES = ("gated/_*.py", "codegen/*.py")
NETWORKS = ((1032, 256, 256, 908), (342, 512, 512, 311))
Case = tuple[PhaseFunctionedMLP, np.ndarray, np.ndarray]


def _claim(name: str, batches: str, bar: float) -> object:
    return claim(
        f"pfnn-{name}",
        text=f"a phase-functioned network for {batches} against NumPy's formulation A, coefficients included, one thread",
        system=["PFNN acceleration"],
        peer="numpy, formulation A",
        peer_package="numpy",
        unit="ratio",
        bar=bar,
        better="higher",
        summary=geometric_mean,
        sources=SOURCES,
    )


@_claim("b1", "one character", 1.5)  # type: ignore[operator]
def one(bench: Bench) -> Iterator[Row]:
    """Every weight is read for one row: a matter of bandwidth, which stands in the remark. bfloat16 weights beside."""
    yield from _against_numpy(bench, 1)
    for sizes in NETWORKS:
        net, x, phase = _case(sizes, 1)
        half = PhaseFunctionedMLP(
            [layer.weights for layer in net.layers], [layer.bias for layer in net.layers], weights_dtype="bf16"
        )
        ours, peer = partial(half.forward, x, phase), partial(net.forward, x, phase)
        yield bench.compare(f"{_label(sizes)} B=1", ours, peer, counted=False, note="bfloat16 weights against float32")


@_claim("b8", "5 and 8 characters", 2.5)  # type: ignore[operator]
def few(bench: Bench) -> Iterator[Row]:
    for batch in (5, 8):
        yield from _against_numpy(bench, batch)


@_claim("b64", "64 characters", 3.0)  # type: ignore[operator]
def many(bench: Bench) -> Iterator[Row]:
    yield from _against_numpy(bench, 64)


@claim(
    "pfnn-torch",
    text="a phase-functioned network for 8 characters against torch: weights mixed per character, then bmm, one thread",
    system=["PFNN acceleration"],
    peer="torch.bmm",
    peer_package="torch",
    unit="ratio",
    bar=3.0,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def against_torch(bench: Bench) -> Iterator[Row]:
    for sizes in NETWORKS:
        net, x, phase = _case(sizes, 8)
        points = [(torch.from_numpy(layer.weights), torch.from_numpy(layer.bias)) for layer in net.layers]
        out = np.empty((8, net.outputs), np.float32)
        yield bench.compare(
            f"{_label(sizes)} B=8", partial(net.forward, x, phase, out=out), partial(_bmm, points, x, phase)
        )


def _against_numpy(bench: Bench, batch: int) -> Iterator[Row]:
    for sizes in NETWORKS:
        net, x, phase = _case(sizes, batch)
        matrices = [
            (np.ascontiguousarray(layer.weights.reshape(-1, layer.sizes[2])), layer.bias) for layer in net.layers
        ]
        out = np.empty((batch, net.outputs), np.float32)
        row = bench.compare(
            f"{_label(sizes)} B={batch}", partial(net.forward, x, phase, out=out), partial(_numpy, matrices, x, phase)
        )
        yield Row(**{**row.as_json(), "note": f"{net.nbytes(batch) / row.ours / 1e9:.1f} GB/s of weights"})


def _numpy(matrices: list[tuple[np.ndarray, np.ndarray]], x: np.ndarray, phase: np.ndarray) -> np.ndarray:
    gates = catmull_rom(phase)
    for number, (matrix, bias) in enumerate(matrices):
        scaled = (gates[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        x = scaled @ matrix + gates @ bias
        if number < len(matrices) - 1:
            x = np.maximum(x, 0) + np.exp(np.minimum(x, 0)) - 1
    return x


def _bmm(points: list[tuple[torch.Tensor, torch.Tensor]], x: np.ndarray, phase: np.ndarray) -> torch.Tensor:
    gates, row = torch.from_numpy(catmull_rom(phase)), torch.from_numpy(x)[:, None]
    for number, (weights, bias) in enumerate(points):
        mixed = torch.einsum("bp,pio->bio", gates, weights)
        row = torch.bmm(row, mixed) + (gates @ bias)[:, None]
        if number < len(points) - 1:
            row = torch.nn.functional.elu(row)
    return row[:, 0]


def _case(sizes: tuple[int, ...], batch: int) -> Case:
    generator = np.random.default_rng(0)
    weights = [
        generator.standard_normal((4, a, b)).astype(np.float32) / np.float32(a**0.5)
        for a, b in itertools.pairwise(sizes)
    ]
    biases = [generator.standard_normal((4, b)).astype(np.float32) for b in sizes[1:]]
    x = generator.standard_normal((batch, sizes[0])).astype(np.float32)
    return PhaseFunctionedMLP(weights, biases), x, generator.uniform(0, 2 * np.pi, batch)


def _label(sizes: tuple[int, ...]) -> str:
    return "-".join(map(str, sizes))
