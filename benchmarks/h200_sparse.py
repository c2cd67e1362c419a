"""Sparse products on one GPU against cuSPARSE: graphs, a mesh, and dense spots in scattered backgrounds.

Times are CUDA-graph replays with dense operands that rotate past the L2 cache. The peer is the fastest of cuSPARSE's
algorithms for CSR, called directly and preprocessed, each in the type of the operands with float32 sums. Ours is the public
call; its plan (made beforehand, as cuSPARSE's preprocessing is) says which kernel ran. Matrices keep their natural order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from benchmarks._cusparse import Sddmm, Spmm
from torch import Tensor

from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, geometric_mean, median, worst
from gossamer.sparse import SparseMatrix, read_edges, read_matrix, sddmm, spmm, spmm_plan
from gossamer.sparse._generators import communities, finite_elements, generated, mixed, rmat, uniform

KERNELS = ("sparse/kernels/*.cu", "sparse/_gpu_*.py", "sparse/_rows_*.py", "core/nvrtc.py")
PRODUCTS = (*KERNELS, "sparse/_vectors_gpu.py", "sparse/_mebcrs.py", "sparse/_planner.py")
SAMPLED = (*KERNELS, "sparse/_entries_gpu.py")
PEER = "cuSPARSE SpMM, the fastest of its CSR algorithms"
WIDTHS = (64, 128, 256, 512)
FULL, HALF = torch.float32, torch.float16
_ROTATED, _SLOW_ALG1 = 128 << 20, 3_000_000
_DENSE_BYTES = 1 << 28

# Where the data folder is absent, a generated twin of the same size and kind takes a graph's place.
_REAL: Mapping[str, tuple[str, Callable[[str], SparseMatrix]]] = {
    "git": ("musae_edges/git_edges.csv.gz", lambda device: rmat(37_700, 640_000, 1, device)),
    "deezer": ("gemsec_edges/deezer_HU_edges.csv.gz", lambda device: uniform(47_538, 445_800, 3, device=device)),
    "pubmed": ("citation_mtx/pubmed.mtx.gz", lambda device: communities(19_717, 88_700, 5, 60, device)),
    "facebook": ("musae_edges/facebook_edges.csv.gz", lambda device: communities(22_470, 345_000, 2, 400, device)),
    "squirrel": ("musae_edges/squirrel_edges.csv.gz", lambda device: rmat(5_201, 480_000, 4, device)),
    "condmat": ("condmat/ca-CondMat.mtx.gz", lambda device: communities(23_133, 187_000, 6, 40, device)),
}
EIGHT = ("git", "deezer", "pubmed", "rmat200k", "rmat20", "uni100k", "sbm100k", "fem500k")
SIX = tuple(name for name in EIGHT if name not in ("rmat20", "fem500k"))

# More kinds and sizes, for the planner: thirty matrices with those above.
_MORE: Mapping[str, Callable[[str], SparseMatrix]] = {
    **{f"rmat {n >> 10}k": partial(rmat, n, 16 * n, 21) for n in (1 << 12, 1 << 14, 1 << 16, 1 << 18)},
    **{
        f"uniform {n // 1000}k, {degree} a row": partial(uniform, n, n * degree, 22, None)
        for n, degree in ((10_000, 4), (10_000, 100), (50_000, 16), (300_000, 8))
    },
    **{
        f"communities {n // 1000}k of {block}": partial(communities, n, 40 * n, 23, block)
        for n, block in ((20_000, 50), (50_000, 200), (100_000, 64))
    },
    **{
        f"mesh {nodes // 1000}k x {unknowns}": partial(finite_elements, nodes, 24, unknowns)
        for nodes, unknowns in ((10_000, 1), (10_000, 4), (30_000, 8))
    },
    **{f"mixed {share:.1f}": partial(mixed, 60_000, 3_000_000, share, 25) for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)},
    "half dense 2k": lambda device: uniform(2_000, 2_800_000, 26, device=device),
    "tenth dense 3k": lambda device: uniform(3_000, 950_000, 27, device=device),
}


@claim(
    "h200-spmm-fp32",
    text="sparse times dense float32 (tf32 where faster; 64 to 512 columns) on seven graphs and a mesh on an H200",
    system=["FlashSparse", "Libra"], peer=PEER, unit="ratio", bar=1.45, better="higher", summary=geometric_mean,
    sources=PRODUCTS,
)  # fmt: skip
def full_precision(bench: Bench) -> Iterator[Row]:
    """With torch's precision "high" (remarks say where tensor cores ran); beside it the mesh in full float32."""
    torch.set_float32_matmul_precision("high")
    try:
        yield from _eight(bench, FULL)
    finally:
        torch.set_float32_matmul_precision("highest")
    for row in _eight(bench, FULL, ("fem500k",)):
        yield replace(row, case=f"{row.case}, tf32 not allowed", counted=False)


@claim(
    "h200-spmm-fp16",
    text="sparse times dense float16, float32 sums (64 to 512 columns) on seven graphs and a mesh on an H200",
    system=["FlashSparse", "Libra"], peer=PEER, unit="ratio", bar=1.3, better="higher", summary=geometric_mean,
    sources=PRODUCTS,
)  # fmt: skip
def half_precision(bench: Bench) -> Iterator[Row]:
    yield from _eight(bench, HALF)


@claim(
    "h200-spmm-auto",
    text="backend='auto' against the better of cuSPARSE and the dense product on thirty matrices, worst case, on an H200",
    system=["Libra"], peer="cuSPARSE SpMM or torch.mm", unit="ratio", bar=0.97, better="higher", summary=worst,
    sources=PRODUCTS,
)  # fmt: skip
def auto_never_loses(bench: Bench) -> Iterator[Row]:
    """Hypersparse to half dense, few and many columns; the remarks say which way was taken."""
    for name in (*_REAL, *_MORE, "uni100k", "sbm100k"):
        for dtype in (FULL, HALF):
            matrix = _matrix(name).to(dtype=dtype)
            for n in (32, 128):
                yield _spmm_row(bench, name, matrix, n, dense=True)
    _matrix.cache_clear()


@claim(
    "h200-sddmm",
    text="sampled product of float32 matrices with 128 features on six graphs on an H200",
    system=["FlashSparse", "Libra"], peer="cuSPARSE SDDMM", unit="ratio", bar=3.0, better="higher",
    summary=geometric_mean, sources=SAMPLED,
)  # fmt: skip
def sampled_products(bench: Bench) -> Iterator[Row]:
    """float16 beside, not counted: cuSPARSE's own type class."""
    for name in SIX:
        for dtype in (FULL, HALF):
            pattern = _matrix(name).to(dtype=dtype)
            xs, ys = (_rotated(size, 128, dtype, seed) for seed, size in enumerate(pattern.shape))
            pairs = list(zip(xs, ys, strict=False))
            peer = Sddmm(pattern.indptr, pattern.indices, pattern.shape, 128, dtype)
            found, expected = sddmm(pattern, *pairs[0]).values, peer(*pairs[0])
            assert float((found - expected).norm() / expected.norm()) < 4 * torch.finfo(dtype).eps
            with bench.cuda_graphs():
                row = bench.compare(
                    f"{name} {_short(dtype)}",
                    [partial(sddmm, pattern, *pair) for pair in pairs],
                    [partial(peer, *pair) for pair in pairs],
                    counted=dtype == FULL,
                )
            yield row


def _eight(bench: Bench, dtype: torch.dtype, names: Sequence[str] = EIGHT) -> Iterator[Row]:
    for name in names:
        matrix = _matrix(name).to(dtype=dtype)
        for n in WIDTHS:
            yield _spmm_row(bench, name, matrix, n)
        _matrix.cache_clear()


def _spmm_row(bench: Bench, name: str, matrix: SparseMatrix, n: int, dense: bool = False) -> Row:
    operands = _rotated(matrix.shape[1], n, matrix.dtype)
    arrays = matrix.indptr.int(), matrix.indices.int(), matrix.values
    peers: dict[str, list[Callable[[], Tensor]]] = {}
    for algorithm in ("ALG1", "ALG2", "ALG3"):
        if algorithm != "ALG1" or matrix.nnz < _SLOW_ALG1:
            product = Spmm(*arrays, matrix.shape, n, algorithm)
            peers[f"cuSPARSE {algorithm}"] = [partial(product, operand) for operand in operands]
    if dense and matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize <= _DENSE_BYTES:
        full = matrix.to_dense()
        peers["torch.mm"] = [partial(torch.mm, full, operand) for operand in operands]
    plan = spmm_plan(matrix, n)
    found, expected = spmm(matrix, operands[0]), peers["cuSPARSE ALG2"][0]()
    step = 2.0**-10 if plan.backend.startswith("vectors") else torch.finfo(matrix.dtype).eps
    assert float((found - expected).float().norm() / expected.float().norm()) < 4 * step
    with bench.cuda_graphs():
        row = bench.compare(f"{name} n={n} {_short(matrix.dtype)}", [partial(spmm, matrix, b) for b in operands], peers)
    size = matrix.dtype.itemsize
    least = matrix.nnz * (4 + size) + 4 * len(matrix.indptr) + n * size * sum(matrix.shape)
    share = least / row.ours / _copy_speed()
    return replace(row, note=f"{plan.backend}; {100 * share:.0f} % of the time a copy of these bytes takes")


@cache
def _matrix(name: str) -> SparseMatrix:
    if name in _MORE:
        return _MORE[name]("cuda")
    if name not in _REAL:
        return generated(name, "cuda")
    file, twin = _REAL[name]
    try:
        path = data_file(f"sparse/{file}")
    except FileNotFoundError:
        return twin("cuda")
    graph = read_edges(path) if ".csv" in path.name else read_matrix(path)
    return graph.with_values(torch.randn(graph.nnz, generator=torch.Generator().manual_seed(5))).to("cuda")


def _rotated(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Copies of a dense operand that together exceed the L2 cache four times, as far as memory goes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    copies = max(2, min(32, math.ceil(2 * _ROTATED / (rows * columns * dtype.itemsize))))
    return [torch.randn(rows, columns, device="cuda", generator=generator).to(dtype) for _ in range(copies)]


def _short(dtype: torch.dtype) -> str:
    return "fp16" if dtype == HALF else "fp32"


@cache
def _copy_speed() -> float:
    """Bytes read and written a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bench = Bench(samples=5)
    with bench.cuda_graphs():
        return 2 * source.numel() / median(bench.seconds(lambda: target.copy_(source)))
