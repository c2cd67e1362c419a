"""Vector values in LLVM IR: types (fixed and scalable), memory with edges, semirings, and the exponential for ELU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from gossamer.codegen._kernel import DYNAMIC_EDGE, MicroKernel
from gossamer.codegen._targets import Target

PTR, BYTE, BOOL = ir.PointerType(), ir.IntType(8), ir.IntType(1)
HALF, INT, LONG, FLOAT, DOUBLE = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()
SCALARS = {"f32": FLOAT, "f64": DOUBLE, "i32": INT, "bf16": HALF}
INT_INFINITY = 2**30 - 1


class ScalableVector(ir.VectorType):
    """``<vscale x n x element>``, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return f"<vscale x {self.count} x {self.element}>"

    def wrap_constant_value(self, values: Any) -> Any:
        """Zero is the only constant that is written out; others are made by splats."""
        return values

    def format_constant(self, value: Any) -> str:
        """LLVM's text of a constant."""
        return "zeroinitializer"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScalableVector) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash(("scalable", self.count, self.element))


def call(
    builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[ir.Value], flags: Sequence[str] = ()
) -> Any:
    """Call an LLVM intrinsic; its declaration is added to the module once."""
    module = builder.module
    known = module.globals.get(name)
    function = known or ir.Function(module, ir.FunctionType(result, [value.type for value in arguments]), name)
    return builder.call(function, list(arguments), fastmath=tuple(flags))


def offset(builder: ir.IRBuilder, pointer: ir.Value, distance: ir.Value | int) -> ir.Value:
    """``pointer`` plus a number of bytes."""
    if isinstance(distance, int):
        if not distance:
            return pointer
        distance = LONG(distance)
    return builder.gep(pointer, [distance], source_etype=BYTE)


class VectorOps:
    """What one kernel does with vectors on one target. Wraps a builder; holds no other state than the edge mask."""

    def __init__(self, builder: ir.IRBuilder, kernel: MicroKernel, target: Target) -> None:
        self.builder = builder
        self.kernel = kernel
        self.target = target
        self.lanes = target.lanes(kernel.element)
        self.scalar = SCALARS[kernel.element]
        self.kind = self.vector_of(self.scalar)
        self.mask: ir.Value | None = None
        suffix = {"f32": "f32", "f64": "f64", "i32": "i32"}[kernel.element]
        self.suffix = f"{'nx' if target.scalable else ''}v{self.lanes}{suffix}"

    def vector_of(self, scalar: ir.Type) -> ir.VectorType:
        """The register type of as many ``scalar``s as the kernel has lanes."""
        return (ScalableVector if self.target.scalable else ir.VectorType)(scalar, self.lanes)

    def step_bytes(self) -> ir.Value:
        """Bytes from one vector to the next."""
        size = LONG(self.target.vector_bytes)
        if not self.target.scalable:
            return size
        return self.builder.mul(call(self.builder, "llvm.vscale.i64", LONG, []), size)

    def splat(self, value: ir.Value) -> ir.Value:
        """A vector of equal entries."""
        return self._splat(value, self.kind)

    def _splat(self, value: ir.Value, kind: ir.VectorType) -> ir.Value:
        builder = self.builder
        if self.target.scalable:
            name = "llvm.aarch64.sve.dup.x.nxv4" + ("f32" if kind == self.kind else "i32")
            return call(builder, name, kind, [value])
        undefined = ir.Constant(kind, ir.Undefined)
        one = builder.insert_element(undefined, value, INT(0))
        return builder.shuffle_vector(one, undefined, ir.Constant(self.vector_of(INT), None))

    def constant(self, value: float) -> ir.Value:
        """A vector of one constant."""
        if self.target.scalable:
            return self.splat(ir.Constant(self.scalar, value))
        return ir.Constant(self.kind, [value] * self.lanes)

    def element(self, vector: ir.Value, place: int) -> ir.Value:
        """A vector of copies of one entry of ``vector``."""
        order = ir.Constant(self.vector_of(INT), [place] * self.lanes)
        return self.builder.shuffle_vector(vector, ir.Constant(self.kind, ir.Undefined), order)

    def set_mask(self, columns: ir.Value, before: ir.Value) -> None:
        """Settle the edge mask: lane j of the last vector is in use where ``before + j < columns``."""
        bools = self.vector_of(BOOL)
        name = f"llvm.get.active.lane.mask.{'nx' if self.target.scalable else ''}v{self.lanes}i1.i32"
        low = [self.builder.trunc(value, INT) for value in (before, columns)]
        self.mask = call(self.builder, name, bools, low)

    def _edge_mask(self) -> ir.Value:
        if self.mask is not None:
            return self.mask
        return ir.Constant(self.vector_of(BOOL), [int(lane < self.kernel.edge) for lane in range(self.lanes)])

    def load(self, pointer: ir.Value, cut: bool) -> ir.Value:
        """A vector; where ``cut``, only the lanes before the edge are read and the others are zero."""
        if not cut:
            return self.builder.load(pointer, align=self.scalar_bytes, typ=self.kind)
        zero = ir.Constant(self.kind, None)
        name = f"llvm.masked.load.{self.suffix}.p0"
        return call(self.builder, name, self.kind, [pointer, INT(self.scalar_bytes), self._edge_mask(), zero])

    def load_bf16(self, pointer: ir.Value) -> ir.Value:
        """As many bfloat16 as the kernel has lanes, as float32."""
        wide = self.vector_of(INT)
        bits = self.builder.zext(self.builder.load(pointer, align=2, typ=self.vector_of(HALF)), wide)
        return self.builder.bitcast(self.builder.shl(bits, ir.Constant(wide, [16] * self.lanes)), self.kind)

    def store(self, value: ir.Value, pointer: ir.Value, cut: bool) -> None:
        """Write a vector; where ``cut``, only the lanes before the edge."""
        if not cut:
            self.builder.store(value, pointer, align=self.scalar_bytes)
        elif self.kernel.edge == DYNAMIC_EDGE:
            arguments = [value, pointer, INT(self.scalar_bytes), self._edge_mask()]
            call(self.builder, f"llvm.masked.store.{self.suffix}.p0", ir.VoidType(), arguments)
        else:
            self._store_pieces(value, pointer)

    def _store_pieces(self, value: ir.Value, pointer: ir.Value) -> None:
        """The first lanes in pieces of 4, 2 and 1: masked stores take tens of cycles on some AVX2 processors."""
        start, builder = 0, self.builder
        for width in (8, 4, 2, 1):
            if self.kernel.edge - start < width:
                continue
            place = offset(builder, pointer, start * self.scalar_bytes)
            if width == 1:
                builder.store(builder.extract_element(value, INT(start)), place, align=self.scalar_bytes)
            else:
                order = ir.Constant(ir.VectorType(INT, width), list(range(start, start + width)))
                piece = builder.shuffle_vector(value, ir.Constant(self.kind, ir.Undefined), order)
                builder.store(piece, place, align=self.scalar_bytes)
            start += width

    @property
    def scalar_bytes(self) -> int:
        """Bytes of one number."""
        return {"f32": 4, "f64": 8, "i32": 4}[self.kernel.element]

    def zero(self) -> ir.Value:
        """The neutral element of the semiring's sum."""
        whole = self.kernel.element == "i32"
        if self.kernel.semiring == "min_plus":
            return self.constant(INT_INFINITY if whole else math.inf)
        if self.kernel.semiring == "max_min":
            return self.constant(-INT_INFINITY if whole else -math.inf)
        return ir.Constant(self.kind, None)

    def fold(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """``total (+) a (x) b``."""
        builder = self.builder
        if self.kernel.semiring == "plus_times":
            return call(builder, f"llvm.fma.{self.suffix}", self.kind, [a, b, total])
        if self.kernel.semiring == "max_min":
            return self.combine(total, self._extreme("min", a, b))
        add = builder.add if self.kernel.element == "i32" else builder.fadd
        return self.combine(total, add(a, b))

    def combine(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """The semiring's sum of two vectors."""
        if self.kernel.semiring == "plus_times":
            return self.builder.fadd(first, second)
        return self._extreme("min" if self.kernel.semiring == "min_plus" else "max", first, second)

    def _extreme(self, which: str, first: ir.Value, second: ir.Value) -> ir.Value:
        if self.kernel.element == "i32":
            return call(self.builder, f"llvm.s{which}.{self.suffix}", self.kind, [first, second])
        # No NaN can arise (weights are checked, infinities of one sign only): without this promise LLVM adds tests.
        flags = ("nnan", "nsz")
        return call(self.builder, f"llvm.{which}num.{self.suffix}", self.kind, [first, second], flags)

    def activate(self, value: ir.Value) -> ir.Value:
        """The kernel's activation of a vector."""
        if self.kernel.activation == "none":
            return value
        builder, zero = self.builder, ir.Constant(self.kind, None)
        # A NaN stays a NaN: the comparison is ordered, and chosen so that NaN keeps the value.
        positive = builder.select(builder.fcmp_ordered("<", value, zero), zero, value)
        if self.kernel.activation == "relu":
            return positive
        negative = builder.select(builder.fcmp_ordered("<", value, zero), value, zero)
        return builder.fadd(positive, self._expm1(negative))

    def _expm1(self, x: ir.Value) -> ir.Value:
        """``exp(x) - 1`` of float32 ``x <= 0`` with an absolute error below 1e-7.

        x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) - 1 is its Taylor polynomial of degree 7, whose first term left out
        is below 6e-9; 2^n is made in the exponent's bits. Below -87 the answer is -1 to the last bit.
        """
        builder, fma = self.builder, f"llvm.fma.{self.suffix}"
        low = self.constant(-87.0)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        scaled = builder.fmul(x, self.constant(1 / math.log(2)))
        n = call(builder, f"llvm.rint.{self.suffix}", self.kind, [scaled])
        # ln 2 in two parts: the first has 9 bits fewer than a float32, so n times it is exact.
        r = call(builder, fma, self.kind, [n, self.constant(-0.693359375), x])
        r = call(builder, fma, self.kind, [n, self.constant(2.12194440e-4), r])
        total = self.constant(1 / math.factorial(7))
        for degree in range(6, 0, -1):
            total = call(builder, fma, self.kind, [total, r, self.constant(1 / math.factorial(degree))])
        small = builder.fmul(total, r)
        ints = self.vector_of(INT)
        exponent = builder.fptosi(n, ints)
        one = self.splat_int(127, ints)
        power = builder.bitcast(builder.shl(builder.add(exponent, one), self.splat_int(23, ints)), self.kind)
        return call(builder, fma, self.kind, [power, small, builder.fsub(power, self.constant(1.0))])

    def splat_int(self, value: int, kind: ir.VectorType) -> ir.Value:
        """A vector of one integer constant."""
        if not self.target.scalable:
            return ir.Constant(kind, [value] * self.lanes)
        return self._splat(INT(value), kind)
