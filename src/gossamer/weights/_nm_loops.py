"""Products with vector-wise N:M weights (:mod:`gossamer.weights._nm`) on a CPU.

Nothing is decoded: a kept input is one number of ``x``, spread over a register, times ``vector`` neighbouring
weights. For one vector of activations, a few rows of kept inputs are read side by side, as they stream from memory,
and the running sums of all outputs pass through the nearest caches. For several vectors, blocks of kept rows stay in
the cache while tiles of 16 outputs times four vectors are summed in registers.

Everywhere: ``values`` float32, uint16 (bfloat16) or int16 (float16), ``(kept, padded)`` as one row; ``index`` uint8
``(kept, groups)`` as one row; ``n``, ``m``, ``vector`` the pattern. Types are left to numba.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from gossamer.core.jit import (
    FLOAT,
    FLOATS,
    INT,
    Code,
    Floats,
    address,
    entry,
    inlined,
    item_bytes,
    kernel,
    load8,
    load_from,
    multiply_add8,
    parallel_kernel,
    prefetch,
    store8,
    widen8,
)

TOKENS = 4
"""Vectors of activations that a tile takes at once."""
_SIDE = 4  # kept rows that are read side by side
_BLOCK = 64  # kept rows that stay in the cache
_AHEAD = 512  # bytes between what is read and what is asked for


@intrinsic
def load_spread8(typing: Any, place: Any) -> tuple[Any, Code]:
    """One float32 from an address, eight times."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one = builder.insert_element(
            ir.Constant(FLOATS, ir.Undefined), load_from(builder, arguments[0], FLOAT, 4), INT(0)
        )
        return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, 8), [0] * 8))

    return Floats(types.int64), code


@inlined
def _add32(values, place, factor, first, second, third, fourth):
    """32 weights from an address times ``factor``, added to four registers."""
    step = 8 * item_bytes(values)
    return (
        multiply_add8(widen8(values, place), factor, first),
        multiply_add8(widen8(values, place + step), factor, second),
        multiply_add8(widen8(values, place + 2 * step), factor, third),
        multiply_add8(widen8(values, place + 3 * step), factor, fourth),
    )


@kernel
def _stream(values, index, x, sums, n, m, vector, groups, first, last):
    """Groups ``first`` to ``last`` of the product with one padded vector."""
    kept = len(index) // groups
    size = item_bytes(values)
    row_bytes = groups * vector * size
    weights, inputs, totals = address(values), address(x), address(sums)
    for group in range(first, last):
        sums[group * vector : (group + 1) * vector] = 0
    for row in range(0, kept, _SIDE):
        count = min(_SIDE, kept - row)
        for group in range(first, last):
            for part in range(group * vector, (group + 1) * vector, 32):
                place = totals + 4 * part
                a, b, c, d = load8(place), load8(place + 32), load8(place + 64), load8(place + 96)
                for side in range(count):
                    near = weights + (row + side) * row_bytes + part * size
                    for line in range(0, 32 * size, 64):
                        prefetch(near + line + _AHEAD)
                    column = (row + side) // n * m + np.int64(index[(row + side) * groups + group])
                    a, b, c, d = _add32(values, near, load_spread8(inputs + 4 * column), a, b, c, d)
                store8(place, a)
                store8(place + 32, b)
                store8(place + 64, c)
                store8(place + 96, d)


@kernel
def nm_matvec(values, index, x, sums, n, m, vector, shares):
    """``sums = W @ x`` on one thread: ``x`` float32 padded to whole windows, ``sums`` to whole groups."""
    _stream(values, index, x, sums, n, m, vector, shares[-1], 0, shares[-1])


@parallel_kernel
def nm_matvec_threaded(values, index, x, sums, n, m, vector, shares):
    """The same, the groups between two entries of ``shares`` on a thread of their own."""
    for share in prange(len(shares) - 1):
        _stream(values, index, x, sums, n, m, vector, shares[-1], shares[share], shares[share + 1])


@inlined
def _add16_times4(values, place, x, totals):
    """16 weights from an address times four inputs, which lie one after another at ``x``."""
    first, second = widen8(values, place), widen8(values, place + 8 * item_bytes(values))
    a, b, c, d = load_spread8(x), load_spread8(x + 4), load_spread8(x + 8), load_spread8(x + 12)
    return (
        multiply_add8(first, a, totals[0]),
        multiply_add8(second, a, totals[1]),
        multiply_add8(first, b, totals[2]),
        multiply_add8(second, b, totals[3]),
        multiply_add8(first, c, totals[4]),
        multiply_add8(second, c, totals[5]),
        multiply_add8(first, d, totals[6]),
        multiply_add8(second, d, totals[7]),
    )


@kernel
def _tiles(values, index, x, sums, n, m, vector, groups, first, last):
    """Groups ``first`` to ``last`` for ``x`` ``(quads, inputs, 4)`` and ``sums`` ``(quads, 4, padded)``."""
    kept = len(index) // groups
    quads, inputs = x.shape[0], x.shape[1]
    padded = groups * vector
    size = item_bytes(values)
    sums[:, :, first * vector : last * vector] = 0
    columns = np.empty(_BLOCK, np.int64)
    for top in range(0, kept, _BLOCK):
        count = min(_BLOCK, kept - top)
        for group in range(first, last):
            for row in range(count):
                column = (top + row) // n * m + np.int64(index[(top + row) * groups + group])
                columns[row] = 4 * TOKENS * column
                for line in range(0, vector * size, 64):
                    prefetch(address(values) + ((top + row) * padded + (group + 1) * vector) * size + line)
            for quad in range(quads):
                near = address(x) + 4 * TOKENS * inputs * quad
                for part in range(group * vector, (group + 1) * vector, 16):
                    at = address(sums) + 4 * (quad * TOKENS * padded + part)
                    down = 4 * padded
                    totals = (
                        load8(at), load8(at + 32), load8(at + down), load8(at + down + 32),
                        load8(at + 2 * down), load8(at + 2 * down + 32), load8(at + 3 * down), load8(at + 3 * down + 32),
                    )  # fmt: skip
                    place = address(values) + (top * padded + part) * size
                    for row in range(count):
                        totals = _add16_times4(values, place, near + columns[row], totals)
                        place += padded * size
                    store8(at, totals[0])
                    store8(at + 32, totals[1])
                    store8(at + down, totals[2])
                    store8(at + down + 32, totals[3])
                    store8(at + 2 * down, totals[4])
                    store8(at + 2 * down + 32, totals[5])
                    store8(at + 3 * down, totals[6])
                    store8(at + 3 * down + 32, totals[7])


@parallel_kernel
def nm_matmul(values, index, x, sums, n, m, vector, shares):
    """``sums`` ``(quads, 4, padded)`` ``= x @ W.T`` for ``x`` float32 ``(quads, inputs, 4)``, padded like the weight."""
    for share in prange(len(shares) - 1):
        _tiles(values, index, x, sums, n, m, vector, shares[-1], shares[share], shares[share + 1])


@parallel_kernel
def nm_plain(values, index, x, sums, n, m, vector, shares):
    """``sums = W @ x`` weight by weight, on any processor."""
    groups = shares[-1]
    for share in prange(len(shares) - 1):
        for group in range(shares[share], shares[share + 1]):
            sums[group * vector : (group + 1) * vector] = 0
            for row in range(len(index) // groups):
                factor = x[row // n * m + np.int64(index[row * groups + group])]
                for column in range(group * vector, (group + 1) * vector):
                    sums[column] += entry(values, row * groups * vector + column) * factor
