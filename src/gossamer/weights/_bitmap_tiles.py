"""The tile layout of bitmap weights (TCA-BME; Fan et al., "SpInfer", EuroSys 2025): encoding, decoding, checking.

The matrix, padded to multiples of 64, is walked in **group tiles** of 64x64, row-major; each holds four **warp tiles** of
16x64 from top to bottom; each of those four 16x16 tiles from left to right; and each of those four 8x8 **bitmap tiles** in
column-major order (upper left, lower left, upper right, lower right), which are the four registers of a tensor-core
fragment. One 8x8 tile is one ``uint64`` with bit ``8 * row + column``, lowest first. Values follow the same walk,
row-major inside an 8x8 tile, and every group tile ends with zeros up to a multiple of 8 values.

``gtile_offset[g]`` (int32) is where group tile ``g`` starts in ``values``, relative to ``panel_base`` (int64) of its panel
of 64 rows; the bases are zero as long as 32 bits suffice. Its last entry, the end, stands three times, because a kernel
may look two tiles ahead. ``warp_offset`` (int32) is where each warp tile starts inside its group tile, and ``max_nnz`` the
largest number of values of a group tile, rounded up to 64. ``SPARE`` zeros end the values here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import prange

from gossamer.core.jit import kernel, lowest_bit, parallel_kernel, popcount
from gossamer.weights._bitmap_rows import SPARE

_LOOK_AHEAD = 2
_INT32_VALUES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TileOffsets:
    """Where tiles start, as the module's text says.

    gtile: int32 ``(group tiles + 3,)``. warp: int32 ``(4 * group tiles,)``. base: int64 ``(panels,)``.
    """

    gtile: np.ndarray
    warp: np.ndarray
    base: np.ndarray
    max_nnz: int


def encode_tiles(bits: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray, TileOffsets]:
    """Bitmap uint64 ``(64 * group tiles,)``, values and offsets of a bit-pattern matrix ``(rows, columns)``."""
    columns = bits.shape[1]
    bitmap = np.empty(64 * count_tiles(bits.shape), np.uint64)
    _mark(bits, bits.dtype.type(kept), bitmap)
    offsets = tile_offsets(bitmap, (columns + 63) // 64)
    values = np.zeros(end_of(offsets) + SPARE, bits.dtype)
    _collect(bits, bitmap, starts_of(offsets), values)
    return bitmap, values, offsets


def decode_tiles(bitmap: np.ndarray, values: np.ndarray, offsets: TileOffsets, dense: np.ndarray) -> None:
    """Write the bit-pattern matrix ``dense`` ``(rows, columns)``."""
    dense[:] = 0
    _scatter(bitmap, values, starts_of(offsets), dense)


def check_tiles(bitmap: np.ndarray, values: np.ndarray, offsets: TileOffsets, shape: tuple[int, int]) -> None:
    """``ValueError`` unless the arrays describe a matrix of ``shape`` and nothing outside it."""
    rows, columns = shape
    tiles = count_tiles(shape)
    if bitmap.size != 64 * tiles:
        raise ValueError(f"bitmap must have {64 * tiles} words for a matrix {shape}, got {bitmap.size}")
    expected = tile_offsets(bitmap, (columns + 63) // 64)
    for name in ("gtile", "warp", "base"):
        given, right = getattr(offsets, name), getattr(expected, name)
        if given.size != right.size or not np.array_equal(given, right):
            raise ValueError(f"the {name} offsets do not fit the bitmap: {given.size} entries, {right.size} expected")
    if offsets.max_nnz != expected.max_nnz:
        raise ValueError(f"max_nnz must be {expected.max_nnz} for this bitmap, got {offsets.max_nnz}")
    if values.size != end_of(expected) + SPARE:
        raise ValueError(f"values must have {end_of(expected)} + {SPARE} entries, got {values.size}")
    if _marks_outside(bitmap, rows, columns):
        raise ValueError(f"a bit outside the matrix {shape} is set")


def count_tiles(shape: tuple[int, ...]) -> int:
    """Number of group tiles of a matrix."""
    return -(-shape[0] // 64) * -(-shape[1] // 64)


def tile_offsets(bitmap: np.ndarray, tiles_wide: int, limit: int = _INT32_VALUES) -> TileOffsets:
    """Offsets that follow from the bitmap; values beyond number ``limit`` make bases necessary."""
    warps = _count_bits(bitmap).reshape(-1, 4, 16).sum(2)
    nnz = warps.sum(1)
    warp = np.cumsum(warps, axis=1) - warps
    starts = np.zeros(len(nnz) + 1, np.int64)
    np.cumsum(-(-nnz // 8) * 8, out=starts[1:])
    base = np.zeros(len(nnz) // tiles_wide, np.int64)
    if starts[-1] > limit:
        base = starts[:-1:tiles_wide].copy()
    relative = starts - np.append(np.repeat(base, tiles_wide), base[-1])
    gtile = np.append(relative, [relative[-1]] * _LOOK_AHEAD).astype(np.int32)
    max_nnz = int(-(-nnz.max() // 64) * 64)
    return TileOffsets(gtile, warp.reshape(-1).astype(np.int32), base, max_nnz)


def starts_of(offsets: TileOffsets) -> np.ndarray:
    """Where each group tile starts in ``values``, int64."""
    tiles = len(offsets.gtile) - 1 - _LOOK_AHEAD
    return np.repeat(offsets.base, tiles // len(offsets.base)) + offsets.gtile[:tiles]


def end_of(offsets: TileOffsets) -> int:
    """Number of values, padding between tiles included."""
    return int(offsets.base[-1]) + int(offsets.gtile[-1])


@kernel
def tile_origin(number: int, tiles_wide: int) -> tuple[int, int]:
    """First row and column of 8x8 tile ``number`` of the walk."""
    group, inside = number // 64, number % 64
    warp, quarter, part = inside // 16, inside % 16 // 4, inside % 4
    row = 64 * (group // tiles_wide) + 16 * warp + 8 * (part % 2)
    column = 64 * (group % tiles_wide) + 16 * quarter + 8 * (part // 2)
    return row, column


@parallel_kernel
def _mark(bits: np.ndarray, kept: int, bitmap: np.ndarray) -> None:
    rows, columns = bits.shape
    tiles_wide = (columns + 63) // 64
    for group in prange(len(bitmap) // 64):
        for number in range(64 * group, 64 * group + 64):
            top, left = tile_origin(number, tiles_wide)
            marks = np.uint64(0)
            for i in range(min(8, rows - top)):
                for j in range(min(8, columns - left)):
                    marks |= np.uint64((bits[top + i, left + j] & kept) != 0) << np.uint64(8 * i + j)
            bitmap[number] = marks


@parallel_kernel
def _collect(bits: np.ndarray, bitmap: np.ndarray, starts: np.ndarray, values: np.ndarray) -> None:
    tiles_wide = (bits.shape[1] + 63) // 64
    for group in prange(len(starts)):
        place = starts[group]
        for number in range(64 * group, 64 * group + 64):
            top, left = tile_origin(number, tiles_wide)
            marks = bitmap[number]
            while marks:
                bit = lowest_bit(marks)
                values[place] = bits[top + bit // 8, left + bit % 8]
                place += 1
                marks &= marks - np.uint64(1)


@parallel_kernel
def _scatter(bitmap: np.ndarray, values: np.ndarray, starts: np.ndarray, dense: np.ndarray) -> None:
    tiles_wide = (dense.shape[1] + 63) // 64
    for group in prange(len(starts)):
        place = starts[group]
        for number in range(64 * group, 64 * group + 64):
            top, left = tile_origin(number, tiles_wide)
            marks = bitmap[number]
            while marks:
                bit = lowest_bit(marks)
                dense[top + bit // 8, left + bit % 8] = values[place]
                place += 1
                marks &= marks - np.uint64(1)


@kernel
def _count_bits(bitmap: np.ndarray) -> np.ndarray:
    counts = np.empty(len(bitmap), np.int64)
    for i in range(len(bitmap)):
        counts[i] = popcount(bitmap[i])
    return counts


@kernel
def _marks_outside(bitmap: np.ndarray, rows: int, columns: int) -> bool:
    tiles_wide = (columns + 63) // 64
    for number in range(len(bitmap)):
        top, left = tile_origin(number, tiles_wide)
        if top + 8 <= rows and left + 8 <= columns:
            continue
        marks = bitmap[number]
        while marks:
            bit = lowest_bit(marks)
            if top + bit // 8 >= rows or left + bit % 8 >= columns:
                return True
            marks &= marks - np.uint64(1)
    return False
