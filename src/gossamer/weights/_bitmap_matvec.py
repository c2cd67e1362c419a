"""Row-layout bitmap weight times a few vectors: AVX2 code, and plain loops for any other processor.

Four runs of rows are read side by side, as in the dense product; a register of ``x`` then serves all four, which
matters because loads bound the speed. The decoding of a byte feeds one vector (:func:`rows_matvec`) or four
(:func:`rows_matmul`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from gossamer.core.jit import (
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
from gossamer.weights._bitmap_expand import expand_four, settled

_AHEAD = 2048  # bytes between what is read and what is asked for


@inlined
def _padded(x: Any, words: int) -> Any:
    """A copy of ``x`` with zeros up to ``64 * words`` columns, at an address that suits vector loads."""
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


@inlined
def _add_row(values: Any, place: int, table: int, marks: int, x: tuple[Any, Any, Any, Any], total: Any) -> Any:
    """Add 32 weights of a row times ``x`` to its running total; also the place of the values that follow.

    Nothing of the next row is begun before: all rows at once need more registers than there are.
    """
    _ask_for(values, place)
    first, second, third, fourth, place = expand_four(values, place, table, marks)
    total = multiply_add8(second, x[1], multiply_add8(first, x[0], total))
    total = multiply_add8(fourth, x[3], multiply_add8(third, x[2], total))
    return settled(total, place)


@inlined
def _add_rows(values: Any, places: Any, table: int, near: int, gap: int, far: int, x: int, totals: Any) -> Any:
    """Add 32 weights of each of four rows to four totals; also the places of the values that follow.

    near, near + gap, near + 2 * gap, far: addresses of the rows' marks. x: address.
    """
    a, b, c, d = places
    four = _load_four(x)
    first, a = _add_row(values, a, table, load_half_word(near), four, totals[0])
    second, b = _add_row(values, b, table, load_half_word(near + gap), four, totals[1])
    third, c = _add_row(values, c, table, load_half_word(near + 2 * gap), four, totals[2])
    fourth, d = _add_row(values, d, table, load_half_word(far), four, totals[3])
    return (first, second, third, fourth), (a, b, c, d)


@kernel
def _four_runs(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, first: int, last: int) -> None:
    words = len(x) // 64
    size, row_marks = item_bytes(values), 8 * words
    marks, data, x0, shuffles = address(bitmap), address(values), address(x), address(table)
    run = (last - first) // 4
    gap = row_marks * run
    for row in range(first, first + run):
        b, c, d = row + run, row + 2 * run, row + 3 * run
        places = (
            data + size * offsets[row], data + size * offsets[b], data + size * offsets[c], data + size * offsets[d],
        )  # fmt: skip
        totals = (zeros8(), zeros8(), zeros8(), zeros8())
        near, x_near = marks + row_marks * row, x0
        far = near + 3 * gap
        for _ in range(words):
            totals, places = _add_rows(values, places, shuffles, near, gap, far, x_near, totals)
            totals, places = _add_rows(values, places, shuffles, near + 4, gap, far + 4, x_near + 128, totals)
            total_a, near = settled(totals[0], near + 8)  # or LLVM would keep a pointer for every row
            total_d, far = settled(totals[3], far + 8)
            totals, x_near = (total_a, totals[1], totals[2], total_d), x_near + 256
        out[row], out[b], out[c], out[d] = sum8(totals[0]), sum8(totals[1]), sum8(totals[2]), sum8(totals[3])
    for row in range(first + 4 * run, last):
        place, total = data + size * offsets[row], zeros8()
        for step in range(2 * words):
            marked = load_half_word(marks + row_marks * row + 4 * step)
            total, place = _add_row(values, place, shuffles, marked, _load_four(x0 + 128 * step), total)
        out[row] = sum8(total)


@kernel
def rows_matvec(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """``out = W @ x`` on one thread, with AVX2. Arrays as in the row layout; table: of ``expand8``."""
    padded = _padded(x, len(bitmap) // len(out))
    _four_runs(bitmap, values, offsets, padded, out, table, 0, len(out))


@parallel_kernel
def rows_matvec_threaded(bitmap: Any, values: Any, offsets: Any, x: Any, out: Any, table: Any, shares: Any) -> None:
    """The same, each run of rows between two entries of ``shares`` on a thread of its own."""
    padded = _padded(x, len(bitmap) // len(out))
    for share in prange(len(shares) - 1):
        _four_runs(bitmap, values, offsets, padded, out, table, shares[share], shares[share + 1])


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
