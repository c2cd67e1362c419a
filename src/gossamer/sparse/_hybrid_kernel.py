"""The hybrid partition's products on CPUs: blocks are read through their bitmaps, left-overs part by part.

These loops are the plain reading of the format, not a fast path: on CPUs :func:`gossamer.sparse.spmm` is the fast one.
Only places whose bit is set are multiplied, so that padding meets no infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import inlined, kernel, lowest_bit


@inlined
def _add(values: Any, place: int, row: int, column: int, dense: Any, out: Any) -> None:
    value = values[place]
    for j in range(dense.shape[1]):
        out[row, j] += value * dense[column, j]


@inlined
def _dot(x: Any, y: Any, row: int, column: int) -> Any:
    total = x.dtype.type(0)
    for j in range(x.shape[1]):
        total += x[row, j] * y[column, j]
    return total


@kernel
def blocks_spmm(
    row_offset: Any, window: Any, block: Any, columns: Any, bitmap: Any, values: Any, width: int, dense: Any, out: Any
) -> None:
    """``out += tensor part @ dense``; bitmap: uint64, one word for ``min(width, 8)`` columns."""
    half = min(width, 8)
    words = width // half
    for group in range(len(window)):
        for number in range(row_offset[group], row_offset[group + 1]):
            place = block[number]
            for word in range(words):
                bits = bitmap[number * words + word]
                while bits:
                    bit = lowest_bit(bits)
                    bits &= bits - np.uint64(1)
                    column = columns[number * width + word * half + bit % half]
                    _add(values, place, 8 * window[group] + bit // half, column, dense, out)
                    place += 1


@kernel
def parts_spmm(row_offset: Any, row: Any, columns: Any, values: Any, dense: Any, out: Any) -> None:
    """``out += row parts @ dense``."""
    for part in range(len(row)):
        for place in range(row_offset[part], row_offset[part + 1]):
            _add(values, place, row[part], columns[place], dense, out)


@kernel
def blocks_sddmm(
    row_offset: Any,
    window: Any,
    block: Any,
    columns: Any,
    bitmap: Any,
    entry: Any,
    width: int,
    x: Any,
    y: Any,
    out: Any,
) -> None:
    """The dot products of the tensor part, written to their places in CSR order."""
    half = min(width, 8)
    words = width // half
    for group in range(len(window)):
        for number in range(row_offset[group], row_offset[group + 1]):
            place = block[number]
            for word in range(words):
                bits = bitmap[number * words + word]
                while bits:
                    bit = lowest_bit(bits)
                    bits &= bits - np.uint64(1)
                    column = columns[number * width + word * half + bit % half]
                    out[entry[place]] = _dot(x, y, 8 * window[group] + bit // half, column)
                    place += 1


@kernel
def parts_sddmm(row_offset: Any, row: Any, columns: Any, entry: Any, x: Any, y: Any, out: Any) -> None:
    """The dot products of row parts, written to their places in CSR order."""
    for part in range(len(row)):
        for place in range(row_offset[part], row_offset[part + 1]):
            out[entry[place]] = _dot(x, y, row[part], columns[place])
