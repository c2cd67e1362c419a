"""LLVM IR of one micro-kernel: the register tile, its rotating operands, and the switch from tile to tile.

Signature, strides in bytes::

    void kernel(a, lda, b, ldb, c, ldc, depth, tiles, bias, scales, columns)

Schedule. A register of B is loaded again, for the next step, right after the last multiply-add that reads it, so that
loads run between multiply-adds and ``vectors`` registers of B are enough (the ring of autoGEMM, Wu et al., SC 2024, of
length one step). On targets that multiply by an element, a row of A comes as one register of four steps. The last
step stands outside the loop: every accumulator is finished and stored right behind its last multiply-add, while the
others are still being computed, and nothing is ever read past the end of B.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from gossamer.codegen._kernel import DYNAMIC_EDGE, MicroKernel
from gossamer.codegen._targets import Target
from gossamer.codegen._vector_ops import LONG, PTR, VectorOps, call, offset

KERNEL_TYPE = ir.FunctionType(ir.VoidType(), [PTR, LONG, PTR, LONG, PTR, LONG, LONG, LONG, PTR, PTR, LONG])
QUAD = 4
_ROWS_A_POINTER = 3


@dataclass
class _State:
    """What goes round the inner loop: accumulators by row and vector, B of the coming step, places in A and B.

    a: one pointer for every three rows; the processor adds one or two strides when it reads.
    """

    acc: list[list[ir.Value]]
    b: list[ir.Value]
    a: list[ir.Value]
    b_place: ir.Value

    def values(self) -> list[ir.Value]:
        return [*(value for row in self.acc for value in row), *self.b, *self.a, self.b_place]

    def replaced(self, values: list[ir.Value]) -> _State:
        rows, vectors = len(self.acc), len(self.acc[0])
        acc = [values[row * vectors : (row + 1) * vectors] for row in range(rows)]
        first_a = len(values) - 1 - len(self.a)
        return _State(acc, values[rows * vectors : first_a], values[first_a:-1], values[-1])


def micro_ir(kernel: MicroKernel, target: Target) -> ir.Module:
    """The module that holds ``kernel`` for ``target``, its only function.

    Raises:
        ValueError: the tile does not fit the target's registers, or its edge cannot be cut there.
    """
    kernel.check(target)
    module = ir.Module(name=kernel.name)
    module.triple = target.triple
    function = ir.Function(module, KERNEL_TYPE, kernel.name)
    for number in (0, 2, 4, 8, 9):
        function.args[number].add_attribute("noalias")
    _MicroBuilder(function, kernel, target).build()
    return module


class _MicroBuilder:
    def __init__(self, function: ir.Function, kernel: MicroKernel, target: Target) -> None:
        self.kernel = kernel
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))
        self.ops = VectorOps(self.builder, kernel, target)
        self.by_element = kernel.by_element(target)
        # With A's rows held and B streamed, the tile is walked by vectors; otherwise by rows.
        self.by_vector = not self.by_element and kernel.vectors > kernel.rows
        # Where registers do not suffice, B is loaded at its use; a tile of one row has but one use of it.
        self.rotating = kernel.rows > 1 and kernel.rotating_registers(target) <= target.registers
        self.a_bytes = self.ops.scalar_bytes
        self.rows = range(kernel.rows)
        self.vectors = range(kernel.vectors)

    def build(self) -> None:
        (self.a, self.lda, self.b, self.ldb, self.c, self.ldc, self.depth, self.tiles, self.bias, self.scales,
         self.columns) = self.function.args  # fmt: skip
        builder = self.builder
        step = self.ops.step_bytes()
        self.steps = [builder.mul(step, LONG(number)) for number in self.vectors]
        b_step = builder.lshr(step, LONG(1)) if self.kernel.b_element else step
        self.b_steps = [builder.mul(b_step, LONG(number)) for number in self.vectors]
        if self.kernel.edge == DYNAMIC_EDGE:
            before = builder.udiv(self.steps[-1], LONG(self.a_bytes))
            self.ops.set_mask(self.columns, before)
        if self.kernel.update == "scale":
            self.alpha = self.ops.splat(builder.load(self.scales, align=4, typ=self.ops.scalar))
            second = offset(builder, self.scales, self.a_bytes)
            self.beta = self.ops.splat(builder.load(second, align=4, typ=self.ops.scalar))
        self._tiles()
        self.builder.ret_void()

    def _tiles(self) -> None:
        """One tile after the other, downwards."""
        builder = self.builder
        start = builder.block
        body, done = (self.function.append_basic_block(name) for name in ("tile", "done"))
        builder.branch(body)
        builder.position_at_end(body)
        left, a, c = (self._phi(value, start) for value in (self.tiles, self.a, self.c))
        self._tile(a, c)
        rows = LONG(self.kernel.rows)
        following = builder.sub(left, LONG(1))
        for phi, value in (
            (left, following),
            (a, offset(builder, a, builder.mul(self.lda, rows))),
            (c, offset(builder, c, builder.mul(self.ldc, rows))),
        ):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed(">", following, LONG(0)), body, done)
        builder.position_at_end(done)

    def _tile(self, a: ir.Value, c: ir.Value) -> None:
        builder = self.builder
        a_pointers = [offset(builder, a, builder.mul(self.lda, LONG(row))) for row in self.rows[::_ROWS_A_POINTER]]
        self.c_rows = [offset(builder, c, builder.mul(self.ldc, LONG(row))) for row in self.rows]
        zero = self.ops.zero()
        b = [self._load_b(self.b, vector) for vector in self.vectors] if self.rotating else []
        state = _State([[zero for _ in self.vectors] for _ in self.rows], b, a_pointers, self.b)
        unroll = QUAD if self.by_element else self.kernel.steps()
        whole = builder.sub(self.depth, LONG(1))
        groups = builder.udiv(whole, LONG(unroll))
        with self._loop(groups, state) as carried:
            state = self._group(carried.state, unroll)
            carried.state = state
        state = carried.state
        if unroll > 1:
            with self._loop(builder.urem(whole, LONG(unroll)), state) as carried:
                carried.state = self._step(self._broadcasts(carried.state, 0), carried.state, 1, final=False)
            state = carried.state
        self._step(self._broadcasts(state, 0), state, 1, final=True)

    def _group(self, state: _State, unroll: int) -> _State:
        """``unroll`` steps without a branch between them."""
        if not self.by_element:
            for number in range(unroll):
                advance = unroll if number == unroll - 1 else 0
                state = self._step(self._broadcasts(state, number), state, advance, final=False)
            return state
        quads = [self._load_quad(self._a_place(state, row)) for row in self.rows]
        for number in range(unroll):
            advance = unroll if number == unroll - 1 else 0
            state = self._step(self._elements(quads, number), state, advance, final=False)
        return state

    def _broadcasts(self, state: _State, number: int) -> Callable[[int], Callable[..., ir.Value]]:
        """How step ``number`` of a group gets an entry of A: one number, copied to all lanes."""

        def operand(row: int) -> Callable[[ir.Value, ir.Value], ir.Value]:
            place = offset(self.builder, self._a_place(state, row), number * self.a_bytes)
            vector = self.ops.splat(self.builder.load(place, align=self.a_bytes, typ=self.ops.scalar))
            return lambda total, b: self.ops.fold(total, vector, b)

        return operand

    def _elements(self, quads: list[ir.Value], number: int) -> Callable[[int], Callable[..., ir.Value]]:
        """The same on targets that multiply by an element of a register."""
        scalable = self.ops.target.scalable

        def operand(row: int) -> Callable[[ir.Value, ir.Value], ir.Value]:
            if not scalable:
                vector = self.ops.element(quads[row], number)
                return lambda total, b: self.ops.fold(total, vector, b)
            name, kind = "llvm.aarch64.sve.fmla.lane.nxv4f32", self.ops.kind
            return lambda total, b: call(self.builder, name, kind, [total, b, quads[row], ir.IntType(32)(number)])

        return operand

    def _a_place(self, state: _State, row: int) -> ir.Value:
        """Where the current step of a row of A is."""
        pointer, strides = state.a[row // _ROWS_A_POINTER], row % _ROWS_A_POINTER
        return offset(self.builder, pointer, self.builder.mul(self.lda, LONG(strides))) if strides else pointer

    def _load_quad(self, place: ir.Value) -> ir.Value:
        """Four steps of one row of A; on SVE a copy in every 128 bits."""
        if not self.ops.target.scalable:
            return self.ops.load(place, cut=False)
        bools = self.ops.vector_of(ir.IntType(1))
        everywhere = call(self.builder, "llvm.aarch64.sve.ptrue.nxv4i1", bools, [ir.IntType(32)(31)])
        return call(self.builder, "llvm.aarch64.sve.ld1rq.nxv4f32", self.ops.kind, [everywhere, place])

    def _step(
        self, operand: Callable[[int], Callable[..., ir.Value]], state: _State, advance: int, final: bool
    ) -> _State:
        """One step of the depth: rows x vectors multiply-adds; B of the next step comes in behind the last use."""
        kernel = self.kernel
        acc = [list(row) for row in state.acc]
        coming: list[ir.Value] = []
        following = None if final else offset(self.builder, state.b_place, self.ldb)
        if kernel.prefetch and not final:
            self._ask_for(state.b_place)
        if self.by_vector:
            entries = [operand(row) for row in self.rows]
            order = [(row, vector) for vector in self.vectors for row in self.rows]
        else:
            order = [(row, vector) for row in self.rows for vector in self.vectors]
        b = list(state.b)
        entry: Callable[..., ir.Value] | None = None
        for row, vector in order:
            if self.by_vector:
                entry = entries[row]
            elif vector == 0:
                entry = operand(row)
            assert entry is not None
            if not self.rotating and row == 0:
                b.append(self._load_b(state.b_place, vector))
            acc[row][vector] = entry(acc[row][vector], b[vector])
            if final:
                self._finish(acc[row][vector], row, vector)
            elif self.rotating and row == kernel.rows - 1:
                coming.append(self._load_b(following, vector))
        if final:
            return state
        a = [offset(self.builder, pointer, advance * self.a_bytes) for pointer in state.a]
        return _State(acc, coming, a, following)

    def _ask_for(self, place: ir.Value) -> None:
        """Prefetch a row of B some steps ahead."""
        row = self.kernel.vectors * self.ops.target.vector_bytes // (2 if self.kernel.b_element else 1)
        for line in range(0, row, 64):
            hint = [
                offset(self.builder, place, self.kernel.prefetch + line),
                *(ir.IntType(32)(flag) for flag in (0, 3, 1)),
            ]
            call(self.builder, "llvm.prefetch.p0", ir.VoidType(), hint)

    def _load_b(self, place: Any, vector: int) -> ir.Value:
        place = offset(self.builder, place, self.b_steps[vector])
        if self.kernel.b_element:
            return self.ops.load_bf16(place)
        cut = self._is_cut(vector) and not self.kernel.padded_b
        return self.ops.load(place, cut)

    def _finish(self, value: ir.Value, row: int, vector: int) -> None:
        """What happens to one accumulator behind its last multiply-add."""
        builder, kernel, ops = self.builder, self.kernel, self.ops
        place, cut = offset(builder, self.c_rows[row], self.steps[vector]), self._is_cut(vector)
        if kernel.update == "accumulate":
            value = ops.combine(value, ops.load(place, cut))
        elif kernel.update == "scale":
            value = builder.fmul(value, self.alpha)
            value = call(builder, f"llvm.fma.{ops.suffix}", ops.kind, [self.beta, ops.load(place, cut), value])
        if kernel.bias:
            value = builder.fadd(value, ops.load(offset(builder, self.bias, self.steps[vector]), cut))
        ops.store(ops.activate(value), place, cut)

    def _is_cut(self, vector: int) -> bool:
        # A scalable register may be wider than the whole strip, so each of its vectors may be cut.
        return self.kernel.edge != 0 and vector == self.kernel.vectors - 1

    def _phi(self, value: ir.Value, block: ir.Block) -> ir.PhiInstr:
        phi = self.builder.phi(value.type)
        phi.add_incoming(value, block)
        return phi

    @contextmanager
    def _loop(self, count: ir.Value, state: _State) -> Any:
        """Run the block ``count`` times, none included; the block replaces ``carried.state``."""
        builder, start = self.builder, self.builder.block
        body, done = (self.function.append_basic_block(name) for name in ("steps", "end"))
        builder.cbranch(builder.icmp_signed(">", count, LONG(0)), body, done)
        builder.position_at_end(body)
        left = self._phi(count, start)
        phis = [self._phi(value, start) for value in state.values()]
        carried = _Carried(state.replaced(list(phis)))
        yield carried
        ended = carried.state.values()
        following = builder.sub(left, LONG(1))
        left.add_incoming(following, builder.block)
        for phi, value in zip(phis, ended, strict=True):
            phi.add_incoming(value, builder.block)
        last = builder.block
        builder.cbranch(builder.icmp_signed(">", following, LONG(0)), body, done)
        builder.position_at_end(done)
        merged = []
        for before, value in zip(state.values(), ended, strict=True):
            phi = builder.phi(value.type)
            phi.add_incoming(before, start)
            phi.add_incoming(value, last)
            merged.append(phi)
        carried.state = state.replaced(merged)


@dataclass
class _Carried:
    state: _State
