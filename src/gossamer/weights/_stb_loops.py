"""Products of one vector with binarised N:8 weights (:mod:`gossamer.weights._stb`), a tile of 8x8 after the other.

The bits of a weight are put together to a number of four bits, those of a row of a tile to one 32-bit word, by
depositing each stream's bits at the kept places; two permutations look eight weights up in the 16 values of their row and
block. Nothing is multiplied but the value and the input. Types are left to numba.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload

from gossamer.core.jit import (
    FLOATS,
    INT,
    LONG,
    Code,
    Floats,
    add8,
    address,
    call_llvm,
    entry,
    inlined,
    kernel,
    load8,
    load_from,
    load_half_word,
    load_word,
    multiply_add8,
    parallel_kernel,
    splat,
    store8,
    sum8,
    widen8,
    zeros8,
)
from gossamer.weights._stb_planes import pattern_bits, patterns

FEATURES = frozenset({"avx2", "fma", "f16c", "bmi2"})
_INTS = ir.VectorType(INT, 8)


@lru_cache(maxsize=8)
def spread_tables(n: int) -> tuple[np.ndarray, np.ndarray]:
    """For every rank of a pattern, int64: 1 in the nibble of each kept weight, and 7 in that of each pruned one."""
    bits = (patterns(n)[:, None] >> np.arange(8)) & 1
    ones = (bits.astype(np.int64) << (4 * np.arange(8))).sum(1)
    missing = 1 << pattern_bits(n)
    places = np.zeros(missing, np.int64)
    places[: len(ones)] = ones
    return places, 0x77777777 - 7 * places


def salient_nibbles(salient: np.ndarray) -> np.ndarray:
    """For every 8 columns, int64: 8 in the nibble of each salient one."""
    return (salient.reshape(-1, 8).astype(np.int64) << (4 * np.arange(8) + 3)).sum(1)


@intrinsic
def _deposit(typing: Any, bits: Any, places: Any) -> tuple[Any, Code]:
    """The low bits put, in order, where ``places`` has ones."""
    return types.int64(types.int64, types.int64), lambda context, builder, signature, arguments: call_llvm(
        builder, "llvm.x86.bmi.pdep.64", LONG, arguments
    )


@intrinsic
def _look_up8(typing: Any, table: Any, nibbles: Any) -> tuple[Any, Code]:
    """Eight of the 16 float32 at an address, numbered by the nibbles of a word."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, nibbles = arguments
        word = builder.trunc(nibbles, INT)
        one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), word, INT(0))
        all_words = builder.shuffle_vector(one, one, splat(_INTS, 0))
        places = builder.lshr(all_words, ir.Constant(_INTS, [4 * lane for lane in range(8)]))
        halves = [load_from(builder, builder.add(table, LONG(32 * half)), FLOATS, 4) for half in (0, 1)]
        low, high = (call_llvm(builder, "llvm.x86.avx2.permps", FLOATS, [half, places]) for half in halves)
        upper = builder.icmp_signed("<", builder.shl(places, splat(_INTS, 28)), splat(_INTS, 0))
        return builder.select(upper, high, low)

    return Floats(types.int64, types.int64), code


def _numbers(values, start, out):
    """Float32 of the next ``len(out)`` entries, whose number is a multiple of 8: float16 bits, or unsigned bytes."""


@overload(_numbers)
def _numbers_of(values, start, out):
    if values.dtype == types.uint8:

        def widen(values, start, out):
            for i in range(len(out)):
                out[i] = np.float32(values[start + i])
    else:

        def widen(values, start, out):
            for i in range(0, len(out), 8):
                store8(address(out) + 4 * i, widen8(values, address(values) + 2 * (start + i)))

    return widen


@kernel
def plane_tables(scales, supers, row, block, blocks, numbers, out):
    """The 16 values of 64 rows and a block, from means and scales (``supers`` empty) or from scales in 255ths."""
    lean = len(supers) > 0
    width = 5 if lean else 10
    _numbers(scales, (row // 64 * blocks + block) * 64 * width, numbers[: 64 * width])
    for i in range(64):
        unit = entry(supers, row + i) if lean else np.float32(1)
        for part in range(5):
            scale = numbers[width * i + width - 5 + part] * unit
            mean = np.float32(0) if lean else numbers[width * i + part]
            if part < 3:
                out[i, 2 * part], out[i, 2 * part + 1] = mean - scale, mean + scale
            elif part == 3:
                out[i, 8], out[i, 9] = mean - scale, mean + scale
                out[i, 10], out[i, 11] = mean - scale, mean + scale
            else:
                out[i, 8] += mean - scale
                out[i, 9] += mean - scale
                out[i, 10] += mean + scale
                out[i, 11] += mean + scale


@inlined
def _add_row(sums, row, table, nibbles, x):
    """Add eight weights times eight inputs to the eight partial sums of a row."""
    place = address(sums) + 32 * row
    store8(place, multiply_add8(_look_up8(address(table) + 64 * row, nibbles), x, load8(place)))


@kernel
def _finish(sums, out, top):
    for row in range(min(64, len(out) - top)):
        out[top + row] = sum8(load8(address(sums) + 32 * row))
    sums[:] = 0


@kernel
def _plane_panel(
    panel, pattern, signs, low, high, salient, scales, supers, n, bits, ones, sevens, x, sums, numbers, table, out
):
    across = len(salient) // 8  # tiles of 64 columns
    for column in range(across):
        if column % 2 == 0:
            plane_tables(scales, supers, 64 * panel, column // 2, across // 2, numbers, table)
        for warp in range(4):
            for step in range(8):  # columns of 8x8 tiles
                vector = load8(address(x) + 4 * (64 * column + 8 * step))
                marked = salient[8 * column + step]
                for lower in range(2):
                    tile = ((panel * across + column) * 4 + warp) * 16 + 2 * step + lower
                    codes = load_word(address(pattern) + bits * tile)
                    plus = load_word(address(signs) + n * tile)
                    near, far = load_word(address(low) + n * tile), load_word(address(high) + n * tile)
                    for row in range(8):
                        code = (codes >> (bits * row)) & ((1 << bits) - 1)
                        places, shift = ones[code], n * row
                        nibbles = _deposit(plus >> shift, places) | _deposit(near >> shift, places << 1)
                        nibbles |= _deposit(far >> shift, places << 2) | sevens[code] | marked
                        _add_row(sums, 16 * warp + 8 * lower + row, table, nibbles, vector)
    _finish(sums, out, 64 * panel)


@parallel_kernel
def planes_matvec(pattern, signs, low, high, salient, scales, supers, n, bits, ones, sevens, x, out, shares):
    """``out = W @ x`` from the planes; ``x`` padded to whole blocks, ``salient`` as of :func:`salient_nibbles`."""
    for share in prange(len(shares) - 1):
        sums, table = np.zeros(512, np.float32), np.zeros((64, 16), np.float32)
        numbers = np.empty(640, np.float32)
        for panel in range(shares[share], shares[share + 1]):
            _plane_panel(
                panel,
                pattern,
                signs,
                low,
                high,
                salient,
                scales,
                supers,
                n,
                bits,
                ones,
                sevens,
                x,
                sums,
                numbers,
                table,
                out,
            )


@kernel
def _code_panel(panel, index, values, x, sums, numbers, table, out):
    across = len(x) // 64
    for column in range(across):
        if column % 2 == 0:
            place = (panel * (across // 2) + column // 2) * 64
            _numbers(values, 11 * place, numbers)
            for row in range(64):
                table[row, :11] = numbers[11 * row : 11 * row + 11]
        inputs = address(x) + 256 * column
        for warp in range(4):
            first = address(index) + 512 * ((panel * across + column) * 4 + warp)  # 16 tiles of 8 words
            for lower in range(2):
                for row in range(8):
                    place = 16 * warp + 8 * lower + row
                    near, at = first + 32 * lower + 4 * row, address(table) + 64 * place
                    a, b = load8(address(sums) + 32 * place), zeros8()
                    for step in range(0, 8, 2):
                        one, other = load_half_word(near + 64 * step), load_half_word(near + 64 * step + 64)
                        a = multiply_add8(_look_up8(at, one), load8(inputs + 32 * step), a)
                        b = multiply_add8(_look_up8(at, other), load8(inputs + 32 * step + 32), b)
                    store8(address(sums) + 32 * place, add8(a, b))
    _finish(sums, out, 64 * panel)


@parallel_kernel
def codes_matvec(index, values, x, out, shares):
    """``out = W @ x`` from 4-bit levels and tables of 11 values."""
    for share in prange(len(shares) - 1):
        sums, table = np.zeros(512, np.float32), np.zeros((64, 16), np.float32)
        numbers = np.empty(704, np.float32)
        for panel in range(shares[share], shares[share + 1]):
            _code_panel(panel, index, values, x, sums, numbers, table, out)
