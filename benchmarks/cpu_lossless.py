"""Bit-exact compressed weights on the CPU: products in the ``nib12`` layout, and encoding in both layouts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean, worst
from gossamer.weights._dense import DenseWeight
from gossamer.weights._format import WeightFormat
from gossamer.weights._lossless import LosslessWeight

SHAPES = [(4096, 4096), (11008, 4096), (14336, 4096)]
IN_CACHE = (1024, 4096)
SOURCES = (
    "weights/_lossless.py",
    "weights/_lossless_[!f]*.py",
    "weights/_nib12*.py",
    "weights/_tbe*.py",
    "weights/_dense*.py",
    "core/jit.py",
)


def normal_weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """A bf16 matrix drawn from N(0, 0.02^2)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(0.02).to(torch.bfloat16)


def products(
    kind: Callable[[torch.Tensor], WeightFormat], weight: torch.Tensor, threads: int, copies: int
) -> list[Callable[[], None]]:
    """Products of copies of ``weight`` with one vector of activations, a copy each."""
    rows, columns = weight.shape
    x = np.random.default_rng(0).standard_normal(columns).astype(np.float32)
    return [partial(kind(weight).bind(threads), x, np.empty(rows, np.float32)) for _ in range(copies)]


def nib12_over_dense(
    bench: Bench, shape: tuple[int, int], threads: int = 1, in_cache: bool = False, counted: bool = True
) -> Row:
    """One row: our nib12 product against our dense one."""
    weight = normal_weight(shape)
    copies = 1 if in_cache else copies_past_cache(LosslessWeight.from_dense(weight).nbytes)
    note = "in cache" if in_cache else "rotated past the last-level cache"
    with bench.threads(threads):
        return bench.compare(
            shape,
            ours=products(LosslessWeight.from_dense, weight, threads, copies),
            peer={"own dense bf16 GEMV": products(DenseWeight.from_dense, weight, threads, copies)},
            counted=counted,
            note=f"{note}, {threads} thread{'s' if threads > 1 else ''}",
        )


@claim(
    "cpu-nib12-gemv",
    text="bit-exact nib12 GEMV against the own dense bf16 GEMV, one thread, N=1 (bytes allow 1.33x)",
    system=["ZipServ"],
    peer="own dense bf16 GEMV",
    unit="ratio",
    bar=1.15,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def nib12_gemv(bench: Bench) -> Iterator[Row]:
    for shape in SHAPES:
        yield nib12_over_dense(bench, shape)
    for shape in SHAPES:
        yield nib12_over_dense(bench, shape, threads=2, counted=False)
    yield nib12_over_dense(bench, IN_CACHE, in_cache=True, counted=False)


@claim(
    "cpu-lossless-encode",
    text="encoding bf16 weights, one thread: megabytes of bf16 read per second, the slower layout",
    system=["ZipServ"],
    peer="none (a throughput); zlib beside it",
    unit="MB/s",
    bar=200.0,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def lossless_encode(bench: Bench) -> Iterator[Row]:
    weight = normal_weight(SHAPES[0])
    yield from _rates(bench, weight)
    sample = weight[:256].contiguous().view(torch.int16).numpy().tobytes()
    seconds = bench.seconds(partial(zlib.compress, sample, 1))
    bits = 16 * len(zlib.compress(sample, 1)) / len(sample)
    rates = [1e-6 * len(sample) / second for second in seconds]
    yield bench.value("encode zlib level 1", rates, "MB/s", counted=False, note=f"{bits:.2f} bits a weight")


def _rates(bench: Bench, weight: torch.Tensor) -> Iterator[Row]:
    megabytes = 2e-6 * weight.numel()
    for layout in ("nib12", "tbe"):
        seconds = bench.seconds(partial(LosslessWeight.from_dense, weight, layout))
        rates = [megabytes / second for second in seconds]
        stored = LosslessWeight.from_dense(weight, layout)
        yield bench.value(f"encode {layout}", rates, "MB/s", note=f"{stored.bits_per_weight:.2f} bits a weight")
        out = torch.empty(weight.shape, dtype=weight.dtype)
        seconds = bench.seconds(partial(stored.to_dense, out))
        yield bench.value(f"decode {layout}", [megabytes / second for second in seconds], "MB/s", counted=False)
