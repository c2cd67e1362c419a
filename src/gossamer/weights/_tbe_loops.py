"""Loops over the tiles of the ``tbe`` layout (:mod:`gossamer.weights._tbe`): encode, count, decode, multiply.

Types are left to numba. Everywhere: ``plane1``, ``plane2``, ``plane3`` uint64 with one entry per 8x8 tile, ``coded``
uint8 and ``full`` uint16 the two streams, ``offsets`` and ``warps`` int32, ``base`` the exponent of code 0. A tile of
64x64 lies at ``start`` with rows ``stride`` apart in a one-dimensional uint16 array of bf16 patterns.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import prange

from gossamer.core.jit import (
    add8,
    address,
    inlined,
    kernel,
    load8,
    lowest_bit,
    multiply_add8,
    parallel_kernel,
    popcount,
    sum8,
    widen8,
    zeros8,
)
from gossamer.weights._tbe_vector import TILE, copy_bytes, join_tile, load_eight, split_tile, store_eight

SMALL_TILES = 64
CODED_STEP, FULL_STEP = 16, 8
SPARE = 8
"""Entries that :func:`encode` may touch beyond the end of either stream."""
_ONE, _EIGHT, _BYTE = np.uint64(1), np.uint64(8), np.uint64(255)


@kernel
def _corner(small):
    """Row and column of 8x8 tile number ``small`` inside its 64x64 tile.

    Four warp tiles of 16x64 from top to bottom, in each four 16x16 from left to right, in each 2x2 by columns.
    """
    return small // 16 * 16 + small % 2 * 8, small // 4 % 4 * 16 + small // 2 % 2 * 8


@kernel
def _padded(size, step):
    return (size + step - 1) // step * step


@kernel
def encode(bits, base, plane1, plane2, plane3, coded, full, offsets, warps):
    """Fill the other arrays from ``bits``, the bf16 patterns ``(rows, width)``.

    ``coded`` and ``full`` must be ``SPARE`` entries longer than what they may need; how much they hold is in the last
    two ``offsets``. Outside the matrix the tiles hold code 1 with sign and mantissa 0.
    """
    rows, width = bits.shape
    across = (width + TILE - 1) // TILE
    tiles = (rows + TILE - 1) // TILE * across
    scratch = np.empty(TILE * TILE, np.uint16)
    in_coded, in_full = 0, 0
    for tile in range(tiles):
        row, column = tile // across * TILE, tile % across * TILE
        offsets[2 * tile], offsets[2 * tile + 1] = in_coded, in_full
        height, across_here = min(TILE, rows - row), min(TILE, width - column)
        if height < TILE or across_here < TILE:
            scratch[:] = np.uint16((base + 1) << 7)
        source = address(bits) + 2 * (row * width + column)
        for y in range(height):
            copy_bytes(address(scratch) + 2 * TILE * y, source + 2 * width * y, 2 * across_here)
        ends = _encode_tile(scratch, tile, base, plane1, plane2, plane3, coded, full, offsets, warps)
        in_coded, in_full = _padded(ends[0], CODED_STEP), _padded(ends[1], FULL_STEP)
        coded[ends[0] : in_coded] = 0
        full[ends[1] : in_full] = 0
    offsets[2 * tiles], offsets[2 * tiles + 1] = in_coded, in_full


@kernel
def _encode_tile(bits, tile, base, plane1, plane2, plane3, coded, full, offsets, warps):
    """Append one tile to the streams, which end where its ``offsets`` say; the result is where they end then."""
    in_coded, in_full = np.int64(offsets[2 * tile]), np.int64(offsets[2 * tile + 1])
    kept = np.empty(8, np.uint64)
    for small in range(SMALL_TILES):
        if small % 16 == 0:
            warps[8 * tile + small // 8] = in_coded - offsets[2 * tile]
            warps[8 * tile + small // 8 + 1] = in_full - offsets[2 * tile + 1]
        y, x = _corner(small)
        one, two, three = split_tile(address(bits) + 2 * (y * TILE + x), base, address(kept))
        number = tile * SMALL_TILES + small
        plane1[number], plane2[number], plane3[number] = one, two, three
        absent = ~(one | two | three)
        for row in range(8):
            line, missing = kept[row], absent & _BYTE
            store_eight(address(coded) + in_coded, line)
            in_coded += 8
            if missing != 0:
                removed = 0
                while missing != 0:
                    place = lowest_bit(missing)
                    full[in_full + removed] = bits[(y + row) * TILE + x + place]
                    below = (_ONE << np.uint64(8 * (place - removed))) - _ONE
                    line = (line & below) | ((line >> _EIGHT) & ~below)
                    missing &= missing - _ONE
                    removed += 1
                in_full += removed
                store_eight(address(coded) + in_coded - 8, line)
                in_coded -= removed
            absent >>= _EIGHT
    return in_coded, in_full


@kernel
def count(plane1, plane2, plane3, offsets, warps):
    """Fill ``offsets`` and ``warps`` with what the planes imply."""
    in_coded, in_full = 0, 0
    for tile in range(plane1.size // SMALL_TILES):
        offsets[2 * tile], offsets[2 * tile + 1] = in_coded, in_full
        of_tile = 0
        for small in range(SMALL_TILES):
            if small % 16 == 0:
                warps[8 * tile + small // 8] = of_tile
                warps[8 * tile + small // 8 + 1] = 64 * small - of_tile
            at = tile * SMALL_TILES + small
            of_tile += popcount(plane1[at] | plane2[at] | plane3[at])
        in_coded += _padded(of_tile, CODED_STEP)
        in_full += _padded(TILE * TILE - of_tile, FULL_STEP)
    offsets[-2], offsets[-1] = in_coded, in_full


@inlined
def _line(place, absent):
    """The bytes of eight weights from an address, of which those in the low bits of ``absent`` have none there.

    Eight bytes are read in any case. The result is a word and the address of the next line.
    """
    line = load_eight(place)
    missing = absent & _BYTE
    after = place + 8 - popcount(missing)
    while missing != 0:
        below = (_ONE << np.uint64(8 * lowest_bit(missing))) - _ONE
        line = (line & below) | ((line & ~below) << _EIGHT)
        missing &= missing - _ONE
    return line, after


@inlined
def _stream(tile, coded, offsets, room):
    """Where the bytes of a tile begin, with eight more that may be read: in ``coded``, or copied into ``room``."""
    start, stop = offsets[2 * tile], offsets[2 * tile + 2]
    if stop + 8 <= coded.size:
        return address(coded) + start
    copy_bytes(address(room), address(coded) + start, np.int64(stop - start))
    return address(room)


@kernel
def _decode_tile(tile, plane1, plane2, plane3, coded, full, offsets, base, room, out):
    """Write a tile into ``out``, its rows one after another. ``room``: uint8 ``(TILE * TILE + 8,)``."""
    at, in_full = _stream(tile, coded, offsets, room), np.int64(offsets[2 * tile + 1])
    for small in range(SMALL_TILES):
        number = tile * SMALL_TILES + small
        one, two, three = plane1[number], plane2[number], plane3[number]
        absent = ~(one | two | three)
        a, at = _line(at, absent)
        b, at = _line(at, absent >> np.uint64(8))
        c, at = _line(at, absent >> np.uint64(16))
        d, at = _line(at, absent >> np.uint64(24))
        e, at = _line(at, absent >> np.uint64(32))
        f, at = _line(at, absent >> np.uint64(40))
        g, at = _line(at, absent >> np.uint64(48))
        h, at = _line(at, absent >> np.uint64(56))
        y, x = _corner(small)
        join_tile(one, two, three, base, (a, b, c, d, e, f, g, h), address(out) + 2 * (y * TILE + x))
        while absent != 0:
            place = lowest_bit(absent)
            out[(y + place // 8) * TILE + x + place % 8] = full[in_full]
            in_full += 1
            absent &= absent - _ONE


@kernel
def decode(plane1, plane2, plane3, coded, full, offsets, base, out):
    """Write the bf16 patterns into ``out``, uint16 ``(rows, width)``."""
    rows, width = out.shape
    across = (width + TILE - 1) // TILE
    scratch, room = np.empty(TILE * TILE, np.uint16), np.empty(TILE * TILE + 8, np.uint8)
    for tile in range(plane1.size // SMALL_TILES):
        row, column = tile // across * TILE, tile % across * TILE
        _decode_tile(tile, plane1, plane2, plane3, coded, full, offsets, base, room, scratch)
        target = address(out) + 2 * (row * width + column)
        for y in range(min(TILE, rows - row)):
            copy_bytes(target + 2 * width * y, address(scratch) + 2 * TILE * y, 2 * min(TILE, width - column))


@kernel
def _whole_tiles(x):
    """``x`` float32 ``(n, width)``, padded with zeros to whole tiles."""
    padded = np.zeros((x.shape[0], _padded(x.shape[1], TILE)), np.float32)
    padded[:, : x.shape[1]] = x
    return padded


@kernel
def _panels(first, last, plane1, plane2, plane3, coded, full, offsets, base, x, out):
    """Panels of 64 rows of the product, with ``x`` padded to whole tiles: decode a tile, then multiply with it."""
    across = x.shape[1] // TILE
    scratch, room = np.empty(TILE * TILE, np.uint16), np.empty(TILE * TILE + 8, np.uint8)
    for panel in range(first, last):
        top = panel * TILE
        height = min(TILE, out.shape[1] - top)
        out[:, top : top + height] = 0
        for place in range(across):
            tile = panel * across + place
            _decode_tile(tile, plane1, plane2, plane3, coded, full, offsets, base, room, scratch)
            for number in range(x.shape[0]):
                vector = address(x) + 4 * (number * x.shape[1] + place * TILE)
                for y in range(height):
                    out[number, top + y] += _dot(scratch, y, vector)


@kernel
def _dot(tile, row, vector):
    """The product of one row of a decoded tile with the 64 float32 at address ``vector``."""
    weights = address(tile) + 2 * row * TILE
    even, odd = zeros8(), zeros8()
    for place in range(0, TILE, 16):
        even = multiply_add8(widen8(tile, weights + 2 * place), load8(vector + 4 * place), even)
        odd = multiply_add8(widen8(tile, weights + 2 * place + 16), load8(vector + 4 * place + 32), odd)
    return sum8(add8(even, odd))


@kernel
def multiply(plane1, plane2, plane3, coded, full, offsets, base, x, out):
    """``out = x @ W.T`` for ``x`` float32 ``(n, width)`` and ``out`` float32 ``(n, rows)``."""
    panels = (out.shape[1] + TILE - 1) // TILE
    _panels(0, panels, plane1, plane2, plane3, coded, full, offsets, base, _whole_tiles(x), out)


@parallel_kernel
def multiply_in_threads(plane1, plane2, plane3, coded, full, offsets, base, x, out, threads):
    """As :func:`multiply`, the panels of 64 rows shared among ``threads``."""
    panels = (out.shape[1] + TILE - 1) // TILE
    padded = _whole_tiles(x)
    for thread in prange(threads):
        first, last = panels * thread // threads, panels * (thread + 1) // threads
        _panels(first, last, plane1, plane2, plane3, coded, full, offsets, base, padded, out)
