"""Tile-layout bitmap weight times a vector: AVX2 code, and plain loops for any other processor.

The tile layout is made for tensor cores. On a CPU one byte of an 8x8 tile is eight neighbouring columns of one row, so
that the row layout's decoding step serves here too: eight rows share one register of ``x``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from gossamer.core.jit import (
    address,
    entry,
    inlined,
    item_bytes,
    kernel,
    load8,
    load_word,
    lowest_bit,
    multiply_add8,
    parallel_kernel,
    popcount,
    prefetch,
    store8,
    sum8,
)
from gossamer.weights._bitmap_expand import expand_four
from gossamer.weights._bitmap_tiles import tile_origin

_AHEAD = 2048  # bytes between what is read and what is asked for


@inlined
def _four_rows(
    values: Any, place: int, table: int, marks: int, x: Any, totals: tuple[Any, Any, Any, Any]
) -> tuple[tuple[Any, Any, Any, Any], int]:
    """Add four rows of an 8x8 tile times eight columns to four totals; also the place of the values that follow."""
    first, second, third, fourth, place = expand_four(values, place, table, marks)
    totals = (
        multiply_add8(first, x, totals[0]),
        multiply_add8(second, x, totals[1]),
        multiply_add8(third, x, totals[2]),
        multiply_add8(fourth, x, totals[3]),
    )
    return totals, place


@inlined
def _load_totals(sums: int) -> tuple[Any, Any, Any, Any]:
    return load8(sums), load8(sums + 32), load8(sums + 64), load8(sums + 96)


@inlined
def _store_totals(sums: int, totals: tuple[Any, Any, Any, Any]) -> None:
    store8(sums, totals[0])
    store8(sums + 32, totals[1])
    store8(sums + 64, totals[2])
    store8(sums + 96, totals[3])


@kernel
def _eight_rows(values: Any, place: int, table: int, marks: int, half: int, x: int, sums: int) -> None:
    """Add the eight tiles of one half (upper or lower 8 rows) of a 16x64 warp tile to 8x8 partial sums.

    marks: address of the warp tile's 16 words. place: of its first value. x: of 64 entries. sums: of 64 float32.
    """
    size = item_bytes(values)
    upper_rows, lower_rows = _load_totals(sums), _load_totals(sums + 128)
    for pair in range(8):
        upper, lower = load_word(marks + 16 * pair), load_word(marks + 16 * pair + 8)
        word = lower if half else upper
        at = place + size * popcount(upper) if half else place
        place += size * (popcount(upper) + popcount(lower))
        prefetch(place + _AHEAD)
        eight = load8(x + 32 * pair)
        upper_rows, at = _four_rows(values, at, table, word & 0xFFFFFFFF, eight, upper_rows)
        lower_rows, at = _four_rows(values, at, table, (word >> 32) & 0xFFFFFFFF, eight, lower_rows)
    _store_totals(sums, upper_rows)
    _store_totals(sums + 128, lower_rows)


@parallel_kernel
def tiles_matvec(bitmap: Any, values: Any, starts: Any, warp: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` with AVX2.

    starts: int64, where each group tile's values start. warp: the stored warp offsets. shares: the panels of 64 rows
    between which each thread works.
    """
    wide = (len(x) + 63) // 64
    padded = np.zeros(64 * wide, np.float32)
    padded[: len(x)] = x
    shuffles, marks, size = address(table), address(bitmap), item_bytes(values)
    for share in prange(len(shares) - 1):
        sums = np.empty((64, 8), np.float32)
        for panel in range(shares[share], shares[share + 1]):
            sums[:] = 0
            for column in range(wide):
                group = panel * wide + column
                for part in range(8):
                    four = part // 2
                    _eight_rows(
                        values, address(values) + size * (starts[group] + warp[4 * group + four]), shuffles,
                        marks + 8 * (64 * group + 16 * four), part % 2,
                        address(padded) + 256 * column, address(sums) + 256 * part,
                    )  # fmt: skip
            for row in range(min(64, len(out) - 64 * panel)):
                out[64 * panel + row] = sum8(load8(address(sums) + 32 * row))


@parallel_kernel
def tiles_plain(bitmap: Any, values: Any, starts: Any, warp: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` bit by bit, on any processor; ``warp`` and ``table`` are not looked at."""
    wide = (len(x) + 63) // 64
    for share in prange(len(shares) - 1):
        for panel in range(shares[share], shares[share + 1]):
            for row in range(64 * panel, min(64 * panel + 64, len(out))):
                out[row] = 0
            for group in range(panel * wide, panel * wide + wide):
                place = starts[group]
                for number in range(64 * group, 64 * group + 64):
                    top, left = tile_origin(number, wide)
                    marks = bitmap[number]
                    while marks:
                        bit = lowest_bit(marks)
                        out[top + bit // 8] += entry(values, place) * x[left + bit % 8]
                        place += 1
                        marks &= marks - np.uint64(1)
