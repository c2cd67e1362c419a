"""Row-layout bitmap weight times a few vectors: AVX2 code, and plain loops for any other processor.

Two runs of rows are read side by side, as the dense product does with four; a register of ``x`` then serves both. The
decoding of a byte feeds one vector (:func:`rows_matvec`) or four (:func:`rows_matmul`).
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
    kernel,
    load8,
    load_byte,
    lowest_bit,
    multiply_add8,
    parallel_kernel,
    popcount,
    prefetch,
    sum8,
    zeros8,
)
from gossamer.weights._bitmap_expand import expand8

_AHEAD = 2048  # bytes between what is read and what is asked for
_MARKS_AHEAD = 512


@inlined
def _padded(x: Any, words: int) -> Any:
    """``x`` with zeros up to ``64 * words`` columns; itself if it has as many."""
    if len(x) == 64 * words:
        return x
    longer = np.zeros(64 * words, np.float32)
    longer[: len(x)] = x
    return longer


@inlined
def _step(values: Any, place: int, table: int, byte: int, x: Any, total: Any) -> tuple[Any, int]:
    """Add eight weights times ``x`` to ``total``; the place of the values that follow."""
    total = multiply_add8(expand8(values, place, table, byte), x, total)
    return total, place + values.itemsize * popcount(byte)


@kernel
def _two_runs(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, first: int, last: int) -> None:
    words = len(x) // 64
    size = values.itemsize
    marks, data, x0, shuffles = address(bitmap), address(values), address(x), address(table)
    run = (last - first) // 2
    for row in range(first, first + run):
        a_place, b_place = data + size * offsets[row], data + size * offsets[row + run]
        a_marks, b_marks = marks + 8 * words * row, marks + 8 * words * (row + run)
        a0, a1, b0, b1 = zeros8(), zeros8(), zeros8(), zeros8()
        for word in range(words):
            prefetch(a_place + _AHEAD)
            prefetch(b_place + _AHEAD)
            prefetch(a_marks + 8 * word + _MARKS_AHEAD)
            prefetch(b_marks + 8 * word + _MARKS_AHEAD)
            for pair in range(4):
                near = 8 * word + 2 * pair
                x_near, x_far = load8(x0 + 32 * near), load8(x0 + 32 * near + 32)
                a0, a_place = _step(values, a_place, shuffles, load_byte(a_marks + near), x_near, a0)
                b0, b_place = _step(values, b_place, shuffles, load_byte(b_marks + near), x_near, b0)
                a1, a_place = _step(values, a_place, shuffles, load_byte(a_marks + near + 1), x_far, a1)
                b1, b_place = _step(values, b_place, shuffles, load_byte(b_marks + near + 1), x_far, b1)
        out[row], out[row + run] = sum8(add8(a0, a1)), sum8(add8(b0, b1))
    for row in range(first + 2 * run, last):
        place = data + size * offsets[row]
        total = zeros8()
        for byte in range(8 * words):
            marked = load_byte(marks + 8 * words * row + byte)
            total, place = _step(values, place, shuffles, marked, load8(x0 + 32 * byte), total)
        out[row] = sum8(total)


@kernel
def rows_matvec(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` on one thread, with AVX2. Arrays as in the row layout; table: of ``expand8``."""
    padded = _padded(x, len(bitmap) // len(out))
    _two_runs(bitmap, values, offsets, padded, out, table, 0, len(out))


@parallel_kernel
def rows_matvec_threaded(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """The same, each run of rows between two entries of ``shares`` on a thread of its own."""
    padded = _padded(x, len(bitmap) // len(out))
    for share in prange(len(shares) - 1):
        _two_runs(bitmap, values, offsets, padded, out, table, shares[share], shares[share + 1])


@kernel
def _four_vectors(
    bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, first: int, last: int
) -> None:
    """``out[:4, first:last] = x[:4] @ W[first:last].T`` for ``x`` padded to whole words."""
    words = x.shape[1] // 64
    size = values.itemsize
    marks, data, shuffles = address(bitmap), address(values), address(table)
    x0 = address(x)
    x1, x2, x3 = x0 + 256 * words, x0 + 512 * words, x0 + 768 * words
    for row in range(first, last):
        place = data + size * offsets[row]
        row_marks = marks + 8 * words * row
        t0, t1, t2, t3 = zeros8(), zeros8(), zeros8(), zeros8()
        for byte in range(8 * words):
            marked = load_byte(row_marks + byte)
            weights = expand8(values, place, shuffles, marked)
            place += size * popcount(marked)
            near = 32 * byte
            t0 = multiply_add8(weights, load8(x0 + near), t0)
            t1 = multiply_add8(weights, load8(x1 + near), t1)
            t2 = multiply_add8(weights, load8(x2 + near), t2)
            t3 = multiply_add8(weights, load8(x3 + near), t3)
        out[0, row], out[1, row], out[2, row], out[3, row] = sum8(t0), sum8(t1), sum8(t2), sum8(t3)


@parallel_kernel
def rows_matmul(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = x @ W.T`` with AVX2, four rows of ``x`` at a time; ``x`` ``(4 * groups, 64 * words)``, zero-padded."""
    for share in prange(len(shares) - 1):
        for start in range(0, len(x), 4):
            _four_vectors(
                bitmap, values, offsets, x[start : start + 4], out[start : start + 4], table,
                shares[share], shares[share + 1],
            )  # fmt: skip


@parallel_kernel
def rows_plain(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` bit by bit, on any processor; ``table`` is not looked at."""
    words = len(bitmap) // len(out)
    for share in prange(len(shares) - 1):
        for row in range(shares[share], shares[share + 1]):
            place = offsets[row]
            total = np.float32(0)
            for word in range(words):
                marks = bitmap[row * words + word]
                while marks:
                    total += entry(values, place) * x[64 * word + lowest_bit(marks)]
                    place += 1
                    marks &= marks - np.uint64(1)
            out[row] = total
