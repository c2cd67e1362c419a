"""How fast arithmetic on registers alone is: the ceiling that a kernel is held against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

from llvmlite import ir

from gossamer.codegen._compile import addresses
from gossamer.codegen._kernel import MicroKernel
from gossamer.codegen._targets import Target, host_target
from gossamer.codegen._vector_ops import LONG, VectorOps

_CHAINS = 10


def fma_chains(vectors: int) -> tuple[Callable[[], None], float]:
    """A function of about ``vectors`` vector multiply-adds on registers, and its exact number as a share of ``vectors``.

    >>> run, share = fma_chains(1000)
    >>> run(); share
    1.0
    """
    return _chains(MicroKernel(1, 1), vectors)


def min_plus_chains(vectors: int, element: str = "f32") -> tuple[Callable[[], None], float]:
    """The same for pairs of one vector addition and one vector minimum."""
    return _chains(MicroKernel(1, 1, element=element, semiring="min_plus"), vectors)


def _chains(kernel: MicroKernel, vectors: int) -> tuple[Callable[[], None], float]:
    steps = max(1, round(vectors / _CHAINS))
    return partial(_compiled(kernel, host_target()), steps), steps * _CHAINS / vectors


@cache
def _compiled(kernel: MicroKernel, target: Target) -> Callable[[int], None]:
    module = ir.Module(name=f"chains_{kernel.semiring}_{kernel.element}")
    module.triple = target.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG]), module.name)
    (steps,) = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    ops = VectorOps(builder, kernel, target)
    # Operands that LLVM cannot know: loaded, not constants. The last store keeps the chains alive.
    scratch = builder.alloca(ir.ArrayType(ops.scalar, ops.lanes))
    place = builder.bitcast(scratch, ops.kind.as_pointer())
    one = builder.load(place, align=ops.scalar_bytes)
    entry = builder.block
    body, done = function.append_basic_block("chains"), function.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    left = builder.phi(LONG)
    left.add_incoming(steps, entry)
    totals = [builder.phi(ops.kind) for _ in range(_CHAINS)]
    for total in totals:
        total.add_incoming(one, entry)
    folded = [ops.fold(total, total if kernel.semiring != "plus_times" else one, one) for total in totals]
    following = builder.sub(left, LONG(1))
    for phi, value in zip([left, *totals], [following, *folded], strict=True):
        phi.add_incoming(value, body)
    builder.cbranch(builder.icmp_signed(">", following, LONG(0)), body, done)
    builder.position_at_end(done)
    last = folded[0]
    for value in folded[1:]:
        last = ops.combine(last, value)
    builder.store(last, place, align=ops.scalar_bytes)
    builder.ret_void()
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(addresses(module, target)[module.name])
