"""Sparse times dense on CPUs: eight vector registers of the result stay in place while a row's entries go by.

::

    C[row, 64 columns]  =  sum over the row's entries of  value * B[column of the entry, 64 columns]
         registers               broadcast                   read once, asked for 24 entries ahead

The columns are worked through panel by panel (64, 32, 16, 8, and a masked rest; at most 32 doubles), so that the panel
of ``B`` stays in the cache between rows. What limits such a product is waiting for rows of ``B`` that no hardware
predicts: each step asks for the row of a later entry. Threads get equal shares of entries, not of rows: a row may be
cut, and its parts are added in a fixed order afterwards. Entries outside the pattern are never multiplied, so that
infinities in ``B`` stay where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from gossamer.core.jit import (
    BYTE,
    FLOAT,
    HALF,
    INT,
    LANES,
    LONG,
    call_llvm,
    inlined,
    item_bytes,
    kernel,
    load_from,
    parallel_kernel,
)

AHEAD = 24
_CHAINS = 4  # sums that have to be under way for the multiply-adds to be busy
_LEAST = 1024  # entries below which a thread of its own does not pay
_DOUBLE = ir.DoubleType()
_BIT = ir.IntType(1)


def vector_of(dtype: Any) -> ir.VectorType:
    """The register type that sums over an array of ``dtype`` are kept in: doubles for doubles, floats for the rest."""
    return ir.VectorType(_DOUBLE if dtype == types.float64 else FLOAT, LANES)


def data_place(context: Any, builder: Any, kind: Any, array: Any) -> ir.Value:
    """The address of an array's first entry, int64."""
    return builder.ptrtoint(context.make_array(kind)(context, builder, array).data, LONG)


def load_index(builder: Any, dtype: Any, start: ir.Value, place: ir.Value) -> ir.Value:
    """Entry ``place`` of an int32 or int64 array, as int64."""
    size = dtype.bitwidth // 8
    value = load_from(builder, builder.add(start, builder.mul(place, LONG(size))), ir.IntType(8 * size), size)
    return value if size == 8 else builder.sext(value, LONG)


def load_lanes(builder: Any, dtype: Any, place: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """Eight entries of an array of ``dtype`` from an address as floats or doubles; lanes outside ``mask`` are zero."""
    size = dtype.bitwidth // 8
    stored = {8: _DOUBLE, 4: FLOAT, 2: HALF}[size]
    kind = ir.VectorType(stored, LANES)
    if mask is None:
        loaded = load_from(builder, place, kind, size)
    else:
        suffix = {8: "f64", 4: "f32", 2: "i16"}[size]
        pointer = builder.inttoptr(place, kind.as_pointer())
        arguments = [pointer, INT(size), mask, ir.Constant(kind, None)]
        loaded = call_llvm(builder, f"llvm.masked.load.v{LANES}{suffix}.p0", kind, arguments)
    if size > 2:
        return loaded
    if dtype == types.uint16:
        wide = builder.zext(loaded, ir.VectorType(INT, LANES))
        shift = ir.Constant(ir.VectorType(INT, LANES), [16] * LANES)
        return builder.bitcast(builder.shl(wide, shift), ir.VectorType(FLOAT, LANES))
    halves = builder.bitcast(loaded, ir.VectorType(ir.HalfType(), LANES))
    return builder.fpext(halves, ir.VectorType(FLOAT, LANES))


def multiply_add(builder: Any, vector: ir.VectorType, operands: Sequence[ir.Value]) -> ir.Value:
    """``a * b + c`` of three registers."""
    suffix = "f64" if vector.element == _DOUBLE else "f32"
    return call_llvm(builder, f"llvm.fmuladd.v{LANES}{suffix}", vector, operands)


def lanes_below(builder: Any, count: ir.Value) -> ir.Value:
    """The mask of the first ``count`` lanes."""
    longs = ir.VectorType(LONG, LANES)
    lane = ir.Constant(longs, list(range(LANES)))
    return builder.icmp_signed("<", lane, broadcast(builder, longs, count))


def broadcast(builder: Any, vector: ir.VectorType, value: ir.Value) -> ir.Value:
    """``value`` in every lane."""
    nothing = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(nothing, value, INT(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INT, LANES), None))


def ask_for(builder: Any, place: ir.Value, nbytes: int) -> None:
    """Ask for ``nbytes`` from an address, which need not be valid."""
    for offset in range(0, nbytes, 64):
        pointer = builder.inttoptr(builder.add(place, LONG(offset)), BYTE.as_pointer())
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, INT(0), INT(3), INT(1)])


@intrinsic(prefer_literal=True)
def row_panel(
    typing: Any, registers: Any, values: Any, indices: Any, dense: Any, begin: Any, end: Any, column: Any, out: Any,
    row: Any, count: Any,
) -> Any:  # fmt: skip
    """``out[row, column:] = sum of values[p] * dense[indices[p], column:]`` for ``begin <= p < end``.

    registers: how many of eight lanes are written, a literal; 0 stands for one register with its first ``count`` lanes.
    dense, out: row-major with as many columns as ``dense.shape[1]``; ``begin < len(indices)`` if they are not empty.
    """
    if not isinstance(registers, types.IntegerLiteral):
        return None
    number = max(1, registers.literal_value)
    masked = registers.literal_value == 0
    long = types.int64
    signature = types.void(registers, values, indices, dense, long, long, long, out, long, long)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, value_array, index_array, dense_array, begin, end, column, out_array, row, count = arguments
        vector = vector_of(dense.dtype)
        size, wide = dense.dtype.bitwidth // 8, values.dtype.bitwidth // 8
        columns = builder.extract_value(context.make_array(dense)(context, builder, dense_array).shape, 1)
        last = builder.sub(context.make_array(indices)(context, builder, index_array).nitems, LONG(1))
        value_start = data_place(context, builder, values, value_array)
        index_start = data_place(context, builder, indices, index_array)
        panel = builder.add(data_place(context, builder, dense, dense_array), builder.mul(column, LONG(size)))
        stride = builder.mul(columns, LONG(size))
        mask = lanes_below(builder, count) if masked else None
        runs = max(1, _CHAINS // number)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(runs * number)]

        def add_entry(place: ir.Value, totals: Sequence[ir.Value]) -> None:
            value = load_from(builder, builder.add(value_start, builder.mul(place, LONG(wide))), vector.element, wide)
            factor = broadcast(builder, vector, value)
            source = builder.add(panel, builder.mul(load_index(builder, indices.dtype, index_start, place), stride))
            later = builder.add(place, LONG(AHEAD))
            later = builder.select(builder.icmp_signed("<", later, last), later, last)
            next_row = builder.mul(load_index(builder, indices.dtype, index_start, later), stride)
            ask_for(builder, builder.add(panel, next_row), number * LANES * size)
            for i, total in enumerate(totals):
                entries = load_lanes(builder, dense.dtype, builder.add(source, LONG(i * LANES * size)), mask)
                builder.store(multiply_add(builder, vector, [factor, entries, builder.load(total)]), total)

        whole = begin
        if runs > 1:
            whole = builder.add(begin, builder.and_(builder.sub(end, begin), LONG(-runs)))
            with cgutils.for_range_slice(builder, begin, whole, LONG(runs), intp=LONG) as (place, _):
                for run in range(runs):
                    add_entry(builder.add(place, LONG(run)), sums[run * number : (run + 1) * number])
        with cgutils.for_range_slice(builder, whole, end, LONG(1), intp=LONG) as (place, _):
            add_entry(place, sums[:number])
        totals = [builder.load(total) for total in sums[:number]]
        for run in range(1, runs):
            others = sums[run * number : (run + 1) * number]
            totals = [builder.fadd(total, builder.load(other)) for total, other in zip(totals, others, strict=True)]
        target = builder.add(builder.mul(row, columns), column)
        target = builder.add(data_place(context, builder, out, out_array), builder.mul(target, LONG(wide)))
        for i, total in enumerate(totals):
            pointer = builder.inttoptr(builder.add(target, LONG(i * LANES * wide)), vector.as_pointer())
            if mask is None:
                builder.store(total, pointer).align = wide
            else:
                suffix = "f64" if wide == 8 else "f32"
                operands = [total, pointer, INT(wide), mask]
                call_llvm(builder, f"llvm.masked.store.v{LANES}{suffix}.p0", ir.VoidType(), operands)
        return context.get_dummy_value()

    return signature, code


@inlined
def _row(
    width: int, values: Any, indices: Any, dense: Any, begin: int, end: int, column: int, out: Any, row: int
) -> None:
    if width == 64:
        row_panel(8, values, indices, dense, begin, end, column, out, row, 0)
    elif width == 32:
        row_panel(4, values, indices, dense, begin, end, column, out, row, 0)
    elif width == 16:
        row_panel(2, values, indices, dense, begin, end, column, out, row, 0)
    elif width == 8:
        row_panel(1, values, indices, dense, begin, end, column, out, row, 0)
    else:
        row_panel(0, values, indices, dense, begin, end, column, out, row, width)


@kernel
def _share(
    indptr: Any, indices: Any, values: Any, dense: Any, out: Any, spare: int, first: int, last: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Entries ``begin`` to ``end``, which start in row ``first`` and end in row ``last``.

    What belongs to a first row that began in an earlier share goes to row ``spare`` of ``out``.
    """
    columns = dense.shape[1]
    column = 0
    while column < columns:
        left = columns - column
        width = (
            64
            if left >= 64 and item_bytes(dense) < 8
            else 32
            if left >= 32
            else 16
            if left >= 16
            else 8
            if left >= 8
            else left
        )
        for row in range(first, min(last + 1, len(indptr) - 1)):
            start: Any = max(begin, np.int64(indptr[row]))
            stop: Any = min(end, np.int64(indptr[row + 1]))
            if row < last or stop > start:
                _row(width, values, indices, dense, start, stop, column, out, spare if start > indptr[row] else row)
        column += width


@parallel_kernel
def _threaded(indptr: Any, indices: Any, values: Any, dense: Any, out: Any, row_cuts: Any, entry_cuts: Any) -> None:
    for number in prange(len(row_cuts) - 1):
        _share(
            indptr, indices, values, dense, out, len(indptr) - 1 + number, row_cuts[number], row_cuts[number + 1],
            entry_cuts[number], entry_cuts[number + 1],
        )  # fmt: skip


def entry_shares(indptr: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the entries into ``parts`` equal runs: the row in which each run starts, and its first entry.

    Both int64 ``(parts + 1,)``; runs may start in the middle of a row.

    >>> entry_shares(np.array([0, 6, 6, 8]), 2)
    (array([0, 0, 3]), array([0, 4, 8]))
    """
    entries = np.linspace(0, indptr[-1], parts + 1).astype(np.int64)
    rows = np.searchsorted(indptr, entries, side="right").astype(np.int64) - 1
    rows[0], rows[-1] = 0, len(indptr) - 1
    return rows, entries


def spmm_rows(
    indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, dense: np.ndarray, out: np.ndarray, threads: int
) -> None:
    """``out[:m] = A @ dense`` for compressed rows ``A``.

    indptr, indices: int32 or int64. values, out: float32, or float64 where ``dense`` is. dense: row-major
    ``(k, n)`` float32, float64, int16 (float16 bits) or uint16 (bfloat16 bits). out: row-major
    ``(m + threads, n)``; its last rows are scratch.
    """
    rows = len(indptr) - 1
    parts = max(1, min(threads, len(out) - rows, len(indices) // _LEAST + 1))
    if not out.size or not len(indices):
        out[:rows] = 0
    elif parts == 1:
        _share(indptr, indices, values, dense, out, rows, 0, rows, 0, len(indices))
    else:
        row_cuts, entry_cuts = entry_shares(indptr, parts)
        out[rows:] = 0
        _threaded(indptr, indices, values, dense, out, row_cuts, entry_cuts)
        for number in range(1, parts):
            row = row_cuts[number]
            if row < rows and entry_cuts[number] > indptr[row]:
                out[row] += out[rows + number]
