"""A micro-kernel for products with one to three columns: sums along the depth in vector lanes.

A register tile wastes all lanes but one on a single column. Here ``rows x columns`` accumulators run along the depth,
both operands are read as whole vectors (B with its columns contiguous: ``b[j, k]``), and lanes are summed at the end.
Signature and epilogue are those of :mod:`gossamer.codegen._micro_ir`; ``ldb`` is the stride between columns of B.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from gossamer.codegen._kernel import Activation, MicroKernel, Update
from gossamer.codegen._loops import counted
from gossamer.codegen._micro_ir import KERNEL_TYPE
from gossamer.codegen._targets import Target
from gossamer.codegen._vector_ops import INT, LONG, VectorOps, call, offset


@dataclass(frozen=True)
class InnerKernel:
    """One generated function for ``rows`` rows of A and ``columns`` columns of C, float32."""

    rows: int
    columns: int
    update: Update = "store"
    bias: bool = False
    activation: Activation = "none"

    @property
    def name(self) -> str:
        """A symbol that names the tile."""
        return f"inner_{self.rows}x{self.columns}_{self.update}"


def inner_ir(kernel: InnerKernel, target: Target) -> ir.Module:
    """The module of one inner-product kernel.

    Raises:
        ValueError: the accumulators do not fit the registers, or ``target`` has vectors of unknown length.
    """
    if target.scalable or kernel.rows * kernel.columns + kernel.columns + 1 > target.registers:
        raise ValueError(f"{kernel.rows} x {kernel.columns} accumulators do not fit {target.name}")
    module = ir.Module(name=kernel.name)
    module.triple = target.triple
    function = ir.Function(module, KERNEL_TYPE, kernel.name)
    _InnerBuilder(function, kernel, target).build()
    return module


class _InnerBuilder:
    def __init__(self, function: ir.Function, kernel: InnerKernel, target: Target) -> None:
        self.function, self.kernel = function, kernel
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        form = MicroKernel(1, 1, bias=kernel.bias, activation=kernel.activation)
        self.ops = VectorOps(self.builder, form, target)
        self.pairs = [(row, column) for row in range(kernel.rows) for column in range(kernel.columns)]

    def build(self) -> None:
        a, lda, b, ldb, c, ldc, depth, tiles, bias, scales, _ = self.function.args
        builder, rows = self.builder, LONG(self.kernel.rows)
        self.bias, self.scales = bias, scales
        whole = builder.and_(depth, LONG(-self.ops.lanes))
        with counted(builder, 0, tiles) as tile:
            first = builder.mul(tile, rows)
            a_tile = offset(builder, a, builder.mul(first, lda))
            a_rows = [offset(builder, a_tile, builder.mul(lda, LONG(row))) for row in range(self.kernel.rows)]
            b_rows = [offset(builder, b, builder.mul(ldb, LONG(column))) for column in range(self.kernel.columns)]
            totals = self._vectors(a_rows, b_rows, whole)
            totals = self._rest(a_rows, b_rows, whole, depth, [self._sum(total) for total in totals])
            c_tile = offset(builder, c, builder.mul(first, ldc))
            for (row, column), total in zip(self.pairs, totals, strict=True):
                self._finish(total, offset(builder, c_tile, builder.mul(ldc, LONG(row))), column)
        builder.ret_void()

    def _vectors(self, a_rows: list[ir.Value], b_rows: list[ir.Value], whole: ir.Value) -> list[ir.Value]:
        builder, before = self.builder, self.builder.block
        zero = ir.Constant(self.ops.kind, None)
        body, done = (self.function.append_basic_block(name) for name in ("vectors", "summed"))
        builder.cbranch(builder.icmp_signed(">", whole, LONG(0)), body, done)
        builder.position_at_end(body)
        place = builder.phi(LONG)
        place.add_incoming(LONG(0), before)
        phis = [builder.phi(self.ops.kind) for _ in self.pairs]
        for phi in phis:
            phi.add_incoming(zero, before)
        at = builder.mul(place, LONG(4))
        b = [self.ops.load(offset(builder, row, at), cut=False) for row in b_rows]
        a = [self.ops.load(offset(builder, row, at), cut=False) for row in a_rows]
        name = f"llvm.fma.{self.ops.suffix}"
        sums = [
            call(builder, name, self.ops.kind, [a[row], b[column], phi])
            for (row, column), phi in zip(self.pairs, phis, strict=True)
        ]
        following = builder.add(place, LONG(self.ops.lanes))
        for phi, value in zip([place, *phis], [following, *sums], strict=True):
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, whole), body, done)
        builder.position_at_end(done)
        merged = []
        for value in sums:
            phi = builder.phi(self.ops.kind)
            phi.add_incoming(zero, before)
            phi.add_incoming(value, body)
            merged.append(phi)
        return merged

    def _rest(
        self, a_rows: list[ir.Value], b_rows: list[ir.Value], start: ir.Value, depth: ir.Value, totals: list[ir.Value]
    ) -> list[ir.Value]:
        """The last ``depth % lanes`` steps, one by one."""
        builder, before = self.builder, self.builder.block
        body, done = (self.function.append_basic_block(name) for name in ("rest", "total"))
        builder.cbranch(builder.icmp_signed("<", start, depth), body, done)
        builder.position_at_end(body)
        place = builder.phi(LONG)
        place.add_incoming(start, before)
        phis = [builder.phi(self.ops.scalar) for _ in totals]
        at = builder.mul(place, LONG(4))
        a, b = (
            [builder.load(offset(builder, row, at), align=4, typ=self.ops.scalar) for row in rows]
            for rows in (a_rows, b_rows)
        )
        sums = [
            call(builder, "llvm.fma.f32", self.ops.scalar, [a[row], b[column], phi])
            for (row, column), phi in zip(self.pairs, phis, strict=True)
        ]
        following = builder.add(place, LONG(1))
        place.add_incoming(following, body)
        for phi, first, value in zip(phis, totals, sums, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, depth), body, done)
        builder.position_at_end(done)
        merged = []
        for first, value in zip(totals, sums, strict=True):
            phi = builder.phi(self.ops.scalar)
            phi.add_incoming(first, before)
            phi.add_incoming(value, body)
            merged.append(phi)
        return merged

    def _sum(self, vector: ir.Value) -> ir.Value:
        builder, width = self.builder, self.ops.lanes
        while width > 1:
            width //= 2
            orders = [ir.Constant(ir.VectorType(INT, width), list(range(side, side + width))) for side in (0, width)]
            vector = builder.fadd(*(builder.shuffle_vector(vector, vector, order) for order in orders))
        return builder.extract_element(vector, INT(0))

    def _finish(self, value: ir.Value, c_row: ir.Value, column: int) -> None:
        builder, kernel = self.builder, self.kernel
        place = offset(builder, c_row, 4 * column)
        scalar = self.ops.scalar
        if kernel.update == "accumulate":
            value = builder.fadd(value, builder.load(place, align=4, typ=scalar))
        elif kernel.update == "scale":
            alpha = builder.load(self.scales, align=4, typ=scalar)
            beta = builder.load(offset(builder, self.scales, 4), align=4, typ=scalar)
            value = builder.fadd(
                builder.fmul(alpha, value), builder.fmul(beta, builder.load(place, align=4, typ=scalar))
            )
        if kernel.bias:
            value = builder.fadd(value, builder.load(offset(builder, self.bias, 4 * column), align=4, typ=scalar))
        if kernel.activation != "none":
            value = builder.extract_element(self.ops.activate(self.ops.splat(value)), INT(0))
        builder.store(value, place, align=4)
