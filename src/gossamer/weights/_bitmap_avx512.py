"""Row-layout bitmap weight times a vector on processors with AVX-512: one instruction spreads sixteen packed values.

``vpexpandw`` (VBMI2) and ``vpexpandps`` (F) read packed values straight into the marked lanes of a register. LLVM emits
them for ``llvm.masked.expandload``, and plain branches on any other processor, where this code is correct but slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from gossamer.core.jit import (
    FLOAT,
    HALF,
    INT,
    LONG,
    Code,
    FloatsType,
    address,
    call_llvm,
    inlined,
    item_bytes,
    kernel,
    load_from,
    load_word,
    parallel_kernel,
    prefetch,
    splat,
    sum_of_lanes,
)

FEATURES = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512vbmi2"})

_AHEAD = 2048  # bytes between what is read and what is asked for
_WIDE = FloatsType(16)
_FLOATS, _INTS, _HALVES = (ir.VectorType(kind, 16) for kind in (FLOAT, INT, HALF))
_FLOAT16S = ir.VectorType(ir.HalfType(), 16)
_MASK = ir.VectorType(ir.IntType(1), 16)


@intrinsic
def _zeros16(typing: Any) -> tuple[Any, Code]:
    """Sixteen zeros."""
    return _WIDE(), lambda context, builder, signature, arguments: ir.Constant(_FLOATS, None)


@intrinsic
def _sum32(typing: Any, first: Any, second: Any) -> tuple[Any, Code]:
    """Sum of all entries of two registers, as float32."""
    return types.float32(_WIDE, _WIDE), lambda context, builder, signature, arguments: sum_of_lanes(
        builder, builder.fadd(*arguments)
    )


@intrinsic
def _add_word(typing: Any, values: Any, place: Any, marks: Any, x: Any, even: Any, odd: Any) -> tuple[Any, Code]:
    """Add the 64 weights of a bitmap word times 64 entries of ``x`` to two totals; also where the next values start.

    values: the array whose number type counts. place: address of the word's first value. x: address.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, place, marks, x, *totals = arguments
        dtype = signature.args[0].dtype
        for part in range(4):
            some = builder.trunc(builder.lshr(marks, LONG(16 * part)), HALF)
            weights = _expand16(builder, dtype, place, builder.bitcast(some, _MASK))
            inputs = load_from(builder, builder.add(x, LONG(64 * part)), _FLOATS, 4)
            totals[part % 2] = call_llvm(builder, "llvm.fmuladd.v16f32", _FLOATS, [weights, inputs, totals[part % 2]])
            count = builder.zext(builder.ctpop(some), LONG)
            place = builder.add(place, builder.mul(count, LONG(dtype.bitwidth // 8)))
        return context.make_tuple(builder, signature.return_type, [*totals, place])

    result = types.Tuple([_WIDE, _WIDE, types.int64])
    return result(values, types.int64, types.int64, types.int64, _WIDE, _WIDE), code


def _expand16(builder: Any, dtype: Any, place: ir.Value, mask: ir.Value) -> ir.Value:
    """Packed values at ``place`` in the lanes of ``mask``, zeros elsewhere, as float32."""
    if dtype == types.float32:
        pointer = builder.inttoptr(place, FLOAT.as_pointer())
        return call_llvm(builder, "llvm.masked.expandload.v16f32", _FLOATS, [pointer, mask, ir.Constant(_FLOATS, None)])
    pointer = builder.inttoptr(place, HALF.as_pointer())
    spread = call_llvm(builder, "llvm.masked.expandload.v16i16", _HALVES, [pointer, mask, ir.Constant(_HALVES, None)])
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(spread, _FLOAT16S), _FLOATS)
    return builder.bitcast(builder.shl(builder.zext(spread, _INTS), splat(_INTS, 16)), _FLOATS)


@inlined
def _ask_for(values: Any, place: int) -> None:
    """Prefetch what 64 columns half full of values use, ``_AHEAD`` bytes from now."""
    prefetch(place + _AHEAD)
    if item_bytes(values) == 4:
        prefetch(place + _AHEAD + 64)


@kernel
def _two_runs(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, first: int, last: int) -> None:
    """``out[first:last] = W[first:last] @ x``, two runs of rows side by side; ``x`` padded to whole words."""
    words, size = len(x) // 64, item_bytes(values)
    marks, data, x0 = address(bitmap), address(values), address(x)
    run = (last - first) // 2
    gap = 8 * words * run
    for row in range(first, first + run):
        a, b = data + size * offsets[row], data + size * offsets[row + run]
        a0, a1, b0, b1 = _zeros16(), _zeros16(), _zeros16(), _zeros16()
        for word in range(words):
            _ask_for(values, a)
            _ask_for(values, b)
            near = marks + 8 * (words * row + word)
            a0, a1, a = _add_word(values, a, load_word(near), x0 + 256 * word, a0, a1)
            b0, b1, b = _add_word(values, b, load_word(near + gap), x0 + 256 * word, b0, b1)
        out[row], out[row + run] = _sum32(a0, a1), _sum32(b0, b1)
    for row in range(first + 2 * run, last):
        a = data + size * offsets[row]
        a0, a1 = _zeros16(), _zeros16()
        for word in range(words):
            near = marks + 8 * (words * row + word)
            a0, a1, a = _add_word(values, a, load_word(near), x0 + 256 * word, a0, a1)
        out[row] = _sum32(a0, a1)


@inlined
def _padded(x: Any, words: int) -> Any:
    longer = np.zeros(64 * words, np.float32)
    longer[: len(x)] = x
    return longer


@kernel
def rows_expanded(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` with AVX-512 on one thread; ``table`` is not looked at. The arrays are those of the row layout."""
    _two_runs(bitmap, values, offsets, _padded(x, len(bitmap) // len(out)), out, 0, len(out))


@parallel_kernel
def rows_expanded_threaded(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """The same, each run of rows between two entries of ``shares`` on a thread of its own."""
    padded = _padded(x, len(bitmap) // len(out))
    for share in prange(len(shares) - 1):
        _two_runs(bitmap, values, offsets, padded, out, shares[share], shares[share + 1])
