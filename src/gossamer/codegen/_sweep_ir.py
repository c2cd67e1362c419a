"""Triangular sweeps of a block of row vectors, with every vector in registers while its edges are followed.

``x`` is ``(n, width)``: number j of row i belongs to the j-th vector of the block at vertex i. Edges lead from each
vertex to higher ones, in compressed rows. Over the semiring's (+) and (x)::

    up(k in order):    x[i] = x[i] (+) x[k] (x) weight(e)     for the edges e from k to i
    down(k, falling):  x[k] = x[k] (+) x[i] (x) weight(e)     for the edges e from k to i

:meth:`Sweeps.scatter` turns ``x`` round into rows in another order of vertices, a register square at a time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from gossamer.codegen._compile import addresses
from gossamer.codegen._kernel import MicroKernel, Semiring
from gossamer.codegen._loops import counted
from gossamer.codegen._targets import Target, host_target
from gossamer.codegen._vector_ops import BYTE, INT, LONG, PTR, VectorOps, call, offset

_VECTORS = 8
_CHUNK = 512


@dataclass(frozen=True)
class Sweeps:
    """Native sweeps for one semiring and number type. Made by :func:`sweeps`. Addresses are not checked.

    width: vectors side by side in a block.
    up(x, order, count, starts, heads, weights), down(x, n, starts, heads, weights): order, starts: int64; heads: int32.
    scatter(x, places, n, rows): ``rows[j][v] = x[places[v], j]`` for all j; places: int32; rows: ``width`` addresses.
    """

    width: int
    up: Any
    down: Any
    scatter: Any


@cache
def sweeps(semiring: Semiring, element: str = "f32") -> Sweeps:
    """The sweeps of a semiring, compiled for this machine when first asked for."""
    target = host_target()
    kernel = MicroKernel(1, 1, element, semiring)
    module = ir.Module(name="sweeps")
    module.triple = target.triple
    for name, build in (("up", _up), ("down", _down), ("scatter", _scatter)):
        build(module, name, kernel, target)
    places = addresses(module, target)
    number = ctypes.c_int64
    kinds = {"up": 6, "down": 5, "scatter": 4}
    calls = {name: ctypes.CFUNCTYPE(None, *[number] * count)(places[name]) for name, count in kinds.items()}
    return Sweeps(_VECTORS * target.lanes(element), **calls)


def _function(
    module: ir.Module, name: str, kinds: list[ir.Type], kernel: MicroKernel, target: Target
) -> tuple[ir.IRBuilder, VectorOps]:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    return builder, VectorOps(builder, kernel, target)


def _up(module: ir.Module, name: str, kernel: MicroKernel, target: Target) -> None:
    builder, ops = _function(module, name, [PTR, PTR, LONG, PTR, PTR, PTR], kernel, target)
    x, order, count, starts, heads, weights = builder.function.args
    with counted(builder, 0, count) as place:
        vertex = builder.load(builder.gep(order, [place], source_etype=LONG), align=8, typ=LONG)
        row = _row(builder, ops, x, vertex)
        own = [ops.load(_part(builder, ops, row, part), cut=False) for part in range(_VECTORS)]
        with counted(builder, *_edges(builder, starts, vertex)) as edge:
            target_row = _row(builder, ops, x, _head(builder, heads, edge))
            weight = _weight(builder, ops, weights, edge)
            for part in range(_VECTORS):
                place_in_row = _part(builder, ops, target_row, part)
                ops.store(ops.fold(ops.load(place_in_row, cut=False), own[part], weight), place_in_row, cut=False)
    builder.ret_void()


def _down(module: ir.Module, name: str, kernel: MicroKernel, target: Target) -> None:
    builder, ops = _function(module, name, [PTR, LONG, PTR, PTR, PTR], kernel, target)
    x, n, starts, heads, weights = builder.function.args
    with counted(builder, 0, n) as index:
        vertex = builder.sub(builder.sub(n, LONG(1)), index)
        row = _row(builder, ops, x, vertex)
        first, last = _edges(builder, starts, vertex)
        own = [ops.load(_part(builder, ops, row, part), cut=False) for part in range(_VECTORS)]
        before = builder.block
        body, done = (builder.function.append_basic_block(label) for label in ("edges", "settled"))
        builder.cbranch(builder.icmp_signed("<", first, last), body, done)
        builder.position_at_end(body)
        edge = builder.phi(LONG)
        edge.add_incoming(first, before)
        totals = [builder.phi(ops.kind) for _ in own]
        source = _row(builder, ops, x, _head(builder, heads, edge))
        weight = _weight(builder, ops, weights, edge)
        folded = []
        for part, total in enumerate(totals):
            total.add_incoming(own[part], before)
            folded.append(ops.fold(total, ops.load(_part(builder, ops, source, part), cut=False), weight))
        following = builder.add(edge, LONG(1))
        for phi, value in zip([edge, *totals], [following, *folded], strict=True):
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed("<", following, last), body, done)
        builder.position_at_end(done)
        for part, value in enumerate(folded):
            settled = builder.phi(ops.kind)
            settled.add_incoming(own[part], before)
            settled.add_incoming(value, body)
            folded[part] = settled
        for part, value in enumerate(folded):
            ops.store(value, _part(builder, ops, row, part), cut=False)
    builder.ret_void()


def _scatter(module: ir.Module, name: str, kernel: MicroKernel, target: Target) -> None:
    """A chunk of vertices is turned round into a tile that stays in the caches; each of its rows then goes to memory."""
    builder, ops = _function(module, name, [PTR, PTR, LONG, PTR], kernel, target)
    x, places, n, rows = builder.function.args
    size, width = LONG(ops.scalar_bytes), _VECTORS * ops.lanes
    row_bytes = _CHUNK * ops.scalar_bytes + 64  # rows of the tile begin in different sets of the cache
    tile = builder.inttoptr(builder.ptrtoint(builder.alloca(BYTE, LONG(width * row_bytes)), LONG), PTR)
    with counted(builder, 0, n, _CHUNK) as first:
        left = builder.sub(n, first)
        count = builder.select(builder.icmp_signed("<", left, LONG(_CHUNK)), left, LONG(_CHUNK))
        whole = builder.and_(count, LONG(-ops.lanes))
        with counted(builder, 0, whole, ops.lanes) as vertex:
            heads = [builder.add(builder.add(first, vertex), LONG(lane)) for lane in range(ops.lanes)]
            sources = [_row(builder, ops, x, _head(builder, places, head)) for head in heads]
            for head in heads:  # rows come from anywhere in x: those of the turn after next are asked for now
                later = builder.add(head, LONG(2 * ops.lanes))
                later = builder.select(builder.icmp_signed("<", later, n), later, head)
                row = _row(builder, ops, x, _head(builder, places, later))
                for line in range(0, _VECTORS * target.vector_bytes, 64):
                    hint = [offset(builder, row, line), INT(0), INT(3), INT(1)]
                    call(builder, "llvm.prefetch.p0", ir.VoidType(), hint)
            column = builder.mul(vertex, size)
            with counted(builder, 0, LONG(_VECTORS)) as part:
                at = builder.mul(part, LONG(target.vector_bytes))
                square = _turned(builder, [ops.load(offset(builder, source, at), cut=False) for source in sources])
                corner = offset(builder, offset(builder, tile, builder.mul(part, LONG(ops.lanes * row_bytes))), column)
                for lane, vector in enumerate(square):
                    ops.store(vector, offset(builder, corner, lane * row_bytes), cut=False)
        with counted(builder, whole, count) as vertex:
            source = _row(builder, ops, x, _head(builder, places, builder.add(first, vertex)))
            with counted(builder, 0, LONG(width)) as number:
                value = builder.load(
                    offset(builder, source, builder.mul(number, size)), align=ops.scalar_bytes, typ=ops.scalar
                )
                place = offset(
                    builder, offset(builder, tile, builder.mul(number, LONG(row_bytes))), builder.mul(vertex, size)
                )
                builder.store(value, place, align=ops.scalar_bytes)
        with counted(builder, 0, LONG(width)) as number:
            row = builder.load(builder.gep(rows, [number], source_etype=PTR), align=8, typ=PTR)
            source = offset(builder, tile, builder.mul(number, LONG(row_bytes)))
            _copied(builder, ops, source, offset(builder, row, builder.mul(first, size)), count)
    builder.ret_void()


def _copied(builder: ir.IRBuilder, ops: VectorOps, source: ir.Value, row: ir.Value, count: ir.Value) -> None:
    """Copy ``count`` numbers."""
    size = LONG(ops.scalar_bytes)
    whole = builder.and_(count, LONG(-ops.lanes))
    with counted(builder, 0, whole, ops.lanes) as index:
        at = builder.mul(index, size)
        ops.store(ops.load(offset(builder, source, at), cut=False), offset(builder, row, at), cut=False)
    with counted(builder, whole, count) as index:
        at = builder.mul(index, size)
        value = builder.load(offset(builder, source, at), align=ops.scalar_bytes, typ=ops.scalar)
        builder.store(value, offset(builder, row, at), align=ops.scalar_bytes)


def _turned(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of registers transposed: log2 stages, each swapping blocks of twice the size across the diagonal."""
    lanes, distance = len(rows), 1
    while distance < lanes:
        following = list(rows)
        low = [lane + (lanes - distance if lane & distance else 0) for lane in range(lanes)]
        high = [lane + (lanes if lane & distance else distance) for lane in range(lanes)]
        for row in range(lanes):
            if not row & distance:
                pair = rows[row], rows[row + distance]
                for place, order in ((row, low), (row + distance, high)):
                    following[place] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(INT, lanes), order))
        rows, distance = following, 2 * distance
    return rows


def _row(builder: ir.IRBuilder, ops: VectorOps, x: ir.Value, vertex: ir.Value) -> ir.Value:
    return offset(builder, x, builder.mul(vertex, LONG(_VECTORS * ops.target.vector_bytes)))


def _part(builder: ir.IRBuilder, ops: VectorOps, row: ir.Value, part: int) -> ir.Value:
    return offset(builder, row, part * ops.target.vector_bytes)


def _edges(builder: ir.IRBuilder, starts: ir.Value, vertex: ir.Value) -> tuple[ir.Value, ir.Value]:
    first, last = (
        builder.load(builder.gep(starts, [place], source_etype=LONG), align=8, typ=LONG)
        for place in (vertex, builder.add(vertex, LONG(1)))
    )
    return first, last


def _head(builder: ir.IRBuilder, heads: ir.Value, edge: ir.Value) -> ir.Value:
    return builder.zext(builder.load(builder.gep(heads, [edge], source_etype=INT), align=4, typ=INT), LONG)


def _weight(builder: ir.IRBuilder, ops: VectorOps, weights: ir.Value, edge: ir.Value) -> ir.Value:
    place = offset(builder, weights, builder.mul(edge, LONG(ops.scalar_bytes)))
    return ops.splat(builder.load(place, align=ops.scalar_bytes, typ=ops.scalar))
