"""Loops in hand-written IR."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from gossamer.codegen._vector_ops import LONG


@contextmanager
def counted(builder: ir.IRBuilder, start: ir.Value | int, stop: ir.Value, step: int = 1) -> Iterator[Any]:
    """``for index in range(start, stop, step)``; gives the index, int64. Values that change go through memory."""
    function, before = builder.function, builder.block
    first = LONG(start) if isinstance(start, int) else start
    body, done = (function.append_basic_block(name) for name in ("loop", "after"))
    builder.cbranch(builder.icmp_signed("<", first, stop), body, done)
    builder.position_at_end(body)
    index = builder.phi(LONG)
    index.add_incoming(first, before)
    yield index
    following = builder.add(index, LONG(step))
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, stop), body, done)
    builder.position_at_end(done)
