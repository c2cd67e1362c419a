"""Which exponents a bf16 matrix uses, and the window of them that covers most of its entries.

The exponents of trained weights are few: for weights drawn from N(0, sigma^2) their law has one peak and falls off
geometrically below it, so a short run of consecutive exponents covers nearly every entry ("ZipServ", ASPLOS 2026).
"""

from __future__ import annotations

import numpy as np

from gossamer.core.jit import kernel


@kernel
def exponent_counts(bits: np.ndarray) -> np.ndarray:
    """How often each of the 256 exponents occurs in bf16 bit patterns (uint16, one-dimensional): int64 ``(256,)``.

    Four tables are filled in turn, since equal exponents in a row would wait for one another in a single table.

    >>> exponent_counts(np.array([0x3F80, 0x3FFF, 0x0001], np.uint16))[[0, 127]].tolist()
    [1, 2]
    """
    counts = np.zeros((4, 256), np.int64)
    fours = bits.size // 4 * 4
    for start in range(0, fours, 4):
        for lane in range(4):
            counts[lane, (bits[start + lane] >> 7) & 255] += 1
    for place in range(fours, bits.size):
        counts[0, (bits[place] >> 7) & 255] += 1
    return counts.sum(axis=0)


def best_window(counts: np.ndarray, width: int, first: int = 0) -> int:
    """Where the ``width`` consecutive exponents begin that occur most often, not below ``first``; the lowest of ties.

    >>> best_window(np.bincount([3, 9, 9, 10, 12], minlength=256), width=2)
    9
    """
    sums = np.convolve(counts[first:], np.ones(width, np.int64), mode="valid")
    return first + int(sums.argmax())
