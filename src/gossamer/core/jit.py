"""What CPU kernels written with numba need beyond numba: vector registers and a few instructions.

A kernel is a plain numba function over addresses and registers of eight float32 (``Floats``), which LLVM maps to one
AVX2 register, two NEON ones, or half of an AVX-512 one::

    @kernel
    def dot(values, x, columns):
        total = zeros8()
        for column in range(0, columns, 8):
            total = multiply_add8(widen8(values, address(values) + 2 * column), load8(address(x) + 4 * column), total)
        return sum8(total)

Arrays tell their number type by their NumPy dtype. numba knows neither half type on CPUs, so their bit patterns stand
for them: ``uint16`` means bfloat16 and ``int16`` means float16. Addresses are plain integers in bytes: nothing is checked,
so a kernel may only be reached through a caller that has checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "cache": True}
"""How every kernel is compiled. It releases the interpreter lock and its machine code is kept on disk."""

kernel = njit(**OPTIONS)
inlined = njit(forceinline=True, **{**OPTIONS, "cache": False})


def parallel_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` with its ``prange`` loops spread over numba's threads. It can be called from Python only."""
    compiled = njit(parallel=True, **OPTIONS)(function)

    @wraps(function)
    def launch(*arguments: Any) -> Any:
        start_threads()
        return compiled(*arguments)

    return launch


@lru_cache(maxsize=1)
def start_threads() -> None:
    """Start numba's threads, once, without changing how many torch uses.

    numba and torch share one OpenMP library, and numba's start sets that library's number of threads for both.
    """
    from numba.np.ufunc.parallel import _launch_threads

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    _launch_threads()
    if torch:
        torch.set_num_threads(before)


class FloatsType(types.Type):
    """numba's type of a register of ``lanes`` float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Floats{lanes}")


Floats = FloatsType(LANES)

FLOAT, BYTE, HALF, INT, LONG = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
_HALVES = ir.VectorType(HALF, LANES)
_INTS = ir.VectorType(INT, LANES)
_FLOAT16S = ir.VectorType(ir.HalfType(), LANES)


@register_model(FloatsType)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.VectorType(FLOAT, kind.lanes))


def aligned_bytes(size: int, alignment: int = 64) -> np.ndarray:
    """A zeroed uint8 array of ``size`` bytes whose address is a multiple of ``alignment``.

    >>> aligned_bytes(10).ctypes.data % 64
    0
    """
    room = np.zeros(size + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + size]


def row_shares(work: np.ndarray, parts: int) -> np.ndarray:
    """Cut rows into ``parts`` runs of about equal work.

    work: cumulative work at the row boundaries, ``(rows + 1,)``, starting at 0. Returns int64 ``(parts + 1,)`` row numbers.

    >>> row_shares(np.array([0, 8, 10, 12, 16]), 2).tolist()
    [0, 1, 4]
    """
    goals = np.linspace(work[0], work[-1], parts + 1)
    shares = np.searchsorted(work, goals).astype(np.int64)
    shares[0], shares[-1] = 0, len(work) - 1
    return np.maximum.accumulate(shares)


def call_llvm(builder: Any, name: str, result: ir.Type, arguments: Sequence[ir.Value]) -> ir.Value:
    """Call the LLVM intrinsic ``name``, whose operand types are those of ``arguments``."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(arguments))


def load_from(builder: Any, place: ir.Value, kind: ir.Type, alignment: int = 1) -> ir.Value:
    """Load a ``kind`` from the integer address ``place``."""
    value = builder.load(builder.inttoptr(place, kind.as_pointer()))
    value.align = alignment
    return value


def splat(kind: ir.VectorType, value: int) -> ir.Constant:
    """A constant vector of equal entries."""
    return ir.Constant(kind, [value] * kind.count)


def settle(builder: Any, values: Sequence[ir.Value]) -> list[ir.Value]:
    """The same integers and vectors, computed before any load that follows, and unknown to LLVM (x86 only).

    It keeps LLVM from working on several rows at a time with more registers than there are, and from taking a constant
    for something that can be made anew. An empty piece of assembly, said to change the values and read memory: no code.
    """
    kinds = [value.type for value in values]
    places = ["x" if isinstance(kind, ir.VectorType) else "r" for kind in kinds]
    constraints = [*(f"={place}" for place in places), *map(str, range(len(kinds))), "~{memory}"]
    several = len(kinds) > 1
    result = ir.LiteralStructType(kinds) if several else kinds[0]
    nothing = ir.InlineAsm(ir.FunctionType(result, kinds), "", ",".join(constraints), side_effect=True)
    same = builder.call(nothing, values)
    return [builder.extract_value(same, number) for number in range(len(kinds))] if several else [same]


Code = Callable[[Any, Any, Any, Any], Any]


@intrinsic
def address(typing: Any, array: Any) -> tuple[Any, Code]:
    """Address of the first entry of a contiguous array, int64."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, LONG)

    return types.int64(array), code


@intrinsic
def item_bytes(typing: Any, array: Any) -> tuple[Any, Code]:
    """Bytes of one entry of an array, int64; a constant of the machine code, unlike the array's ``itemsize``."""
    return types.int64(array), lambda context, builder, signature, arguments: LONG(
        signature.args[0].dtype.bitwidth // 8
    )


@intrinsic
def load_half_word(typing: Any, place: Any) -> tuple[Any, Code]:
    """The 32 bits at an address, as int64."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.zext(
        load_from(builder, arguments[0], INT), LONG
    )


@intrinsic
def load_word(typing: Any, place: Any) -> tuple[Any, Code]:
    """The 64-bit word at an address, as int64."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: load_from(
        builder, arguments[0], LONG
    )


@intrinsic
def popcount(typing: Any, value: Any) -> tuple[Any, Code]:
    """Number of set bits of a 64-bit integer, as int64."""
    wide = types.uint64 if value == types.uint64 else types.int64
    return types.int64(wide), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


@intrinsic
def popcount_low(typing: Any, value: Any) -> tuple[Any, Code]:
    """Number of set bits among the lower 32 of an int64, as int64."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.zext(
        builder.ctpop(builder.trunc(arguments[0], INT)), LONG
    )


@intrinsic
def lowest_bit(typing: Any, value: Any) -> tuple[Any, Code]:
    """Number of the lowest set bit of a 64-bit integer that is not zero, as int64."""
    wide = types.uint64 if value == types.uint64 else types.int64
    return types.int64(wide), lambda context, builder, signature, arguments: builder.cttz(
        arguments[0], ir.Constant(ir.IntType(1), 1)
    )


@intrinsic
def prefetch(typing: Any, place: Any) -> tuple[Any, Code]:
    """Ask for the cache line at an address, which need not be a valid one."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], BYTE.as_pointer())
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, INT(0), INT(3), INT(1)])
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic
def zeros8(typing: Any) -> tuple[Any, Code]:
    """Eight zeros."""
    return Floats(), lambda context, builder, signature, arguments: ir.Constant(FLOATS, None)


@intrinsic
def load8(typing: Any, place: Any) -> tuple[Any, Code]:
    """Eight float32 from an address."""
    return Floats(types.int64), lambda context, builder, signature, arguments: load_from(
        builder, arguments[0], FLOATS, 4
    )


@intrinsic
def store8(typing: Any, place: Any, value: Any) -> tuple[Any, Code]:
    """Write eight float32 to an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        written = builder.store(arguments[1], builder.inttoptr(arguments[0], FLOATS.as_pointer()))
        written.align = 4
        return context.get_dummy_value()

    return types.void(types.int64, Floats), code


@intrinsic
def add8(typing: Any, first: Any, second: Any) -> tuple[Any, Code]:
    """Sum, entry by entry."""
    return Floats(Floats, Floats), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def multiply_add8(typing: Any, first: Any, second: Any, third: Any) -> tuple[Any, Code]:
    """``first * second + third``, entry by entry, fused where the processor can."""
    return Floats(Floats, Floats, Floats), lambda context, builder, signature, arguments: call_llvm(
        builder, "llvm.fmuladd.v8f32", FLOATS, arguments
    )


@intrinsic
def sum8(typing: Any, value: Any) -> tuple[Any, Code]:
    """Sum of the eight entries, as float32, added in pairs."""

    return types.float32(Floats), lambda context, builder, signature, arguments: sum_of_lanes(builder, arguments[0])


def sum_of_lanes(builder: Any, vector: ir.Value) -> ir.Value:
    """Sum of a vector whose length is a power of two, added in pairs."""
    width = vector.type.count
    while width > 1:
        width //= 2
        order = [ir.Constant(ir.VectorType(INT, width), list(range(side, side + width))) for side in (0, width)]
        vector = builder.fadd(*[builder.shuffle_vector(vector, vector, places) for places in order])
    return builder.extract_element(vector, INT(0))


@intrinsic
def widen8(typing: Any, values: Any, place: Any) -> tuple[Any, Code]:
    """Eight entries of the type of the array ``values`` from an address, as float32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return as_floats(builder, signature.args[0].dtype, arguments[1])

    return Floats(values, types.int64), code


def as_floats(builder: Any, dtype: Any, place: ir.Value) -> ir.Value:
    """Eight entries at an integer address, of the number type that ``dtype`` stands for, as float32."""
    if dtype == types.float32:
        return load_from(builder, place, FLOATS, 4)
    if dtype == types.int16:
        return builder.fpext(load_from(builder, place, _FLOAT16S, 2), FLOATS)
    if dtype == types.uint16:
        wide = builder.zext(load_from(builder, place, _HALVES, 2), _INTS)
        return builder.bitcast(builder.shl(wide, splat(_INTS, 16)), FLOATS)
    raise TypeError(f"a kernel reads float32, int16 (float16) and uint16 (bfloat16) arrays, not {dtype}")


@intrinsic
def entry(typing: Any, values: Any, index: Any) -> tuple[Any, Code]:
    """One entry of an array as float32, on whatever processor."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        dtype = signature.args[0].dtype
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        size = LONG(dtype.bitwidth // 8)
        place = builder.add(builder.ptrtoint(data, LONG), builder.mul(arguments[1], size))
        if dtype == types.float32:
            return load_from(builder, place, FLOAT, 4)
        bits = builder.zext(load_from(builder, place, HALF, 2), INT)
        if dtype == types.uint16:
            return builder.bitcast(builder.shl(bits, INT(16)), FLOAT)
        return _float_from_half_bits(builder, bits)

    return types.float32(values, types.int64), code


def _float_from_half_bits(builder: Any, bits: ir.Value) -> ir.Value:
    """IEEE binary16 bits (in an int32) as float32, with integer instructions and one exact multiplication."""
    magnitude = builder.and_(bits, INT(0x7FFF))
    sign = builder.shl(builder.and_(bits, INT(0x8000)), INT(16))
    shifted = builder.shl(magnitude, INT(13))
    scaled = builder.bitcast(builder.fmul(builder.bitcast(shifted, FLOAT), ir.Constant(FLOAT, 2.0**112)), INT)
    special = builder.or_(shifted, INT(0x7F800000))
    finite = builder.icmp_unsigned("<", magnitude, INT(0x7C00))
    return builder.bitcast(builder.or_(builder.select(finite, scaled, special), sign), FLOAT)


@kernel
def fma_chains(steps: int) -> float:
    """``10 * steps`` vector multiply-adds in ten independent chains on registers: what the arithmetic units can do."""
    seed = np.full(LANES, 0.5, np.float32)
    factor = load8(address(seed))
    a, b, c, d, e = factor, factor, factor, factor, factor
    f, g, h, i, j = factor, factor, factor, factor, factor
    for _ in range(steps):
        a, b = multiply_add8(a, factor, factor), multiply_add8(b, factor, factor)
        c, d = multiply_add8(c, factor, factor), multiply_add8(d, factor, factor)
        e, f = multiply_add8(e, factor, factor), multiply_add8(f, factor, factor)
        g, h = multiply_add8(g, factor, factor), multiply_add8(h, factor, factor)
        i, j = multiply_add8(i, factor, factor), multiply_add8(j, factor, factor)
    return sum8(add8(add8(add8(a, b), add8(c, d)), add8(add8(e, f), add8(add8(g, h), add8(i, j)))))
