"""Softmax over the stored entries of each row, and its gradient, on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import kernel


@kernel
def softmax_rows(indptr: Any, scores: Any, out: Any) -> None:
    """``out[p] = exp(scores[p]) / sum over p's row``, with each row's largest score taken off first.

    A row whose scores are all -inf has no largest one to take off and becomes NaN, as in ``torch.softmax``.
    """
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        if begin == end:
            continue
        largest = scores[begin]
        for place in range(begin + 1, end):
            if scores[place] > largest or np.isnan(scores[place]):
                largest = scores[place]
        total = scores.dtype.type(0)
        for place in range(begin, end):
            out[place] = np.exp(scores[place] - largest)
            total += out[place]
        for place in range(begin, end):
            out[place] /= total


@kernel
def softmax_backward(indptr: Any, shares: Any, gradient: Any, out: Any) -> None:
    """``out[p] = shares[p] * (gradient[p] - sum over p's row of shares * gradient)``."""
    for row in range(len(indptr) - 1):
        begin, end = indptr[row], indptr[row + 1]
        total = shares.dtype.type(0)
        for place in range(begin, end):
            total += shares[place] * gradient[place]
        for place in range(begin, end):
            out[place] = shares[place] * (gradient[place] - total)
