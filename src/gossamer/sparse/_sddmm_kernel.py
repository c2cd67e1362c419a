"""Dense times dense where a sparse pattern asks for it, on CPUs: four dot products at a time.

::

    S[p] = X[row] . Y[column of entry p]      for four entries p of one row:
    one register of X[row] serves four rows of Y, each with two sums of its own (even and odd registers, so that eight
    multiply-adds are under way); the sums are folded into one register of four results at the end.

The dense product is never formed: the work is entries times features. Rows of ``Y`` are asked for 12 entries ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from gossamer.core.jit import INT, LANES, LONG, inlined, kernel, parallel_kernel, sum_of_lanes
from gossamer.sparse._spmm_kernel import (
    ask_for,
    data_place,
    entry_shares,
    lanes_below,
    load_index,
    load_lanes,
    multiply_add,
    vector_of,
)

_AHEAD = 12
_STEP = 16


def _shuffled(builder: Any, first: ir.Value, second: ir.Value, places: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(places)), list(places)))


def _folded(builder: Any, sums: Sequence[ir.Value]) -> ir.Value:
    """The sums of the lanes of one, two or four registers, as one register of as many."""
    if len(sums) < 4:
        totals = [sum_of_lanes(builder, vector) for vector in sums]
        out = ir.Constant(ir.VectorType(totals[0].type, len(sums)), ir.Undefined)
        for i, total in enumerate(totals):
            out = builder.insert_element(out, total, INT(i))
        return out
    even, odd = (0, 2, 8, 10, 4, 6, 12, 14), (1, 3, 9, 11, 5, 7, 13, 15)
    level = list(sums)
    for _ in range(2):
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [builder.fadd(_shuffled(builder, a, b, even), _shuffled(builder, a, b, odd)) for a, b in pairs]
    return builder.fadd(*[_shuffled(builder, level[0], level[0], range(side, side + 4)) for side in (0, 4)])


@intrinsic(prefer_literal=True)
def row_dots(
    typing: Any, count: Any, indices: Any, x: Any, y: Any, row: Any, place: Any, out: Any
) -> Any:  # fmt: skip
    """``out[p] = x[row] . y[indices[p]]`` for ``count`` entries from ``place`` on; ``count`` is 1, 2 or 4, a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    number = count.literal_value
    signature = types.void(count, indices, x, y, types.int64, types.int64, out)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, index_array, x_array, y_array, row, place, out_array = arguments
        vector = vector_of(x.dtype)
        size, wide = x.dtype.bitwidth // 8, out.dtype.bitwidth // 8
        features = builder.extract_value(context.make_array(x)(context, builder, x_array).shape, 1)
        last = builder.sub(context.make_array(indices)(context, builder, index_array).nitems, LONG(1))
        index_start = data_place(context, builder, indices, index_array)
        stride = builder.mul(features, LONG(size))
        mine = builder.add(data_place(context, builder, x, x_array), builder.mul(row, stride))
        y_start = data_place(context, builder, y, y_array)

        def row_of_y(entry: ir.Value) -> ir.Value:
            return builder.add(y_start, builder.mul(load_index(builder, indices.dtype, index_start, entry), stride))

        entries = [builder.add(place, LONG(i)) for i in range(number)]
        theirs = [row_of_y(entry) for entry in entries]
        later = [builder.add(entry, LONG(_AHEAD)) for entry in entries]
        later = [builder.select(builder.icmp_signed("<", entry, last), entry, last) for entry in later]
        ahead = [row_of_y(entry) for entry in later]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(2 * number)]

        def add_products(offset: ir.Value, half: int, mask: ir.Value | None = None) -> None:
            left = load_lanes(builder, x.dtype, builder.add(mine, offset), mask)
            for start, total in zip(theirs, sums[half::2], strict=True):
                right = load_lanes(builder, y.dtype, builder.add(start, offset), mask)
                builder.store(multiply_add(builder, vector, [left, right, builder.load(total)]), total)

        whole = builder.and_(features, LONG(-_STEP))
        with cgutils.for_range_slice(builder, LONG(0), whole, LONG(_STEP), intp=LONG) as (feature, _):
            offset = builder.mul(feature, LONG(size))
            for start in ahead:
                ask_for(builder, builder.add(start, offset), min(64, _STEP * size))
            for half in range(_STEP // LANES):
                add_products(builder.add(offset, LONG(half * LANES * size)), half)
        with cgutils.for_range_slice(builder, whole, features, LONG(LANES), intp=LONG) as (feature, _):
            mask = lanes_below(builder, builder.sub(features, feature))
            add_products(builder.mul(feature, LONG(size)), 0, mask)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        result = _folded(builder, [builder.fadd(builder.load(even), builder.load(odd)) for even, odd in pairs])
        target = builder.add(data_place(context, builder, out, out_array), builder.mul(place, LONG(wide)))
        builder.store(result, builder.inttoptr(target, result.type.as_pointer())).align = wide
        return context.get_dummy_value()

    return signature, code


@inlined
def _run(indices: Any, x: Any, y: Any, row: int, begin: int, end: int, out: Any) -> None:
    place = begin
    while end - place >= 4:
        row_dots(4, indices, x, y, row, place, out)
        place += 4
    if end - place >= 2:
        row_dots(2, indices, x, y, row, place, out)
        place += 2
    if end > place:
        row_dots(1, indices, x, y, row, place, out)


@kernel
def _share(indptr: Any, indices: Any, x: Any, y: Any, out: Any, row: int, begin: int, end: int) -> None:
    place = begin
    while place < end:
        stop: Any = min(end, np.int64(indptr[row + 1]))
        if stop > place:
            _run(indices, x, y, row, place, stop, out)
            place = stop
        row += 1


@parallel_kernel
def _threaded(indptr: Any, indices: Any, x: Any, y: Any, out: Any, row_cuts: Any, entry_cuts: Any) -> None:
    for number in prange(len(row_cuts) - 1):
        _share(indptr, indices, x, y, out, row_cuts[number], entry_cuts[number], entry_cuts[number + 1])


def sddmm_rows(
    indptr: np.ndarray, indices: np.ndarray, x: np.ndarray, y: np.ndarray, out: np.ndarray, threads: int
) -> None:
    """``out[p] = x[row of p] . y[column of p]`` for every entry ``p`` of compressed rows.

    x: row-major ``(m, d)``, y: ``(k, d)``, both float32, float64, int16 (float16 bits) or uint16 (bfloat16 bits).
    out: ``(nnz,)`` float32, or float64 where ``x`` and ``y`` are.
    """
    if not len(indices):
        return
    parts = max(1, min(threads, len(indices) // 1024 + 1))
    if parts == 1:
        _share(indptr, indices, x, y, out, 0, 0, len(indices))
    else:
        _threaded(indptr, indices, x, y, out, *entry_shares(indptr, parts))
