"""Kernels that move blocks of a matrix: A beside a scale for each row, B turned round, bfloat16 widened.

They have the signature of a micro-kernel, so that a program can call them: ``c[i, k] = a[i, k] * b[i]`` for ``tiles``
rows and ``depth`` columns (strides in bytes; ``b`` only where scaled). A kernel that turns writes ``c[k, i] = a[i, k]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from gossamer.codegen._kernel import MicroKernel
from gossamer.codegen._loops import counted
from gossamer.codegen._micro_ir import KERNEL_TYPE
from gossamer.codegen._targets import Target
from gossamer.codegen._vector_ops import FLOAT, HALF, INT, LONG, SCALARS, VectorOps, offset


@dataclass(frozen=True)
class CopyKernel:
    """One copying function. element: of the source, "f32", "f64", "i32" or "bf16" (which becomes float32).

    scaled: multiply row i by ``b[i]``. ones: write ``b[i]`` itself behind the row, the scale of a constant input.
    turned: rows become columns.
    """

    element: str = "f32"
    scaled: bool = False
    ones: bool = False
    turned: bool = False

    @property
    def name(self) -> str:
        """A symbol that names what it does."""
        words = [word for word in ("scaled", "ones", "turned") if getattr(self, word)]
        return "_".join(["copy", self.element, *words])


def copy_ir(kernel: CopyKernel, target: Target) -> ir.Module:
    """The module of one copying kernel."""
    module = ir.Module(name=kernel.name)
    module.triple = target.triple
    function = ir.Function(module, KERNEL_TYPE, kernel.name)
    a, lda, b, ldb, c, ldc, depth, tiles, *_ = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    wide = "f32" if kernel.element == "bf16" else kernel.element
    form = MicroKernel(1, 1, element=wide, semiring="min_plus" if wide == "i32" else "plus_times")
    ops = VectorOps(builder, form, target)
    source_bytes = 2 if kernel.element == "bf16" else ops.scalar_bytes
    with counted(builder, 0, tiles) as row:
        from_row = offset(builder, a, builder.mul(row, lda))
        to_row = offset(builder, c, builder.mul(row, LONG(ops.scalar_bytes) if kernel.turned else ldc))
        scale = None
        if kernel.scaled:
            scale = builder.load(offset(builder, b, builder.mul(row, ldb)), align=4, typ=ops.scalar)
        start: ir.Value | int = 0
        if not kernel.turned and not target.scalable:
            start = builder.and_(depth, LONG(-ops.lanes))
            with counted(builder, 0, start, ops.lanes) as column:
                place = offset(builder, from_row, builder.mul(column, LONG(source_bytes)))
                value = ops.load_bf16(place) if kernel.element == "bf16" else ops.load(place, cut=False)
                if scale is not None:
                    value = builder.fmul(value, ops.splat(scale))
                ops.store(value, offset(builder, to_row, builder.mul(column, LONG(ops.scalar_bytes))), cut=False)
        with counted(builder, start, depth) as column:
            number = _number(builder, kernel, offset(builder, from_row, builder.mul(column, LONG(source_bytes))))
            if scale is not None:
                number = builder.fmul(number, scale)
            distance = builder.mul(column, ldc if kernel.turned else LONG(ops.scalar_bytes))
            builder.store(number, offset(builder, to_row, distance), align=ops.scalar_bytes)
        if kernel.ones and scale is not None:
            builder.store(scale, offset(builder, to_row, builder.mul(depth, LONG(ops.scalar_bytes))), align=4)
    builder.ret_void()
    return module


def _number(builder: ir.IRBuilder, kernel: CopyKernel, place: ir.Value) -> ir.Value:
    if kernel.element != "bf16":
        return builder.load(place, align=4, typ=SCALARS[kernel.element])
    bits = builder.zext(builder.load(place, align=2, typ=HALF), INT)
    return builder.bitcast(builder.shl(bits, INT(16)), FLOAT)
