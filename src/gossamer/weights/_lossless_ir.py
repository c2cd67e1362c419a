"""Pieces of LLVM IR that the vector code of both lossless layouts is made of, beside those of :mod:`gossamer.core.jit`.

Every function appends instructions at the builder's place. Places in memory are integer addresses in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from llvmlite import ir

from gossamer.core.jit import INT, LONG, load_from

Value: TypeAlias = Any
"""An ``llvmlite.ir.Value``; llvmlite comes without types."""


def at(builder: Any, place: Value, offset: int) -> Value:
    """The address ``offset`` bytes after ``place``."""
    return builder.add(place, LONG(offset)) if offset else place


def load(builder: Any, place: Value, vector: ir.VectorType, offset: int = 0) -> Value:
    """The vector ``offset`` bytes after ``place``, whatever its alignment."""
    return load_from(builder, at(builder, place, offset), vector)


def store(builder: Any, place: Value, value: Value, offset: int = 0) -> None:
    """Write ``value`` from ``offset`` bytes after ``place``, whatever its alignment."""
    builder.store(value, builder.inttoptr(at(builder, place, offset), value.type.as_pointer())).align = 1


def broadcast(builder: Any, value: Value, vector: ir.VectorType) -> Value:
    """A vector of equal values."""
    empty = ir.Constant(vector, ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, value, INT(0)), empty, [0] * vector.count)


def shuffle(builder: Any, first: Value, second: Value, order: Iterable[int]) -> Value:
    """The entries numbered ``order`` of ``first`` followed by ``second``."""
    places = list(order)
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT, len(places)), places))


def loop(
    builder: Any, count: Value, start: list[Value], step: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Run ``values = step(i, values)`` for ``i`` in ``range(count)``; ``count`` must be at least 1."""
    before = builder.block
    body = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(body)
    builder.position_at_end(body)
    number = builder.phi(LONG)
    values = [builder.phi(value.type) for value in start]
    results = step(number, values)
    following = builder.add(number, LONG(1))
    for phi, entering, returning in zip([number, *values], [LONG(0), *start], [following, *results], strict=True):
        phi.add_incoming(entering, before)
        phi.add_incoming(returning, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), body, after)
    builder.position_at_end(after)
    return results
