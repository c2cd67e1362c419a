"""Vector-wise N:M weights in float32 on one core against torch: decode (one vector), weights read from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean
from gossamer.weights import NMWeight

SHAPES = ((4096, 4096), (11008, 4096), (14336, 4096))
TOKENS = (8, 16, 32, 64)
SOURCES = ("weights/_nm*.py", "core/jit.py")

Calls = list[Callable[[], object]]


@claim(
    "cpu-nm-fp32-50",
    text="N:M 16:32 fp32 matrix-vector product (50 %, L = 32) against torch F.linear on the same matrix, one thread",
    system=["NM-SpMM"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def half(bench: Bench) -> Iterator[Row]:
    """At equal bandwidth the ceiling is 1.97."""
    yield from _rows(bench, "16:32")


@claim(
    "cpu-nm-fp32-75",
    text="N:M 8:32 fp32 matrix-vector product (75 %, L = 32) against torch F.linear on the same matrix, one thread",
    system=["NM-SpMM"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=2.4,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def three_quarters(bench: Bench) -> Iterator[Row]:
    """At equal bandwidth the ceiling is 3.94."""
    yield from _rows(bench, "8:32")


def _rows(bench: Bench, pattern: str) -> Iterator[Row]:
    for number, shape in enumerate(SHAPES):
        weight = NMWeight.from_dense(
            torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.02, pattern
        )
        ours, peer = _products(weight, 1)
        yield bench.compare(shape, ours, peer)
    first = NMWeight.from_dense(torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(0)) * 0.02, pattern)
    for tokens in TOKENS:
        ours, peer = _products(first, tokens)
        yield bench.compare(SHAPES[0], ours, peer, counted=False, note=f"{tokens} vectors")


def _products(weight: NMWeight, tokens: int) -> tuple[Calls, Calls]:
    """Products of copies of the weight, compressed and dense, with ``tokens`` vectors."""
    x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(9))
    out = np.empty((tokens, weight.shape[0]), np.float32)
    dense = weight.to_dense()
    ours: Calls = []
    peer: Calls = []
    for _ in range(copies_past_cache(weight.nbytes)):
        arrays = {name: torch.from_numpy(array.numpy().copy()) for name, array in weight.arrays().items()}
        copy = NMWeight.from_arrays(arrays, weight.shape, weight.dtype, weight.meta())
        if tokens == 1:
            ours.append(partial(copy.bind(), x[0].numpy(), out[0]))
        else:
            ours.append(partial(copy.matmul_small, x.numpy(), out))
        peer.append(partial(F.linear, x, torch.from_numpy(dense.numpy().copy())))
    return ours, peer
