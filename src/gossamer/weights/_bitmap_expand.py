"""One byte of a bitmap, eight weights: the decoding step for processors with AVX2.

Lesser and greater processors than AVX-512 ones have no instruction that spreads packed values to marked places, but all
have byte shuffles. A table gives the shuffle for each of the 256 bytes. For bfloat16 it drops each kept value straight
into the upper half of its 32-bit lane and zeros elsewhere, which *is* the float32: nothing is left to convert.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gossamer.core.jit import BYTE, FLOATS, INT, LONG, Code, Floats, aligned_bytes, call_llvm, load_from, splat

FEATURES = frozenset({"avx2", "fma", "f16c", "popcnt"})
_ZERO = 0x80  # a shuffle writes zero where the top bit of the control byte is set
_BYTES16, _BYTES32 = ir.VectorType(BYTE, 16), ir.VectorType(BYTE, 32)
_INTS = ir.VectorType(INT, 8)


@lru_cache(maxsize=3)
def shuffle_table(kind: str) -> np.ndarray:
    """Shuffles of all 256 bytes for values kept as ``kind``: "uint16" (bfloat16), "int16" (float16) or "float32"."""
    marks = (np.arange(256)[:, None] >> np.arange(8)) & 1
    rank = np.where(marks, np.cumsum(marks, axis=1) - 1, -1)
    if kind == "float32":  # lane numbers with the top bit set where the lane is kept
        lanes = np.where(rank >= 0, rank | np.int64(-(2**31)), 0).astype(np.int32)
        return _aligned(lanes.view(np.uint8))
    pair = np.where(rank[..., None] >= 0, 2 * rank[..., None] + [0, 1], _ZERO)
    if kind == "uint16":
        pair = np.concatenate([np.full_like(pair, _ZERO), pair], axis=2)
    return _aligned(pair.reshape(256, -1).astype(np.uint8))


def _aligned(table: np.ndarray) -> np.ndarray:
    out = aligned_bytes(table.size)
    out[:] = table.reshape(-1)
    return out


@intrinsic
def expand8(typing: Any, values: Any, place: Any, table: Any, byte: Any) -> tuple[Any, Code]:
    """Eight weights as float32: the packed values at address ``place`` where ``byte`` has bits, zeros elsewhere.

    values: the array whose number type counts. table: address of its :func:`shuffle_table`. Reads 8 values in any case.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, place, table, byte = arguments
        dtype = signature.args[0].dtype
        size = 16 if dtype == types.int16 else 32
        control = builder.add(table, builder.mul(byte, LONG(size)))
        if dtype == types.float32:
            return _expand_float32(builder, place, control)
        packed = load_from(builder, place, _BYTES16)
        if dtype == types.int16:
            spread = call_llvm(
                builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES16, [packed, load_from(builder, control, _BYTES16, 16)]
            )
            return builder.fpext(builder.bitcast(spread, ir.VectorType(ir.HalfType(), 8)), FLOATS)
        twice = builder.shuffle_vector(packed, packed, ir.Constant(ir.VectorType(INT, 32), [*range(16), *range(16)]))
        spread = call_llvm(
            builder, "llvm.x86.avx2.pshuf.b", _BYTES32, [twice, load_from(builder, control, _BYTES32, 32)]
        )
        return builder.bitcast(spread, FLOATS)

    return Floats(values, types.int64, types.int64, types.int64), code


def _expand_float32(builder: Any, place: ir.Value, control: ir.Value) -> ir.Value:
    packed = load_from(builder, place, FLOATS, 4)
    lanes = load_from(builder, control, _INTS, 32)
    spread = call_llvm(builder, "llvm.x86.avx2.permps", FLOATS, [packed, lanes])
    return builder.select(builder.icmp_signed("<", lanes, splat(_INTS, 0)), spread, ir.Constant(FLOATS, None))
