"""Dense matrix times vector at the speed of memory: the peer that every compressed format has to beat.

One core reaches its full memory speed only when it reads several places at once. The rows are therefore cut into four
runs that are read side by side; each register of ``x`` then serves four rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from gossamer.core.jit import (
    add8,
    address,
    entry,
    inlined,
    item_bytes,
    kernel,
    load8,
    multiply_add8,
    parallel_kernel,
    prefetch,
    sum8,
    widen8,
    zeros8,
)

_AHEAD = 512  # bytes between what is read and what is asked for; more and less were slower


def dense_matvec(values: np.ndarray, x: np.ndarray, out: np.ndarray, shares: np.ndarray, wide: bool) -> None:
    """``out = W @ x`` for a row-major ``W``.

    values: ``(out * in,)``, float32, uint16 (bfloat16 bits) or int16 (float16 bits). x: float32 ``(in,)``.
    out: float32 ``(out,)``. shares: the row numbers between which each thread works. wide: vector code may be used.
    """
    if not wide:
        _plain(values, x, out, shares)
    elif len(shares) == 2:
        _four_runs(values, x, out, shares[0], shares[1])
    else:
        _four_runs_threaded(values, x, out, shares)


@inlined
def _step(values: Any, place: int, x: int, total: Any) -> Any:
    return multiply_add8(widen8(values, place), load8(x), total)


@inlined
def _rest(values: Any, x: Any, start: int, column: int) -> Any:
    """The last few columns of the row that starts at entry ``start``."""
    total = np.float32(0)
    for i in range(column, len(x)):
        total += entry(values, start + i) * x[i]
    return total


@kernel
def _four_runs(values: Any, x: Any, out: Any, first: int, last: int) -> None:
    columns, size = len(x), item_bytes(values)
    row_bytes = columns * size
    run = (last - first) // 4
    wide = columns // 16 * 16
    x0 = address(x)
    for row in range(first, first + run):
        a = address(values) + row * row_bytes
        b = a + run * row_bytes
        c = b + run * row_bytes
        d = c + run * row_bytes
        a0, a1, b0, b1 = zeros8(), zeros8(), zeros8(), zeros8()
        c0, c1, d0, d1 = zeros8(), zeros8(), zeros8(), zeros8()
        for column in range(0, wide, 16):
            near = column * size
            far = near + 8 * size
            for line in range(0, 16 * size, 64):
                prefetch(a + near + line + _AHEAD)
                prefetch(b + near + line + _AHEAD)
                prefetch(c + near + line + _AHEAD)
                prefetch(d + near + line + _AHEAD)
            x_near = x0 + 4 * column
            a0, a1 = _step(values, a + near, x_near, a0), _step(values, a + far, x_near + 32, a1)
            b0, b1 = _step(values, b + near, x_near, b0), _step(values, b + far, x_near + 32, b1)
            c0, c1 = _step(values, c + near, x_near, c0), _step(values, c + far, x_near + 32, c1)
            d0, d1 = _step(values, d + near, x_near, d0), _step(values, d + far, x_near + 32, d1)
        start = row * columns
        stride = run * columns
        out[row] = sum8(add8(a0, a1)) + _rest(values, x, start, wide)
        out[row + run] = sum8(add8(b0, b1)) + _rest(values, x, start + stride, wide)
        out[row + 2 * run] = sum8(add8(c0, c1)) + _rest(values, x, start + 2 * stride, wide)
        out[row + 3 * run] = sum8(add8(d0, d1)) + _rest(values, x, start + 3 * stride, wide)
    for row in range(first + 4 * run, last):
        a = address(values) + row * row_bytes
        a0, a1 = zeros8(), zeros8()
        for column in range(0, wide, 16):
            near = a + column * size
            a0 = _step(values, near, x0 + 4 * column, a0)
            a1 = _step(values, near + 8 * size, x0 + 4 * column + 32, a1)
        out[row] = sum8(add8(a0, a1)) + _rest(values, x, row * columns, wide)


@parallel_kernel
def _four_runs_threaded(values: Any, x: Any, out: Any, shares: Any) -> None:
    for share in prange(len(shares) - 1):
        _four_runs(values, x, out, shares[share], shares[share + 1])


@parallel_kernel
def _plain(values: Any, x: Any, out: Any, shares: Any) -> None:
    for share in prange(len(shares) - 1):
        for row in range(shares[share], shares[share + 1]):
            out[row] = _rest(values, x, row * len(x), 0)
