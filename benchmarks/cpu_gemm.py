"""Small and irregular dense products on CPUs against NumPy's library, and the micro-kernel against the peak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import numpy as np

from gossamer.codegen import Job, MicroKernel, Program, host_target
from gossamer.core.measure import Bench, Row, claim, geometric_mean
from gossamer.gemm import gemm_plan

SOURCES = ("codegen/*.py", "gemm/*.py")

SQUARES = (16, 17, 20, 24, 28, 31, 32, 33, 40, 48, 50, 56, 64, 65, 72, 80, 96, 100, 112, 127, 128)

# Matrix sizes (M, N, K) of ResNet-50's convolutions, and (N, K) of DLRM's layers at batches of 128 and 512.
RESNET = (
    (64, 12544, 147), (64, 3136, 64), (64, 3136, 576), (256, 3136, 64), (64, 3136, 256), (128, 3136, 256),
    (128, 784, 1152), (512, 784, 128), (512, 784, 256), (128, 784, 512), (256, 784, 512), (256, 196, 2304),
    (1024, 196, 256), (1024, 196, 512), (256, 196, 1024), (512, 196, 1024), (512, 49, 4608), (2048, 49, 512),
    (2048, 49, 1024), (512, 49, 2048),
)  # fmt: skip
DLRM = tuple(
    (m, n, k)
    for n, k in (
        (1, 3456), (13, 512), (128, 256), (256, 128), (256, 512),
        (512, 13), (512, 256), (512, 3456), (3456, 1), (3456, 512),
    )
    for m in (128, 512)
)  # fmt: skip
TILING = (
    *((m, 64) for m in range(20, 26)), *((80, n) for n in (16, 20, 24, 28, 32)), (6, 20), (26, 36), (46, 52), (66, 68),
)  # fmt: skip
TILING_DEPTH = 256


@claim(
    "gemm-small",
    text="square float32 products of 16 to 128 in stacks by run_many, B packed before, against np.matmul(out=), one thread",
    system=["autoGEMM"],
    peer="numpy.matmul",
    peer_package="numpy",
    unit="ratio",
    bar=1.3,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def small_squares(bench: Bench) -> Iterator[Row]:
    """Stacks of about half a megabyte an operand; B is one for the whole stack."""
    for n in SQUARES:
        items = max(4, min(512, (1 << 17) // (n * n)))
        yield _against_numpy(bench, (n, n, n), items)


@claim(
    "gemm-irregular",
    text="float32 products of DLRM layers with a side of at most 32, B packed before, against np.matmul(out=), one thread",
    system=["autoGEMM"],
    peer="numpy.matmul",
    peer_package="numpy",
    unit="ratio",
    bar=1.3,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def irregular(bench: Bench) -> Iterator[Row]:
    """Not counted and beside: the layers of ResNet-50 and DLRM whose sides are all larger than 32."""
    for shape in (*DLRM, *RESNET):
        yield _against_numpy(bench, shape, 1, counted=min(shape) <= 32)


@claim(
    "gemm-regular",
    text="float32 products of ResNet-50 and DLRM layers with sides above 32, B packed before, against np.matmul, one core",
    system=["autoGEMM"],
    peer="numpy.matmul",
    peer_package="numpy",
    unit="ratio",
    bar=1.0,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def regular(bench: Bench) -> Iterator[Row]:
    """Where vendor libraries are strong. No case may fall below 0.8."""
    for shape in (*DLRM, *RESNET):
        if min(shape) > 32:
            yield _against_numpy(bench, shape, 1)


@claim(
    "gemm-peak",
    text="share of the measured multiply-add peak that the main micro-kernel reaches on cached operands, one thread",
    system=["autoGEMM"],
    peer="multiply-adds on registers alone",
    unit="share",
    bar=0.9,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def peak(bench: Bench) -> Iterator[Row]:
    """Interleaved with chains of multiply-adds on registers; the ratio is brought to equal work."""
    from gossamer.codegen import fma_chains

    target = host_target()
    rows, vectors, depth, tiles = (12, 2, 256, 2) if target.registers == 32 else (6, 2, 256, 2)
    lanes = target.lanes()
    a, b, c = (
        np.ones(shape, np.float32)
        for shape in ((rows * tiles, depth), (depth, vectors * lanes), (rows * tiles, vectors * lanes))
    )
    job = Job(
        MicroKernel(rows, vectors), (0, 0), a.strides[0], (1, 0), b.strides[0], (2, 0), c.strides[0], depth, tiles
    )
    ours = Program([job]).bound([a.ctypes.data, b.ctypes.data, c.ctypes.data], items=64)
    chains, work = fma_chains(rows * vectors * depth * tiles * 64)
    row = bench.compare(f"{rows}x{vectors} vectors, depth {depth}", ours, chains)
    assert row.ratio is not None and row.spread is not None
    share = row.ratio / work
    gflops = 2 * rows * vectors * lanes * depth * tiles * 64 / row.ours / 1e9
    yield bench.value(row.case, share, "share", note=f"{gflops:.1f} GFLOP/s")


@claim(
    "gemm-tiling",
    text="tiles chosen by the performance model against one tile size with ragged ends, autoGEMM's shapes, one thread",
    system=["autoGEMM"],
    peer="the same generator with one tile size",
    unit="ratio",
    bar=1.1,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def dynamic_tiling(bench: Bench) -> Iterator[Row]:
    """Stacks, so that calls do not count; B is packed before for both."""
    generator = np.random.default_rng(0)
    for m, n in TILING:
        a, c = (generator.standard_normal((32, *shape), np.float32) for shape in ((m, TILING_DEPTH), (m, n)))
        b = generator.standard_normal((TILING_DEPTH, n), np.float32)
        other = c.copy()
        chosen, fixed = (gemm_plan(m, n, TILING_DEPTH, prepack_b=b, tiling=name) for name in ("dynamic", "fixed"))
        yield bench.compare((m, n, TILING_DEPTH), partial(chosen.run_many, a, c=c), partial(fixed.run_many, a, c=other))


def _against_numpy(bench: Bench, shape: tuple[int, int, int], items: int, counted: bool = True) -> Row:
    if "OPENBLAS_CORETYPE" in os.environ:
        raise RuntimeError("OPENBLAS_CORETYPE is set and would choose the peer's kernels: unset it")
    m, n, k = shape
    generator = np.random.default_rng(0)
    b = generator.standard_normal((k, n), np.float32)
    a, c = (generator.standard_normal((items, *size), np.float32) for size in ((m, k), (m, n)))
    other = c.copy()
    plan = gemm_plan(m, n, k, prepack_b=b)
    note = f"stack of {items}" if items > 1 else ""
    ours, theirs = (
        (partial(plan.run_many, a, c=c), partial(np.matmul, a, b, out=other))
        if items > 1
        else (partial(plan.run, a[0], c=c[0]), partial(np.matmul, a[0], b, out=other[0]))
    )
    return bench.compare(shape, ours, theirs, counted=counted, note=note)
