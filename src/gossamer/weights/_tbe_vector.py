"""Vector code for the ``tbe`` layout: one 8x8 tile at a time, as LLVM IR inside numba functions.

The 64 bits of a plane become the 64 bytes of a vector (or of as many as the processor needs for that), the three
planes add up to the exponent, and the bytes of sign and mantissa stand beside it, a uint64 for each row of the tile.
Weights without a code get a byte here too, which the loops that call this leave out of the stream, or put in.
Places are addresses in bytes; nothing is checked.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gossamer.core.jit import BYTE, HALF, LONG, Code, load_from, splat
from gossamer.weights._lossless_ir import Value, broadcast, load, shuffle, store

TILE, SMALL = 64, 8
CODES = 7

_BYTES = ir.VectorType(BYTE, SMALL * SMALL)
_BITS = ir.VectorType(ir.IntType(1), SMALL * SMALL)
_ROW = ir.VectorType(BYTE, SMALL)
_WORDS = ir.VectorType(HALF, SMALL)
_PLACE = types.int64
_BETWEEN_ROWS = 2 * TILE


@intrinsic
def split_tile(typing: Any, bits: Any, base: Any, kept: Any) -> tuple[Any, Code]:
    """Take the 8x8 tile of bf16 patterns at ``bits``, whose rows are 64 patterns apart, to pieces.

    The result is the three planes as uint64. ``kept``, uint64 ``(8,)``, gets the bytes of sign and mantissa, row by
    row, also of weights without a code.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        bits, base, kept = arguments
        rows = [load(builder, bits, _WORDS, _BETWEEN_ROWS * row) for row in range(SMALL)]
        high = _joined(builder, [builder.trunc(builder.lshr(row, splat(_WORDS, 8)), _ROW) for row in rows])
        low = _joined(builder, [builder.trunc(row, _ROW) for row in rows])
        sign, mantissa = builder.and_(high, splat(_BYTES, 0x80)), builder.and_(low, splat(_BYTES, 0x7F))
        store(builder, kept, builder.or_(sign, mantissa))
        exponent = builder.or_(builder.shl(high, splat(_BYTES, 1)), builder.lshr(low, splat(_BYTES, 7)))
        code = builder.sub(exponent, broadcast(builder, builder.trunc(base, BYTE), _BYTES))
        inside = builder.icmp_unsigned("<", builder.sub(code, splat(_BYTES, 1)), splat(_BYTES, CODES))
        planes = []
        for weight in (1, 2, 4):
            bit = builder.icmp_unsigned("!=", builder.and_(code, splat(_BYTES, weight)), splat(_BYTES, 0))
            planes.append(builder.bitcast(builder.and_(bit, inside), LONG))
        return context.make_tuple(builder, signature.return_type, planes)

    return types.UniTuple(types.uint64, 3)(_PLACE, types.int64, _PLACE), code


@intrinsic
def join_tile(typing: Any, one: Any, two: Any, three: Any, base: Any, kept: Any, bits: Any) -> tuple[Any, Code]:
    """Put an 8x8 tile together again as if all its weights had codes: the inverse of :func:`split_tile`.

    ``kept`` is a tuple of eight uint64 here: as words in memory they could not be read as vectors at once.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        *planes, base, kept, bits = arguments
        exponent = broadcast(builder, builder.trunc(base, BYTE), _BYTES)
        for plane, weight in zip(planes, (1, 2, 4), strict=True):
            here = builder.sext(builder.bitcast(plane, _BITS), _BYTES)
            exponent = builder.add(exponent, builder.and_(here, splat(_BYTES, weight)))
        lines = ir.Constant(ir.VectorType(LONG, SMALL), ir.Undefined)
        for row, line in enumerate(cgutils.unpack_tuple(builder, kept)):
            lines = builder.insert_element(lines, line, LONG(row))
        byte = builder.bitcast(lines, _BYTES)
        sign, mantissa = builder.and_(byte, splat(_BYTES, 0x80)), builder.and_(byte, splat(_BYTES, 0x7F))
        high = builder.or_(sign, builder.lshr(exponent, splat(_BYTES, 1)))
        low = builder.or_(mantissa, builder.shl(exponent, splat(_BYTES, 7)))
        for row in range(SMALL):
            order = [place for i in range(SMALL * row, SMALL * (row + 1)) for place in (i, i + SMALL * SMALL)]
            words = builder.bitcast(shuffle(builder, low, high, order), _WORDS)
            store(builder, bits, words, _BETWEEN_ROWS * row)
        return context.get_dummy_value()

    words = types.UniTuple(types.uint64, SMALL)
    return types.void(*(types.uint64,) * 3, types.int64, words, _PLACE), code


@intrinsic
def load_eight(typing: Any, place: Any) -> tuple[Any, Code]:
    """Eight bytes from an address as one uint64."""
    return types.uint64(_PLACE), lambda context, builder, signature, arguments: load_from(builder, arguments[0], LONG)


@intrinsic
def store_eight(typing: Any, place: Any, word: Any) -> tuple[Any, Code]:
    """Write a uint64 to an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        store(builder, arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(_PLACE, types.uint64), code


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, size: Any) -> tuple[Any, Code]:
    """Copy ``size`` bytes between two addresses."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Value:
        target, source = (builder.inttoptr(place, BYTE.as_pointer()) for place in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], LONG(1))
        return context.get_dummy_value()

    return types.void(_PLACE, _PLACE, types.int64), code


def _joined(builder: Any, rows: list[Value]) -> Value:
    """Vectors of eight bytes as one of 64."""
    while len(rows) > 1:
        width = 2 * rows[0].type.count
        rows = [shuffle(builder, rows[i], rows[i + 1], range(width)) for i in range(0, len(rows), 2)]
    return rows[0]
