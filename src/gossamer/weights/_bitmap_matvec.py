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
    item_bytes,
    kernel,
    load8,
    load_half_word,
    lowest_bit,
    multiply_add8,
    parallel_kernel,
    prefetch,
    sum8,
    zeros8,
)
from gossamer.weights._bitmap_expand import add_four, expand_four

_AHEAD = 2048  # bytes between what is read and what is asked for


@inlined
def _padded(x: Any, words: int) -> Any:
    """``x`` with zeros up to ``64 * words`` columns; itself if it has as many."""
    if len(x) == 64 * words:
        return x
    longer = np.zeros(64 * words, np.float32)
    longer[: len(x)] = x
    return longer


@inlined
def _ask_for(values: Any, place: int) -> None:
    """Prefetch what 32 columns half full of values use, ``_AHEAD`` bytes from now."""
    prefetch(place + _AHEAD)
    if item_bytes(values) == 4:
        prefetch(place + _AHEAD + 64)


@inlined
def _load_four(x: int) -> tuple[Any, Any, Any, Any]:
    return load8(x), load8(x + 32), load8(x + 64), load8(x + 96)


@kernel
def _two_runs(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, first: int, last: int) -> None:
    words = len(x) // 64
    size, row_marks = item_bytes(values), 8 * words
    marks, data, x0, shuffles = address(bitmap), address(values), address(x), address(table)
    run = (last - first) // 2
    gap = row_marks * run
    for row in range(first, first + run):
        a, b = data + size * offsets[row], data + size * offsets[row + run]
        a0, a1, b0, b1 = zeros8(), zeros8(), zeros8(), zeros8()
        near, x_near = marks + row_marks * row, x0
        for _ in range(2 * words):
            _ask_for(values, a)
            _ask_for(values, b)
            four = _load_four(x_near)
            a0, a1, a = add_four(values, a, shuffles, load_half_word(near), four, a0, a1)
            b0, b1, b = add_four(values, b, shuffles, load_half_word(near + gap), four, b0, b1)
            near, x_near = near + 4, x_near + 128
        out[row], out[row + run] = sum8(add8(a0, a1)), sum8(add8(b0, b1))
    for row in range(first + 2 * run, last):
        a = data + size * offsets[row]
        a0, a1 = zeros8(), zeros8()
        for step in range(2 * words):
            four = _load_four(x0 + 128 * step)
            a0, a1, a = add_four(values, a, shuffles, load_half_word(marks + row_marks * row + 4 * step), four, a0, a1)
        out[row] = sum8(add8(a0, a1))


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


@inlined
def _times_four(weights: Any, x: int, stride: int, totals: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Add eight weights times the same eight columns of four vectors, ``stride`` bytes apart, to four totals."""
    return (
        multiply_add8(weights, load8(x), totals[0]),
        multiply_add8(weights, load8(x + stride), totals[1]),
        multiply_add8(weights, load8(x + 2 * stride), totals[2]),
        multiply_add8(weights, load8(x + 3 * stride), totals[3]),
    )


@kernel
def _four_vectors(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, first: int, last: int) -> None:
    """``out[:4, first:last] = x[:4] @ W[first:last].T`` for ``x`` padded to whole words."""
    words = x.shape[1] // 64
    size, stride = item_bytes(values), 256 * words
    marks, data, shuffles, x0 = address(bitmap), address(values), address(table), address(x)
    for row in range(first, last):
        place = data + size * offsets[row]
        totals = (zeros8(), zeros8(), zeros8(), zeros8())
        for step in range(2 * words):
            _ask_for(values, place)
            marked = load_half_word(marks + 8 * words * row + 4 * step)
            w0, w1, w2, w3, place = expand_four(values, place, shuffles, marked)
            near = x0 + 128 * step
            totals = _times_four(w0, near, stride, totals)
            totals = _times_four(w1, near + 32, stride, totals)
            totals = _times_four(w2, near + 64, stride, totals)
            totals = _times_four(w3, near + 96, stride, totals)
        out[0, row], out[1, row] = sum8(totals[0]), sum8(totals[1])
        out[2, row], out[3, row] = sum8(totals[2]), sum8(totals[3])


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
