"""Which kernel multiplies on a GPU: every one that may be fastest is timed once for patterns of a kind and their columns.

What decides between them, how far neighbouring rows share columns and how the caches take it, is not to be had from counts
alone, and a timing costs about as much as a few hundred products. The answer is kept for patterns whose counts are alike,
so that a training step with a new subgraph each time pays for it once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gossamer.core.measure import Bench, median
from gossamer.sparse._entries_gpu import EntriesVariant, entries_sddmm
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._mebcrs import MEBCRS
from gossamer.sparse._rows_gpu import RowsVariant, rows_spmm
from gossamer.sparse._vectors_gpu import VectorsVariant, vectors_spmm

ROWS: Mapping[str, RowsVariant] = {
    "rows": RowsVariant(),
    "rows-wide": RowsVariant(lanes=32, longest=64),
    "rows-cut": RowsVariant(lanes=8, longest=64),
    "rows-sorted": RowsVariant(lanes=8, window=1 << 30),
}
VECTORS: Mapping[str, VectorsVariant] = {
    "vectors": VectorsVariant(unroll=4),
    "vectors-wide": VectorsVariant(tiles=2),
}
ENTRIES = (EntriesVariant(threads=128), EntriesVariant(rounds=8, features_outer=True))
"""Ways of sampled products: entries or features as the outer loop."""

_NEAR, _LAUNCHES = 1.6, 2e-4
"""Ways that take so many times longer than the best in a first, rough timing are not timed again, unless they take so few
seconds that launching them may be most of it."""
_ROTATED_BYTES, _MOST_BYTES = 128 << 20, 1 << 30

_sampled_by: dict[str, EntriesVariant] = {}

Calls = list[Callable[[], object]]


def own_ways(matrix: SparseMatrix) -> list[str]:
    """Our kernels for values of this type, the one for any case first.

    Tensor cores round float32 to 10 bits behind the point: they are taken only where torch may do so too
    (``torch.set_float32_matmul_precision("high")``).
    """
    if matrix.dtype == torch.float64 or matrix.dtype == torch.float32 and not _tf32_allowed():
        return list(ROWS)
    return [*ROWS, *VECTORS]


def multiply(matrix: SparseMatrix, dense: Tensor, way: str) -> Tensor:
    """The product by one of our kernels, without gradients."""
    if way in ROWS:
        return rows_spmm(matrix.indptr, matrix.indices, matrix.values.detach(), dense, ROWS[way])
    return vectors_spmm(_in_vectors(matrix), dense, VECTORS[way])


def race(calls: Mapping[str, Calls]) -> dict[str, float]:
    """Seconds a call of every contender that is near the fastest, as a CUDA graph replays them."""
    rough = {name: _rough_seconds(turns) for name, turns in calls.items()}
    near = [name for name in calls if rough[name] <= max(_LAUNCHES, _NEAR * min(rough.values()))]
    bench = Bench(samples=5, sample_seconds=5e-4)
    with bench.cuda_graphs():
        return {name: median(bench.seconds(calls[name])) for name in near}


def rotated(rows: int, columns: int, like: Tensor) -> list[Tensor]:
    """Random matrices that together exceed the L2 cache, as far as they are not too large."""
    nbytes = max(1, rows * columns * like.element_size())
    copies = max(1, min(8, math.ceil(_ROTATED_BYTES / nbytes), _MOST_BYTES // nbytes))
    generator = torch.Generator(like.device).manual_seed(0)  # torch's own stays as it is: a seeded training is replayed
    made = (torch.randn(rows, columns, device=like.device, generator=generator) for _ in range(copies))
    return [matrix.to(like.dtype) for matrix in made]


def class_of(matrix: SparseMatrix, n: int, ways: Sequence[str]) -> str:
    """Products whose fastest way is taken to be the same: sizes, entries and longest row to a factor of 1.4."""
    longest = int(matrix.indptr.diff().max())
    sizes = "x".join(str(round(2 * math.log2(max(1, size)))) for size in (*matrix.shape, matrix.nnz, longest))
    wide = n if n <= 16 else round(4 * math.log2(n))
    return f"{matrix.device} {matrix.dtype} {sizes} n {wide} {','.join(ways)}"


def sampled(pattern: SparseMatrix, x: Tensor, y: Tensor) -> Tensor:
    """The sampled product by the faster kernel, found by timing both once for a kind of pattern and number of features."""
    memo = f"sampled {x.shape[1]} {x.dtype}"
    variant: EntriesVariant | None = pattern._memo.get(memo)
    if variant is None:
        if torch.cuda.is_current_stream_capturing():
            return entries_sddmm(pattern.indptr, pattern.indices, x, y, ENTRIES[0])
        key = class_of(pattern, x.shape[1], (memo,))
        if key not in _sampled_by:
            operands = list(zip(*(rotated(len(operand), x.shape[1], x) for operand in (x, y)), strict=False))
            product = partial(entries_sddmm, pattern.indptr, pattern.indices)
            seconds = race({
                str(i): [partial(product, *pair, way) for pair in operands] for i, way in enumerate(ENTRIES)
            })  # fmt: skip
            _sampled_by[key] = ENTRIES[int(min(seconds, key=seconds.__getitem__))]
        variant = pattern._memo[memo] = _sampled_by[key]
    return entries_sddmm(pattern.indptr, pattern.indices, x, y, variant)


def _rough_seconds(calls: Calls) -> float:
    """Of one call, after one to compile and to prepare the pattern."""
    calls[0]()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for call in calls[:2]:
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / len(calls[:2])


def _in_vectors(matrix: SparseMatrix) -> MEBCRS:
    """The matrix in the tensor cores' format: the pattern's part is made once, values are filled in when they change."""
    values, known = matrix.values, matrix._memo.get("vectors")
    form: MEBCRS
    if known is None or known[2].values.dtype != values.dtype:
        form = MEBCRS.from_matrix(matrix.with_values(values.detach()))
    elif known[0] is values and known[1] == values._version:
        form = known[2]
        return form
    else:
        form = known[2].with_values(values.detach())
    matrix._memo["vectors"] = values, values._version, form
    return form


def _tf32_allowed() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
