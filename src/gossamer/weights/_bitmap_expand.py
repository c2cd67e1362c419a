"""From one byte of a bitmap to eight weights: the decoding step for processors with AVX2.

AVX2 has no instruction that spreads packed values to marked places, but it has byte shuffles, and a table of 256 entries
of 32 bytes gives the shuffle for every byte. For bfloat16 it drops each kept value straight into the upper half of its
32-bit lane and zeros elsewhere, which *is* the float32: nothing is left to convert.

What bounds the speed is the number of loads and instructions per byte. Four bytes are therefore spread at once into the
four table offsets (:func:`table_offsets`), and where the values of a byte start is counted on those offsets as they
stand, since shifting a byte does not change its number of bits (:func:`expand_four`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from gossamer.core.jit import (
    BYTE,
    FLOATS,
    INT,
    LONG,
    Code,
    Floats,
    aligned_bytes,
    call_llvm,
    inlined,
    item_bytes,
    load_from,
    popcount,
    popcount_low,
    settle,
)

FEATURES = frozenset({"avx2", "fma", "f16c", "popcnt", "bmi2"})
_SLOW_DEPOSIT = ("znver1", "znver2")  # there `pdep` takes a loop inside the processor
_LOWER_HALF = 32 * 0x0F  # the lower four marks of a byte, in its offset
_ZERO = 0x80  # a shuffle writes zero where the top bit of the control byte is set
_BYTES16, _BYTES32 = ir.VectorType(BYTE, 16), ir.VectorType(BYTE, 32)


@lru_cache(maxsize=3)
def shuffle_table(kind: str) -> np.ndarray:
    """Shuffles of all 256 bytes for values kept as ``kind``: "uint16" (bfloat16), "int16" (float16) or "float32"."""
    marks = (np.arange(256)[:, None] >> np.arange(8)) & 1
    rank = np.where(marks, np.cumsum(marks, axis=1) - 1, -1)
    if kind == "float32":  # each half of the byte shuffles 16 bytes of its own
        rank = np.where(marks, np.cumsum(marks.reshape(256, 2, 4), axis=2).reshape(256, 8) - 1, -1)
        return _aligned(np.where(rank[..., None] >= 0, 4 * rank[..., None] + np.arange(4), _ZERO).astype(np.uint8))
    pair = np.where(rank[..., None] >= 0, 2 * rank[..., None] + [0, 1], _ZERO)
    empty = np.full_like(pair, _ZERO)
    if kind == "uint16":
        pair = np.concatenate([empty, pair], axis=2)
    else:  # half of the entry is not used
        pair = np.concatenate([pair, empty], axis=1)
    return _aligned(pair.astype(np.uint8))


def _aligned(table: np.ndarray) -> np.ndarray:
    out = aligned_bytes(table.size)
    out[:] = table.reshape(-1)
    return out


@intrinsic
def table_offsets(typing: Any, marks: Any) -> tuple[Any, Code]:
    """Offsets of the shuffles for the four bytes of ``marks``: ``32 * byte`` in each quarter of an int64."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if binding.get_host_cpu_name() not in _SLOW_DEPOSIT:
            return call_llvm(builder, "llvm.x86.bmi.pdep.64", LONG, [arguments[0], LONG(0x1FE01FE01FE01FE0)])
        spread = arguments[0]
        for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF)):
            spread = builder.and_(builder.or_(spread, builder.shl(spread, LONG(shift))), LONG(mask))
        return builder.shl(spread, LONG(5))

    return types.int64(types.int64), code


@intrinsic
def expand8(typing: Any, values: Any, place: Any, table: Any, offset: Any) -> tuple[Any, Code]:
    """Eight weights as float32: packed values in the marked lanes, zeros elsewhere.

    values: the array whose number type counts. place: address of the packed values; 8 are read in any case.
    table: address of the shuffles. offset: of the byte's shuffle, ``32 * byte``.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, place, table, offset = arguments
        dtype = signature.args[0].dtype
        if dtype == types.float32:
            return builder.bitcast(spread_words(builder, place, table, offset), FLOATS)
        if dtype == types.int16:
            spread = spread_halves(builder, place, table, offset)
            return builder.fpext(builder.bitcast(spread, ir.VectorType(ir.HalfType(), 8)), FLOATS)
        packed = load_from(builder, place, _BYTES16)
        twice = builder.shuffle_vector(packed, packed, _concatenation(32))
        return builder.bitcast(_shuffle32(builder, twice, table, offset), FLOATS)

    return Floats(values, types.int64, types.int64, types.int64), code


def spread_halves(builder: Any, place: ir.Value, table: ir.Value, offset: ir.Value) -> ir.Value:
    """Eight 16-bit entries: the packed ones at ``place`` in the marked lanes, zeros elsewhere."""
    shuffle = load_from(builder, builder.add(table, offset), _BYTES16, 16)
    return call_llvm(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES16, [load_from(builder, place, _BYTES16), shuffle])


def spread_words(builder: Any, place: ir.Value, table: ir.Value, offset: ir.Value) -> ir.Value:
    """Eight 32-bit entries: the packed ones at ``place`` in the marked lanes, zeros elsewhere."""
    count = builder.ctpop(builder.and_(builder.trunc(offset, INT), INT(_LOWER_HALF)))
    upper = builder.add(place, builder.shl(builder.zext(count, LONG), LONG(2)))
    both = [load_from(builder, start, _BYTES16) for start in (place, upper)]
    return _shuffle32(builder, builder.shuffle_vector(*both, _concatenation(32)), table, offset)


def _shuffle32(builder: Any, packed: ir.Value, table: ir.Value, offset: ir.Value) -> ir.Value:
    """Both halves of ``packed`` shuffled by the two halves of a shuffle."""
    shuffle = load_from(builder, builder.add(table, offset), _BYTES32, 32)
    return call_llvm(builder, "llvm.x86.avx2.pshuf.b", _BYTES32, [packed, shuffle])


def _concatenation(size: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT, size), list(range(size)))


@inlined
def expand_four(values: Any, place: int, table: int, marks: int) -> tuple[Any, Any, Any, Any, int]:
    """The 32 weights of four bytes of a bitmap, and the place of the values that follow.

    values: the array whose number type counts. place: address of the bytes' first value. table: address of the shuffles.
    """
    size = item_bytes(values)
    offsets = table_offsets(marks)
    first, second = offsets & 0xFFFF, (offsets >> 16) & 0xFFFF
    third, fourth = (offsets >> 32) & 0xFFFF, (offsets >> 48) & 0xFFFF
    middle = place + size * popcount_low(offsets)
    return (
        expand8(values, place, table, first),
        expand8(values, place + size * popcount(first), table, second),
        expand8(values, middle, table, third),
        expand8(values, middle + size * popcount(third), table, fourth),
        place + size * popcount(offsets),
    )


@intrinsic
def settled(typing: Any, total: Any, place: Any) -> tuple[Any, Code]:
    """Both arguments, computed before anything that follows is begun (:func:`gossamer.core.jit.settle`)."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_tuple(builder, signature.return_type, settle(builder, arguments))

    return types.Tuple([Floats, types.int64])(Floats, types.int64), code
