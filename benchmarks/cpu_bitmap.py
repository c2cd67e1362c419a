"""Bitmap weights on one core against dense products: decode (one vector), 50 % zeros, weights read from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean
from gossamer.weights import BitmapWeight, DenseWeight, WeightFormat

SHAPES = ((4096, 4096), (11008, 4096), (14336, 4096))
SOURCES = ("weights/_bitmap.py", "weights/_bitmap_[!f]*.py", "weights/_dense*.py", "core/jit.py")

Calls = list[Callable[[], object]]


@claim(
    "cpu-bitmap-bf16-gemv",
    text="bitmap bf16 matrix-vector product at 50 % sparsity against our own best dense bf16 one, one thread",
    system=["SpInfer"],
    peer="own dense bf16 GEMV",
    unit="ratio",
    bar=1.3,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def against_own_dense(bench: Bench) -> Iterator[Row]:
    """At equal bandwidth the ceiling is 16/9 = 1.78."""
    yield from _rows(bench, torch.bfloat16, _own_dense)


@claim(
    "cpu-bitmap-bf16-torch",
    text="bitmap bf16 matrix-vector product at 50 % sparsity against torch F.linear (one or eight rows), one thread",
    system=["SpInfer"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def against_torch_bf16(bench: Bench) -> Iterator[Row]:
    """torch is asked twice: for the vector itself, and for it padded to eight rows; the faster counts."""
    yield from _rows(bench, torch.bfloat16, _torch_linear)


@claim(
    "cpu-bitmap-fp32-torch",
    text="bitmap fp32 matrix-vector product at 50 % sparsity against torch F.linear, one thread",
    system=["SpInfer"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def against_torch_fp32(bench: Bench) -> Iterator[Row]:
    """At equal bandwidth the ceiling is 32/17 = 1.88."""
    yield from _rows(bench, torch.float32, _torch_linear)


def _rows(bench: Bench, dtype: torch.dtype, peers: Callable[[list[Tensor], int], Mapping[str, Calls]]) -> Iterator[Row]:
    for number, shape in enumerate(SHAPES):
        dense = _pruned(shape, dtype, seed=number)
        bitmap = BitmapWeight.from_dense(dense)
        copies = copies_past_cache(bitmap.nbytes)
        bitmaps = [_copy(bitmap) for _ in range(copies)]
        plain = [DenseWeight.from_dense(dense).to_dense() for _ in range(copies)]
        yield bench.compare(shape, ours=_bound(bitmaps, 1), peer=peers(plain, 1))
        with bench.threads(2):
            yield bench.compare(shape, ours=_bound(bitmaps, 2), peer=peers(plain, 2), counted=False, note="two threads")
    small = _pruned((512, 4096), dtype, seed=len(SHAPES))
    ours = _bound([BitmapWeight.from_dense(small)], 1)
    yield bench.compare((512, 4096), ours=ours, peer=peers([small], 1), counted=False, note="in cache")


def _pruned(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random weights of which a random half is zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 0.02).to(dtype)
    return weight.masked_fill_(torch.rand(shape, generator=generator) < 0.5, 0)


def _copy(weight: BitmapWeight) -> BitmapWeight:
    """The same weight in memory of its own, obtained as a new weight's memory is."""
    arrays = {name: torch.from_numpy(array.numpy().copy()) for name, array in weight.arrays().items()}
    return BitmapWeight.from_arrays(arrays, weight.shape, weight.dtype, weight.meta())


def _bound(weights: Sequence[WeightFormat], threads: int) -> Calls:
    x = np.random.default_rng(0).standard_normal(weights[0].shape[1]).astype(np.float32)
    out = np.empty(weights[0].shape[0], np.float32)
    return [partial(weight.bind(threads), x, out) for weight in weights]


def _own_dense(dense: list[Tensor], threads: int) -> Mapping[str, Calls]:
    return {"own dense GEMV": _bound([DenseWeight.from_dense(weight) for weight in dense], threads)}


def _torch_linear(dense: list[Tensor], threads: int) -> Mapping[str, Calls]:
    one = torch.randn(1, dense[0].shape[1], generator=torch.Generator().manual_seed(0)).to(dense[0].dtype)
    peers = {"F.linear, one row": one}
    if dense[0].dtype == torch.bfloat16:
        peers["F.linear, padded to eight rows"] = one.repeat(8, 1)
    return {name: [partial(F.linear, x, weight) for weight in dense] for name, x in peers.items()}
