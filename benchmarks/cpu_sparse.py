"""Products of sparse matrices on CPUs against torch: real graphs, one thread (two beside), operands from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean, worst
from gossamer.sparse import SparseMatrix, read_edges, read_matrix, sddmm, spmm, spmm_plan
from gossamer.sparse._generators import communities, finite_elements, rmat, uniform

KERNELS = ("sparse/_spmm_kernel.py", "sparse/_ops.py", "sparse/_products.py", "core/jit.py")
PLANNED = (*KERNELS, "sparse/_planner.py", "sparse/_cpu_costs.py")
SAMPLED = (*KERNELS, "sparse/_sddmm_kernel.py")

# Where the data folder is absent, a generated twin of the same size and kind takes the graph's place.
GRAPHS: Mapping[str, tuple[str, Callable[[], SparseMatrix]]] = {
    "git": ("musae_edges/git_edges.csv.gz", lambda: rmat(37_700, 640_000, 1)),
    "facebook": ("musae_edges/facebook_edges.csv.gz", lambda: communities(22_470, 345_000, 2, block=400)),
    "deezer": ("gemsec_edges/deezer_HU_edges.csv.gz", lambda: uniform(47_538, 445_800, 3)),
    "squirrel": ("musae_edges/squirrel_edges.csv.gz", lambda: rmat(5_201, 480_000, 4)),
    "pubmed": ("citation_mtx/pubmed.mtx.gz", lambda: communities(19_717, 88_700, 5, block=60)),
    "condmat": ("condmat/ca-CondMat.mtx.gz", lambda: communities(23_133, 187_000, 6, block=40)),
}
WIDTHS = (32, 128)

Calls = list[Callable[[], object]]


@claim(
    "cpu-spmm",
    text="sparse graph times dense float32 matrix (32 and 128 columns) against torch.sparse.mm on CSR, one thread",
    system=["FlashSparse", "Libra"],
    peer="torch.sparse.mm",
    peer_package="torch",
    unit="ratio",
    bar=2.0,
    better="higher",
    summary=geometric_mean,
    sources=PLANNED,
)
def against_sparse_mm(bench: Bench) -> Iterator[Row]:
    """The public call, planner included; torch gets 32-bit and 64-bit indices, and the faster counts."""
    for name, matrix, note in _graphs():
        for n in WIDTHS:
            operands = _rotated(matrix.shape[1], n)
            yield bench.compare(f"{name} n={n}", _ours(matrix, operands), _torch_calls(matrix, operands), note=note)
            with bench.threads(2):
                calls = _ours(matrix, operands), _torch_calls(matrix, operands)
                yield bench.compare(f"{name} n={n}", *calls, counted=False, note=_joined("two threads", note))


@claim(
    "cpu-spmm-auto",
    text="backend='auto' against the better of torch.sparse.mm and the dense product, the worst case, one thread",
    system=["Libra"],
    peer="torch.sparse.mm or torch.mm",
    peer_package="torch",
    unit="ratio",
    bar=0.97,
    better="higher",
    summary=worst,
    sources=PLANNED,
)
def auto_never_loses(bench: Bench) -> Iterator[Row]:
    """Few and many columns, hypersparse to half dense. The remarks say which way was taken."""
    cases = {
        **{name: matrix for name, matrix, _ in _graphs()},
        "finite elements": finite_elements(5_000, 7),
        "2000 x 2000, 2 %": uniform(2_000, 80_000, 8),
        "2000 x 2000, 30 %": uniform(2_000, 1_430_000, 9),
        "1000 x 1000, 60 %": uniform(1_000, 920_000, 10),
    }
    for name, matrix in cases.items():
        for n in (1, 8, 64):
            operands = _rotated(matrix.shape[1], n)
            peers = _torch_calls(matrix, operands)
            if matrix.density > 0.005:
                dense = matrix.to_dense()
                peers["torch.mm on dense"] = [partial(torch.mm, dense, operand.clone()) for operand in operands]
            note = f"way: {spmm_plan(matrix, n).backend}"
            yield bench.compare(f"{name} n={n}", _ours(matrix, operands), peers, note=note)


@claim(
    "cpu-sddmm",
    text="sampled dense-dense float32 product on a graph (64 and 128 features) against torch sampled_addmm, one thread",
    system=["FlashSparse", "Libra"],
    peer="torch.sparse.sampled_addmm",
    peer_package="torch",
    unit="ratio",
    bar=2.0,
    better="higher",
    summary=geometric_mean,
    sources=SAMPLED,
)
def against_sampled_addmm(bench: Bench) -> Iterator[Row]:
    """torch gets the second operand in both layouts, and the faster counts."""
    for name, matrix, note in _graphs():
        for features in (64, 128):
            xs, ys = _rotated(matrix.shape[0], features), _rotated(matrix.shape[1], features, seed=1)
            yield bench.compare(f"{name} d={features}", *_sampled(matrix, xs, ys), note=note)
            with bench.threads(2):
                calls = _sampled(matrix, xs, ys)
                yield bench.compare(f"{name} d={features}", *calls, counted=False, note=_joined("two threads", note))


def _graphs() -> Iterator[tuple[str, SparseMatrix, str]]:
    """Name, weighted graph, and a remark where it is a generated twin."""
    for name, (file, twin) in GRAPHS.items():
        try:
            path = data_file(f"sparse/{file}")
        except FileNotFoundError:
            yield name, twin(), "generated twin"
            continue
        graph = read_edges(path) if ".csv" in path.name else read_matrix(path)
        weights = torch.randn(graph.nnz, generator=torch.Generator().manual_seed(5))
        yield name, graph.with_values(weights), ""


def _rotated(rows: int, columns: int, seed: int = 0) -> list[Tensor]:
    """Copies of a dense operand that together exceed the last-level cache."""
    dense = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return [dense.clone() for _ in range(min(16, copies_past_cache(dense.nbytes)))]


def _copied(matrix: SparseMatrix, index: torch.dtype) -> SparseMatrix:
    """The same matrix in memory of its own: no contender finds what the one before has brought into the cache."""
    indptr, indices = (array.to(index, copy=True) for array in (matrix.indptr, matrix.indices))
    return SparseMatrix(indptr, indices, matrix.values.clone(), matrix.shape)


def _ours(matrix: SparseMatrix, operands: list[Tensor]) -> Calls:
    return [partial(spmm, matrix, operand) for operand in operands]


def _torch_calls(matrix: SparseMatrix, operands: list[Tensor]) -> dict[str, Calls]:
    narrow, wide = _copied(matrix, torch.int32).to_torch(), _copied(matrix, torch.int64).to_torch()
    return {
        f"torch.sparse.mm, {name}": [partial(torch.sparse.mm, sparse, operand.clone()) for operand in operands]
        for name, sparse in (("int32", narrow), ("int64", wide))
    }


def _sampled(matrix: SparseMatrix, xs: list[Tensor], ys: list[Tensor]) -> tuple[Calls, dict[str, Calls]]:
    pattern = _copied(matrix, torch.int32).to_torch()
    ours: Calls = [partial(sddmm, matrix, x, y) for x, y in zip(xs, ys, strict=True)]
    transposed = [y.T.contiguous() for y in ys]
    xs, ys = [x.clone() for x in xs], [y.clone() for y in ys]
    call = torch.sparse.sampled_addmm
    return ours, {
        "sampled_addmm": [partial(call, pattern, x, y, beta=0.0) for x, y in zip(xs, transposed, strict=True)],
        "sampled_addmm, y.T": [partial(call, pattern, x, y.T, beta=0.0) for x, y in zip(xs, ys, strict=True)],
    }


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))
