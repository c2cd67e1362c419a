"""A kernel that multiplies a vector with a matrix which is a mixture of others, mixed in registers.

``c = activation(sum_k a[k] sum_p m[p] b[k, p] + sum_p m[p] b[depth, p])``: the last row of b is the bias. Signature of a
micro-kernel; ``bias`` points to the coefficients m, ``ldb`` leads from k to k + 1, where ``stored`` vectors of each of
the ``points`` matrices stand one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from gossamer.codegen._kernel import MicroKernel
from gossamer.codegen._micro_ir import KERNEL_TYPE
from gossamer.codegen._targets import Target
from gossamer.codegen._vector_ops import LONG, VectorOps, call, offset


@dataclass(frozen=True)
class BlendKernel:
    """One generated function, float32. points: matrices that are mixed. vectors: of the tile, of ``stored`` in memory.

    edge: columns in the last vector, 0 where it is full. elu: whether ELU is applied.
    """

    points: int
    vectors: int
    stored: int
    edge: int
    elu: bool

    @property
    def name(self) -> str:
        """A symbol that names the tile."""
        return f"blend_{self.points}x{self.vectors}_edge{self.edge}"


def blend_ir(kernel: BlendKernel, target: Target) -> ir.Module:
    """The module of one mixing kernel.

    Raises:
        ValueError: accumulators and coefficients do not fit the registers, or vectors are of unknown length.
    """
    if target.scalable or kernel.vectors + kernel.points + 3 > target.registers:
        raise ValueError(f"{kernel.vectors} vectors and {kernel.points} coefficients do not fit {target.name}")
    module = ir.Module(name=kernel.name)
    module.triple = target.triple
    function = ir.Function(module, KERNEL_TYPE, kernel.name)
    a, _, b, ldb, c, _, depth, _, mixture, _, _ = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    form = MicroKernel(1, kernel.vectors, edge=kernel.edge, activation="elu" if kernel.elu else "none")
    ops = VectorOps(builder, form, target)
    fma = f"llvm.fma.{ops.suffix}"
    weights = [
        ops.splat(builder.load(offset(builder, mixture, 4 * point), align=4, typ=ops.scalar))
        for point in range(kernel.points)
    ]

    def mixed(row: ir.Value, vector: int) -> ir.Value:
        total = None
        for point, weight in enumerate(weights):
            place = offset(builder, row, (point * kernel.stored + vector) * target.vector_bytes)
            loaded = ops.load(place, cut=False)
            total = (
                builder.fmul(weight, loaded) if total is None else call(builder, fma, ops.kind, [weight, loaded, total])
            )
        return total

    before = builder.block
    body, done = function.append_basic_block("steps"), function.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(LONG)
    row = builder.phi(b.type)
    totals = [builder.phi(ops.kind) for _ in range(kernel.vectors)]
    entry = ops.splat(builder.load(offset(builder, a, builder.mul(step, LONG(4))), align=4, typ=ops.scalar))
    sums = [call(builder, fma, ops.kind, [entry, mixed(row, vector), total]) for vector, total in enumerate(totals)]
    following, next_row = builder.add(step, LONG(1)), offset(builder, row, ldb)
    zero = ir.Constant(ops.kind, None)
    for phi, first, value in zip(
        [step, row, *totals], [LONG(0), b, *[zero] * len(totals)], [following, next_row, *sums], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed("<", following, depth), body, done)
    builder.position_at_end(done)
    for vector, total in enumerate(sums):
        value = ops.activate(builder.fadd(total, mixed(next_row, vector)))
        cut = kernel.edge != 0 and vector == kernel.vectors - 1
        ops.store(value, offset(builder, c, vector * target.vector_bytes), cut)
    builder.ret_void()
    return module
