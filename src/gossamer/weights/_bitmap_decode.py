"""From the row layout back to the dense matrix, eight weights at a time; plain loops for processors without AVX2."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from gossamer.core.jit import (
    Code,
    address,
    inlined,
    item_bytes,
    kernel,
    load_half_word,
    lowest_bit,
    parallel_kernel,
    popcount,
    popcount_low,
)
from gossamer.weights._bitmap_expand import FEATURES, shuffle_table, spread_halves, spread_words, table_offsets


def decode_rows(
    bitmap: np.ndarray, values: np.ndarray, offsets: np.ndarray, dense: np.ndarray, features: frozenset[str]
) -> None:
    """Write the bit-pattern matrix ``dense`` ``(rows, columns)``; ``values`` has its type, uint16 or uint32."""
    if features >= FEATURES:
        kind = "float32" if dense.itemsize == 4 else "int16"
        _expand(bitmap, values, offsets, dense, shuffle_table(kind))
    else:
        _scatter(bitmap, values, offsets, dense)


@intrinsic
def _spread8(typing: Any, values: Any, place: Any, table: Any, offset: Any, target: Any) -> tuple[Any, Code]:
    """Write eight entries to ``target``: packed values from ``place`` in the marked lanes, zeros elsewhere."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, place, table, offset, target = arguments
        spread_entries = spread_words if signature.args[0].dtype.bitwidth == 32 else spread_halves
        spread = spread_entries(builder, place, table, offset)
        written = builder.store(spread, builder.inttoptr(target, spread.type.as_pointer()))
        written.align = 1
        return context.get_dummy_value()

    return types.void(values, types.int64, types.int64, types.int64, types.int64), code


@inlined
def _spread_four(values: Any, place: int, table: int, marks: int, target: int) -> int:
    """Write 32 entries; the place of the values that follow."""
    size = item_bytes(values)
    offsets = table_offsets(marks)
    first, second = offsets & 0xFFFF, (offsets >> 16) & 0xFFFF
    third, fourth = (offsets >> 32) & 0xFFFF, (offsets >> 48) & 0xFFFF
    middle = place + size * popcount_low(offsets)
    _spread8(values, place, table, first, target)
    _spread8(values, place + size * popcount(first), table, second, target + 8 * size)
    _spread8(values, middle, table, third, target + 16 * size)
    _spread8(values, middle + size * popcount(third), table, fourth, target + 24 * size)
    return place + size * popcount(offsets)


@kernel
def _spread_row(values: Any, place: int, table: int, marks: int, columns: int, target: int) -> None:
    """Write as many whole groups of 32 entries of a row as there are."""
    for group in range(columns // 32):
        marked = load_half_word(marks + 4 * group)
        place = _spread_four(values, place, table, marked, target + 32 * item_bytes(values) * group)


@parallel_kernel
def _expand(bitmap: Any, values: Any, offsets: Any, dense: Any, table: Any) -> None:
    rows, columns = dense.shape
    words = (columns + 63) // 64
    size = item_bytes(values)
    rest = columns // 32 * 32
    for row in prange(rows):
        place = address(values) + size * offsets[row]
        target = address(dense) + size * columns * row
        _spread_row(values, place, address(table), address(bitmap) + 8 * words * row, columns, target)
        if rest < columns:
            _scatter_rest(bitmap, values, offsets, dense, row, rest)


@inlined
def _scatter_rest(bitmap: Any, values: Any, offsets: Any, dense: Any, row: int, start: int) -> None:
    """Write the entries of a row from column ``start`` of its last word on, counting its values from the row's end."""
    columns = dense.shape[1]
    words = (columns + 63) // 64
    marks = bitmap[row * words + words - 1] >> np.uint64(start % 64)
    place = offsets[row + 1] - popcount(marks)
    dense[row, start:] = 0
    while marks:
        dense[row, start + lowest_bit(marks)] = values[place]
        place += 1
        marks &= marks - np.uint64(1)


@parallel_kernel
def _scatter(bitmap: Any, values: Any, offsets: Any, dense: Any) -> None:
    rows, columns = dense.shape
    words = (columns + 63) // 64
    for row in prange(rows):
        dense[row] = 0
        place = offsets[row]
        for word in range(words):
            marks = bitmap[row * words + word]
            while marks:
                dense[row, 64 * word + lowest_bit(marks)] = values[place]
                place += 1
                marks &= marks - np.uint64(1)
