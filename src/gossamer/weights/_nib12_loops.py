"""Loops over the rows of the ``nib12`` layout (:mod:`gossamer.weights._nib12_layout`): encode, check, decode, multiply.

Types are left to numba. Everywhere: ``plane`` uint8, ``codes`` uint8, ``starts`` int32 ``(rows + 1,)``, ``columns``
int32 and ``values`` uint16 (one entry per escape), ``base`` the exponent below the window.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange

from gossamer.core.jit import address, entry, kernel, lowest_bit, parallel_kernel, sum8
from gossamer.weights._nib12_vector import (
    BLOCK,
    BLOCK_HALF,
    CODES,
    ESCAPE,
    escape_mask,
    lane_columns,
    pack_block,
    row_dots,
    unpack_block,
)

_LANE_COLUMNS = lane_columns()
_ONE = np.uint64(1)
_DECODED = np.float32(2.0**-126)
"""What an escaped weight is decoded as, up to its sign."""


@kernel
def encode(bits, base, plane, codes, starts, columns, values):
    """Fill the other arrays from ``bits``, the bf16 patterns ``(rows, width)`` as uint16.

    ``columns`` and ``values`` must have as many entries as ``bits`` has exponents without a code.
    """
    rows, width = bits.shape
    blocks = (width + BLOCK - 1) // BLOCK
    tail = np.zeros(BLOCK, np.uint16)
    found = 0
    starts[0] = 0
    for row in range(rows):
        for block in range(blocks):
            place = row * blocks + block
            column = block * BLOCK
            source = address(bits) + 2 * (row * width + column)
            if column + BLOCK > width:
                tail[: width - column] = bits[row, column:]
                source = address(tail)
            mask = pack_block(source, base, address(plane) + place * BLOCK, address(codes) + place * BLOCK_HALF)
            while mask != 0:
                escaped = column + lowest_bit(mask)
                columns[found] = escaped
                values[found] = bits[row, escaped]
                found += 1
                mask &= mask - _ONE
        starts[row + 1] = found


@kernel
def decode(plane, codes, starts, columns, values, base, out):
    """Write the bf16 patterns into ``out``, uint16 ``(rows, width)``."""
    rows, width = out.shape
    blocks = (width + BLOCK - 1) // BLOCK
    tail = np.empty(BLOCK, np.uint16)
    for row in range(rows):
        for block in range(blocks):
            place = row * blocks + block
            whole = block * BLOCK + BLOCK <= width
            target = address(out) + 2 * (row * width + block * BLOCK) if whole else address(tail)
            unpack_block(address(plane) + place * BLOCK, address(codes) + place * BLOCK_HALF, base, target)
        if width % BLOCK:
            out[row, width - width % BLOCK :] = tail[: width % BLOCK]
        for place in range(starts[row], starts[row + 1]):
            out[row, columns[place]] = values[place]


@kernel
def row_at_fault(rows, width, base, plane, codes, starts, columns, values):
    """The first row whose escapes disagree with its codes, or whose padding is not zero; -1 if there is none.

    The arrays' sizes and the order of ``starts`` must have been checked before.
    """
    blocks = (width + BLOCK - 1) // BLOCK
    for row in range(rows):
        place = starts[row]
        for block in range(blocks):
            mask = escape_mask(address(codes) + (row * blocks + block) * BLOCK_HALF)
            while mask != 0:
                column = block * BLOCK + lowest_bit(mask)
                if place == starts[row + 1] or columns[place] != column or column >= width:
                    return row
                exponent = np.int64((values[place] >> 7) & 255)
                sign = (values[place] >> 8) & 128
                if exponent == 0 or base < exponent <= base + CODES or plane[row * blocks * BLOCK + column] != sign:
                    return row
                place += 1
                mask &= mask - _ONE
        if place != starts[row + 1]:
            return row
        for column in range(width, blocks * BLOCK):
            at = row * blocks + column // BLOCK
            packed = codes[at * BLOCK_HALF + column % BLOCK_HALF]
            code = packed & ESCAPE if column % BLOCK < BLOCK_HALF else packed >> 4
            if code != 0 or plane[at * BLOCK + column % BLOCK] != 0:
                return row
    return -1


@kernel
def _in_lanes(x):
    """``x`` float32 ``(n, width)``, padded with zeros to whole blocks, each block in the order of the decoder."""
    count, width = x.shape
    blocks = (width + BLOCK - 1) // BLOCK
    ordered = np.zeros((count, blocks * BLOCK), np.float32)
    for number in range(count):
        for block in range(width // BLOCK):
            for lane in range(BLOCK):
                ordered[number, block * BLOCK + lane] = x[number, block * BLOCK + _LANE_COLUMNS[lane]]
        if width % BLOCK:
            for lane in range(BLOCK):
                column = (blocks - 1) * BLOCK + _LANE_COLUMNS[lane]
                if column < width:
                    ordered[number, (blocks - 1) * BLOCK + lane] = x[number, column]
    return ordered


@kernel
def _rows(first, last, plane, codes, base, ordered, out, variant):
    """Rows ``first`` to ``last`` of the product, escaped weights taken as ``+-2**-126``.

    One core reaches its full memory speed only when it reads several places at once, so the rows are cut into as many
    runs as ``variant`` says, which are read side by side. Their distance is odd, lest all of them fall into the same
    few places of the caches. Rows left over are multiplied as many times over.
    """
    padded = ordered.shape[1]
    runs, count = len(variant.runs), len(variant.batch)
    length = (last - first) // runs
    if length > BLOCK:
        length -= 1 - length % 2
    apart = length
    row = first
    while row < last:
        signs, packed = address(plane) + row * padded, address(codes) + row * padded // 2
        dots = row_dots(signs, packed, apart, padded // BLOCK, base, address(ordered), variant)
        for run in range(runs):
            for number in range(count):
                out[number, row + run * apart] = sum8(dots[run * count + number])
        row += 1
        if row == first + length:
            row, apart = first + length * runs, 0


@kernel
def _add_escapes(first, last, starts, columns, values, x, out):
    """Add what the escapes of rows ``first`` to ``last`` lack: they were taken as ``+-2**-126``, with their own sign.

    The remainder has the sign of the weight as well, so that an infinite activation gives no NaN of its own. This is
    a pass of its own because the lists would hold up the stream of the codes, row by row.
    """
    for row in range(first, last):
        for place in range(starts[row], starts[row + 1]):
            weight = entry(values, place)
            missing = weight - _DECODED if weight > 0 else weight + _DECODED
            if missing != 0:
                for number in range(x.shape[0]):
                    out[number, row] += missing * x[number, columns[place]]


@kernel
def multiply(plane, codes, starts, columns, values, base, x, out, variant):
    """``out = x @ W.T`` for ``x`` float32 ``(n, width)`` and ``out`` float32 ``(n, rows)``, ``n`` as in ``variant``."""
    _rows(0, out.shape[1], plane, codes, base, _in_lanes(x), out, variant)
    _add_escapes(0, out.shape[1], starts, columns, values, x, out)


@cache
def threaded(variant):
    """As :func:`multiply`, the rows shared among threads: ``f(plane, ..., base, x, out, threads)``.

    The variant is a constant of the function, since numba hands no tuple on to its threads.
    """

    @parallel_kernel
    def multiply_in_threads(plane, codes, starts, columns, values, base, x, out, threads):
        rows = out.shape[1]
        ordered = _in_lanes(x)
        for thread in prange(threads):
            first, last = rows * thread // threads, rows * (thread + 1) // threads
            _rows(first, last, plane, codes, base, ordered, out, variant)
            _add_escapes(first, last, starts, columns, values, x, out)

    return multiply_in_threads
