"""The row layout of bitmap weights: encoding and checking.

Every row of ``K`` columns is cut into words of 64 columns. ``bitmap[row, word]`` has bit ``j`` set where column
``64 * word + j`` is stored (lowest bit first, bits past ``K`` clear); ``values`` holds the stored entries in reading order
and row ``r`` has those numbered ``row_offset[r] : row_offset[r + 1]``. ``SPARE`` zeros follow the last value, so that a
kernel may load a whole register from anywhere in a row.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from gossamer.core.jit import kernel, lowest_bit, parallel_kernel, popcount

SPARE = 32
"""Zeros after the last value: 64 bytes of a 16-bit type."""


def encode_rows(bits: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bitmap uint64 ``(rows * words,)``, values, and row offsets int64 ``(rows + 1,)`` of a bit-pattern matrix.

    bits: ``(rows, columns)``, uint16 or uint32. kept: an entry is stored where ``entry & kept`` is not zero.
    """
    rows, columns = bits.shape
    bitmap = np.empty(rows * words_of(columns), np.uint64)
    counts = np.empty(rows, np.int64)
    mark_rows(bits, bits.dtype.type(kept), bitmap, counts)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    values = np.empty(offsets[-1] + SPARE, bits.dtype)
    values[offsets[-1] :] = 0
    _collect(bits, bitmap, offsets, values)
    return bitmap, values, offsets


def check_rows(bitmap: np.ndarray, values: np.ndarray, offsets: np.ndarray, shape: tuple[int, int]) -> None:
    """``ValueError`` unless the arrays describe a matrix of ``shape`` and nothing outside it."""
    rows, columns = shape
    words = words_of(columns)
    if bitmap.size != rows * words:
        raise ValueError(f"bitmap must have {rows * words} words for a matrix {shape}, got {bitmap.size}")
    if offsets.size != rows + 1 or offsets[0] != 0:
        raise ValueError(f"row_offset must have {rows + 1} entries and start with 0, got {offsets.size} entries")
    wrong = _first_wrong_row(bitmap, offsets, columns)
    if wrong >= 0:
        raise ValueError(
            f"row {wrong} is inconsistent: its bits and row_offset[{wrong}:{wrong + 2}] do not count the same values "
            f"or a bit past column {columns} is set"
        )
    if values.size != offsets[-1] + SPARE:
        raise ValueError(f"values must have {offsets[-1]} + {SPARE} entries, got {values.size}")


def words_of(columns: int) -> int:
    """Words of 64 columns that hold ``columns`` of them."""
    return (columns + 63) // 64


@parallel_kernel
def mark_rows(bits: np.ndarray, kept: int, bitmap: np.ndarray, counts: np.ndarray) -> None:
    """Write the bitmap of ``bits`` and the number of stored entries of each row."""
    rows, columns = bits.shape
    words = (columns + 63) // 64
    for row in prange(rows):
        count = 0
        for word in range(words):
            marks = np.uint64(0)
            start = 64 * word
            for column in range(start, min(start + 64, columns)):
                marks |= np.uint64((bits[row, column] & kept) != 0) << np.uint64(column - start)
            bitmap[row * words + word] = marks
            count += popcount(marks)
        counts[row] = count


@parallel_kernel
def _collect(bits: np.ndarray, bitmap: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    rows, columns = bits.shape
    words = (columns + 63) // 64
    for row in prange(rows):
        place = offsets[row]
        for word in range(words):
            marks = bitmap[row * words + word]
            while marks:
                values[place] = bits[row, 64 * word + lowest_bit(marks)]
                place += 1
                marks &= marks - np.uint64(1)


@kernel
def _first_wrong_row(bitmap: np.ndarray, offsets: np.ndarray, columns: int) -> int:
    words = (columns + 63) // 64
    past = ~np.uint64(0) << np.uint64(columns % 64) if columns % 64 else np.uint64(0)
    for row in range(len(offsets) - 1):
        count = 0
        for word in range(words):
            count += popcount(bitmap[row * words + word])
        if offsets[row + 1] - offsets[row] != count or bitmap[row * words + words - 1] & past:
            return row
    return -1
