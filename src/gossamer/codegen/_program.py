"""Programs: lists of kernel calls that run without Python, once or for every item of a stack.

A job names a kernel, and for each operand a base and an offset; strides, depth and tiles are numbers. A program is made
once. Running it walks the jobs in one native call, which releases the interpreter lock, and for a stack moves the
bases by their strides from item to item: the price of a product is a few indirect calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from llvmlite import ir

from gossamer.codegen._blend_ir import BlendKernel, blend_ir
from gossamer.codegen._compile import addresses
from gossamer.codegen._copy_ir import CopyKernel, copy_ir
from gossamer.codegen._inner_ir import InnerKernel, inner_ir
from gossamer.codegen._kernel import MicroKernel
from gossamer.codegen._loops import counted
from gossamer.codegen._micro_ir import KERNEL_TYPE, micro_ir
from gossamer.codegen._targets import Target, host_target
from gossamer.codegen._vector_ops import LONG, PTR

AnyKernel = MicroKernel | CopyKernel | InnerKernel | BlendKernel
BASES = 8
_FIELDS = 16
_Numbers = ctypes.c_int64 * BASES


@cache
def kernel_address(kernel: AnyKernel, target: Target) -> int:
    """The machine address of ``kernel``, generated for the host when first asked for (tens of milliseconds), then kept."""
    return addresses(kernel_ir(kernel, target), target)[kernel.name]


def kernel_ir(kernel: AnyKernel, target: Target) -> ir.Module:
    """The module of any kernel."""
    if isinstance(kernel, MicroKernel):
        return micro_ir(kernel, target)
    if isinstance(kernel, CopyKernel):
        return copy_ir(kernel, target)
    return inner_ir(kernel, target) if isinstance(kernel, InnerKernel) else blend_ir(kernel, target)


@dataclass(frozen=True)
class Job:
    """One call of a kernel. a, b, c, bias: pairs of a base's number and an offset in bytes; strides in bytes."""

    kernel: AnyKernel
    a: tuple[int, int]
    lda: int
    b: tuple[int, int]
    ldb: int
    c: tuple[int, int]
    ldc: int
    depth: int
    tiles: int
    bias: tuple[int, int] = (0, 0)
    scales: int = 0
    columns: int = 0


class Program:
    """Jobs for this machine, ready to run. Running is thread-safe where threads use different scratch bases."""

    def __init__(self, jobs: Sequence[Job], target: Target | None = None) -> None:
        target = target or host_target()
        self.jobs = tuple(jobs)
        self._table = np.zeros((max(1, len(jobs)), _FIELDS), np.int64)
        for line, job in zip(self._table, jobs, strict=False):
            line[:] = [
                kernel_address(job.kernel, target), *job.a, job.lda, *job.b, job.ldb, *job.c, job.ldc,
                job.depth, job.tiles, *job.bias, job.scales, job.columns,
            ]  # fmt: skip
        self._run = _runner(target)
        self._place = self._table.ctypes.data

    def run(self, bases: Sequence[int], strides: Sequence[int] = (), items: int = 1) -> None:
        """Run all jobs for ``items`` items. bases: addresses; strides: bytes from item to item, 0 where left out.

        Nothing is checked: addresses are the caller's responsibility.
        """
        self.bound(bases, strides, items)()

    def bound(self, bases: Sequence[int], strides: Sequence[int] = (), items: int = 1) -> Callable[[], None]:
        """The same as a function without arguments, for running again on the same memory without preparation."""
        return partial(self._run, self._place, len(self.jobs), _Numbers(*bases), _Numbers(*strides), items)


@cache
def _runner(target: Target) -> Callable[..., None]:
    kinds = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return ctypes.CFUNCTYPE(None, *kinds)(addresses(_runner_ir(target), target)["run_program"])


def _runner_ir(target: Target) -> ir.Module:
    """``run_program(jobs, count, bases, strides, items)``."""
    module = ir.Module(name="run_program")
    module.triple = target.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [PTR, LONG, PTR, PTR, LONG]), "run_program")
    jobs, count, first_bases, strides, items = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    bases = builder.alloca(LONG, LONG(BASES))
    for base in range(BASES):
        places = [builder.gep(array, [LONG(base)], source_etype=LONG) for array in (first_bases, bases)]
        builder.store(builder.load(places[0], align=8, typ=LONG), places[1], align=8)

    def number(array: ir.Value, place: ir.Value) -> ir.Value:
        return builder.load(builder.gep(array, [place], source_etype=LONG), align=8, typ=LONG)

    with counted(builder, 0, items), counted(builder, 0, count) as job:
        line = builder.gep(jobs, [builder.mul(job, LONG(_FIELDS))], source_etype=LONG)
        field = [number(line, LONG(place)) for place in range(_FIELDS)]

        def pointer(place: int) -> ir.Value:
            return builder.inttoptr(builder.add(number(bases, field[place]), field[place + 1]), PTR)

        arguments = [
            pointer(1), field[3], pointer(4), field[6], pointer(7), field[9], field[10], field[11], pointer(12),
            builder.inttoptr(number(bases, field[14]), PTR), field[15],
        ]  # fmt: skip
        builder.call(_callee(builder, field[0]), arguments)
        with builder.if_then(builder.icmp_signed("==", job, builder.sub(count, LONG(1)))):
            for base in range(BASES):
                place = builder.gep(bases, [LONG(base)], source_etype=LONG)
                moved = builder.add(builder.load(place, align=8, typ=LONG), number(strides, LONG(base)))
                builder.store(moved, place, align=8)
    builder.ret_void()
    return module


def _callee(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, KERNEL_TYPE.as_pointer())
