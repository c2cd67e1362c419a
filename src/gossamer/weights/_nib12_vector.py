"""Vector code for the ``nib12`` layout: one block of 64 weights at a time, as LLVM IR inside numba functions.

A block is 64 bytes of signs and mantissas (``S``) and 32 bytes of exponent codes (``C``); byte ``i`` of ``C`` holds
the codes of weights ``i`` (low half) and ``32 + i`` (high half)::

    S[ 0..31]  C & 15      one 32-byte vector each: weights 0..31
    S[32..63]  C >> 4                               weights 32..63
    high byte = (S & 0x80) | exponent >> 1          the two bytes of a bf16 bit pattern
    low byte  = (S & 0x7f) | exponent << 7
    interleave low and high bytes inside each half of the vector   ->  16 bf16 patterns, twice

A bf16 pattern is the upper half of the same number in float32, so that a shift gives the even and a mask the odd
weights of every 32-bit lane. Nothing is moved across the halves of a vector: the activations are put into this
order instead, once per product (:func:`lane_columns`).

The exponent of a code comes from a byte shuffle (AVX2) or from an addition and two selections (any processor); all
the rest is portable IR that LLVM lowers to whatever the processor has. Places are addresses in bytes; nothing is
checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.core.jit import BYTE, FLOATS, HALF, INT, LANES, LONG, Code, Floats, call_llvm, settle, splat
from gossamer.weights._lossless_ir import Value, at, broadcast, load, loop, shuffle, store

BLOCK, BLOCK_HALF = 64, 32
CODES, ESCAPE = 14, 15

Exponents = Callable[[Value], tuple[Value, Value]]

_BYTES = ir.VectorType(BYTE, BLOCK_HALF)
_WORDS = ir.VectorType(HALF, BLOCK_HALF // 2)
_LANES = ir.VectorType(INT, LANES)
_PLACE = types.int64
_AHEAD = 256
"""Codes are prefetched so many bytes ahead, signs and mantissas twice as many."""


class Shuffled(NamedTuple):
    """Code for AVX2, made for ``len(runs)`` rows and ``len(batch)`` vectors at a time; the entries mean nothing."""

    runs: tuple[int, ...]
    batch: tuple[int, ...]


class Selected(NamedTuple):
    """The same for any processor."""

    runs: tuple[int, ...]
    batch: tuple[int, ...]


def lane_columns() -> np.ndarray:
    """The weight of a block that each of its 64 float32 lanes holds after decoding: int64 ``(64,)``.

    >>> lane_columns()[:9].tolist()
    [0, 2, 4, 6, 16, 18, 20, 22, 1]
    """
    vector, element = np.divmod(np.arange(BLOCK), LANES)
    source, half, odd = vector // 4, vector // 2 % 2, vector % 2
    return source * BLOCK_HALF + element // 4 * 16 + half * 8 + element % 4 * 2 + odd


@intrinsic
def pack_block(typing: Any, bits: Any, base: Any, plane: Any, codes: Any) -> tuple[Any, Code]:
    """Encode the 64 bf16 patterns at ``bits``; the result, uint64, has bit ``i`` set where weight ``i`` escapes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        bits, base, plane, codes = arguments
        below = broadcast(builder, builder.add(builder.trunc(base, HALF), HALF(1)), _WORDS)
        halves = []
        for half in (0, BLOCK_HALF):
            quarters = [load(builder, bits, _WORDS, 2 * (half + quarter)) for quarter in (0, BLOCK_HALF // 2)]
            pairs = [_code_and_sign(builder, words, below) for words in quarters]
            packed, kept = (_narrow(builder, *parts) for parts in zip(*pairs, strict=True))
            store(builder, plane, kept, half)
            halves.append(packed)
        low, high = halves
        store(builder, codes, builder.or_(low, builder.shl(high, splat(_BYTES, 4))))
        return _escapes(builder, low, high)

    return types.uint64(_PLACE, types.int64, _PLACE, _PLACE), code


@intrinsic
def escape_mask(typing: Any, codes: Any) -> tuple[Any, Code]:
    """A uint64 with bit ``i`` set where weight ``i`` of the block whose codes are at ``codes`` escapes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        return _escapes(builder, *_codes(builder, arguments[0]))

    return types.uint64(_PLACE), code


@intrinsic
def unpack_block(typing: Any, plane: Any, codes: Any, base: Any, bits: Any) -> tuple[Any, Code]:
    """Decode a block into 64 bf16 patterns at ``bits``; an escaped weight becomes ``+-2**-126``."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        plane, codes, base, bits = arguments
        for half, pair in enumerate(_patterns(builder, plane, codes, _by_selection(builder, base))):
            for part in range(2):  # the four quarters of eight words come as 0, 2 | 1, 3
                order = [16 * (i // 8) + 8 * part + i % 8 for i in range(16)]
                store(builder, bits, shuffle(builder, *pair, order), 2 * (half * BLOCK_HALF + part * 16))
        return context.get_dummy_value()

    return types.void(_PLACE, _PLACE, types.int64, _PLACE), code


@intrinsic
def row_dots(
    typing: Any, plane: Any, codes: Any, apart: Any, blocks: Any, base: Any, x: Any, variant: Any
) -> tuple[Any, Code]:
    """The products of rows of ``blocks`` blocks with vectors: registers to be summed up, for a row after the other.

    plane, codes: where the first row begins; the next ones begin ``apart`` rows after one another.
    x: float32, each vector as long as a row, in the order of :func:`lane_columns`.
    variant: a :class:`Shuffled` or a :class:`Selected`; its type says which code, for how many rows and vectors.
    """
    runs, count = (len(kind) for kind in variant.types)
    shuffled = variant.instance_class is Shuffled
    result = types.UniTuple(Floats, runs * count)

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        plane, codes, apart, blocks, base, x, _ = arguments
        exponents = _by_shuffle(builder, base) if shuffled else _by_selection(builder, base)
        upper: Value = splat(_LANES, 0xFFFF0000)
        if shuffled:  # LLVM would take a known mask apart into a zero and a blend
            (upper,) = settle(builder, [upper])
        chains = max(1, 4 // (runs * count))  # four partial sums hide each other's delay, more do not fit in registers
        between = builder.mul(apart, blocks)

        def step(block: Value, sums: list[Value]) -> list[Value]:
            starts = [builder.add(block, builder.mul(blocks, LONG(number))) for number in range(count)]
            vectors = [builder.add(x, builder.mul(start, LONG(4 * BLOCK))) for start in starts]
            results = []
            for run in range(runs):
                place = builder.add(block, builder.mul(between, LONG(run)))
                signs = builder.add(plane, builder.mul(place, LONG(BLOCK)))
                packed = builder.add(codes, builder.mul(place, LONG(BLOCK_HALF)))
                of_run = sums[run * count * chains : (run + 1) * count * chains]
                of_run = _block_dots(builder, signs, packed, exponents, upper, vectors, of_run)
                results += settle(builder, of_run) if shuffled and runs > 1 else of_run
            return results

        sums = loop(builder, blocks, [ir.Constant(FLOATS, None)] * (runs * count * chains), step)
        dots = [reduce(builder.fadd, sums[i : i + chains]) for i in range(0, len(sums), chains)]
        return context.make_tuple(builder, signature.return_type, dots)

    return result(_PLACE, _PLACE, types.int64, types.int64, types.int64, _PLACE, variant), code


def _block_dots(
    builder: Any, signs: Value, packed: Value, exponents: Exponents, upper: Value, vectors: list[Value],
    sums: list[Value],
) -> list[Value]:  # fmt: skip
    """Add the products of one block to the partial sums, several for each vector. upper: the mask of upper halves."""
    for place, ahead in ((signs, 2 * _AHEAD), (packed, _AHEAD)):
        line = builder.inttoptr(at(builder, place, ahead), BYTE.as_pointer())
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [line, INT(0), INT(3), INT(1)])
    weights = [
        builder.bitcast(lanes, FLOATS)
        for pair in _patterns(builder, signs, packed, exponents)
        for words in pair
        for lanes in _even_and_odd(builder, words, upper)
    ]
    chains = len(sums) // len(vectors)
    sums = list(sums)
    for place, weight in enumerate(weights):
        for number, vector in enumerate(vectors):
            chain = number * chains + place % chains
            x = load(builder, vector, FLOATS, 4 * LANES * place)
            sums[chain] = call_llvm(builder, "llvm.fmuladd.v8f32", FLOATS, [weight, x, sums[chain]])
    return sums


def _patterns(builder: Any, plane: Value, codes: Value, exponents: Exponents) -> list[tuple[Value, Value]]:
    """The bf16 patterns of a block: per half a pair of vectors with words 0..7, 16..23 and 8..15, 24..31."""
    pairs = []
    for half, of_half in enumerate(_codes(builder, codes)):
        kept = load(builder, plane, _BYTES, half * BLOCK_HALF)
        upper, lower = exponents(of_half)
        high = builder.or_(upper, builder.and_(kept, splat(_BYTES, 0x80)))
        low = builder.or_(lower, builder.and_(kept, splat(_BYTES, 0x7F)))
        words = []
        for part in range(2):
            order = [16 * lane + 8 * part + i for lane in range(2) for i in range(8)]
            both = [place for i in order for place in (i, i + BLOCK_HALF)]
            words.append(builder.bitcast(shuffle(builder, low, high, both), _WORDS))
        pairs.append((words[0], words[1]))
    return pairs


def _codes(builder: Any, codes: Value) -> tuple[Value, Value]:
    both = load(builder, codes, _BYTES)
    return builder.and_(both, splat(_BYTES, 15)), builder.lshr(both, splat(_BYTES, 4))


def _escapes(builder: Any, low: Value, high: Value) -> Value:
    masks = [builder.icmp_unsigned("==", codes, splat(_BYTES, ESCAPE)) for codes in (low, high)]
    first, second = (builder.zext(builder.bitcast(mask, INT), LONG) for mask in masks)
    return builder.or_(first, builder.shl(second, LONG(BLOCK_HALF)))


def _code_and_sign(builder: Any, words: Value, below: Value) -> tuple[Value, Value]:
    """Of 16 bf16 patterns, the codes and the bytes of sign and mantissa (0 where the code is the escape), as words.

    ``below`` is the window's start: exponents under it wrap around and end up beyond the window as well.
    """
    exponent = builder.and_(builder.lshr(words, splat(_WORDS, 7)), splat(_WORDS, 255))
    place = builder.sub(exponent, below)
    inside = builder.icmp_unsigned("<", place, splat(_WORDS, CODES))
    code = builder.select(inside, builder.add(place, splat(_WORDS, 1)), splat(_WORDS, ESCAPE))
    zero = builder.icmp_unsigned("==", exponent, splat(_WORDS, 0))
    code = builder.select(zero, splat(_WORDS, 0), code)
    sign = builder.and_(builder.lshr(words, splat(_WORDS, 8)), splat(_WORDS, 0x80))
    mantissa = builder.and_(words, splat(_WORDS, 0x7F))
    escaped = builder.icmp_unsigned("==", code, splat(_WORDS, ESCAPE))
    return code, builder.or_(sign, builder.select(escaped, splat(_WORDS, 0), mantissa))


def _by_shuffle(builder: Any, base: Value) -> Exponents:
    """Look exponents up in two 16-byte tables, one for each byte of the pattern (AVX2)."""
    every_code = ir.Constant(_BYTES, [code % 16 for code in range(BLOCK_HALF)])
    upper, lower = _by_selection(builder, base)(every_code)

    def exponents(codes: Value) -> tuple[Value, Value]:
        return (
            call_llvm(builder, "llvm.x86.avx2.pshuf.b", _BYTES, [upper, codes]),
            call_llvm(builder, "llvm.x86.avx2.pshuf.b", _BYTES, [lower, codes]),
        )

    return exponents


def _by_selection(builder: Any, base: Value) -> Exponents:
    """Code 0 stands for exponent 0, the escape for exponent 1, the others for ``base + code``."""
    bases = broadcast(builder, builder.trunc(base, BYTE), _BYTES)

    def exponents(codes: Value) -> tuple[Value, Value]:
        escaped = builder.icmp_unsigned("==", codes, splat(_BYTES, ESCAPE))
        zero = builder.icmp_unsigned("==", codes, splat(_BYTES, 0))
        exponent = builder.select(escaped, splat(_BYTES, 1), builder.add(codes, bases))
        exponent = builder.select(zero, splat(_BYTES, 0), exponent)
        return builder.lshr(exponent, splat(_BYTES, 1)), builder.shl(exponent, splat(_BYTES, 7))

    return exponents


def _even_and_odd(builder: Any, words: Value, upper: Value) -> tuple[Value, Value]:
    lanes = builder.bitcast(words, _LANES)
    return builder.shl(lanes, splat(_LANES, 16)), builder.and_(lanes, upper)


def _narrow(builder: Any, first: Value, second: Value) -> Value:
    """Two vectors of 16 words below 256 as one vector of 32 bytes."""
    return builder.trunc(shuffle(builder, first, second, range(BLOCK_HALF)), _BYTES)
