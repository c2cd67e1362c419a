"""Exact-k selection without sorting.

A mask needs to know which weights of a row are its ``k`` lowest, not their order. Scores are mapped to integers of the same
order; bisecting their range finds the k-th lowest by counting, which a processor does for 8 or 16 scores at once while
the row stays in its first cache. Of equal scores the earlier position counts as lower, as with a stable sort.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor


def keep_highest(scores: Tensor, pruned: int) -> Tensor:
    """Bool like ``scores`` ``(rows, columns)``: True for all but the ``pruned`` lowest of every row. NaN counts as highest.

    >>> keep_highest(torch.tensor([[3.0, 1.0, 1.0, 2.0]]), 1)
    tensor([[ True, False,  True,  True]])
    """
    values = scores.detach().to(torch.float32).contiguous()
    keep = torch.empty(values.shape, dtype=torch.bool)
    if pruned <= 0 or pruned >= values.shape[1]:
        return keep.fill_(pruned <= 0)
    bits = values.numpy().view(np.int32)
    select = _keep_in_windows if values.shape[1] <= 16 else _keep_in_rows
    select(bits, pruned, keep.numpy())
    return keep


@numba.njit(inline="always")
def _ordered(bits: Any) -> Any:
    """An int32 that compares as the float with these bits does; both zeros are equal, every NaN is the highest."""
    magnitude = bits & np.int32(0x7FFFFFFF)
    if magnitude > np.int32(0x7F800000):
        return np.int32(0x7FFFFFFF)
    return magnitude if bits >= 0 else -magnitude


@numba.njit(cache=True, nogil=True)
def _keep_in_rows(bits: Any, pruned: Any, keep: Any) -> Any:
    rows, columns = bits.shape
    key = np.empty(columns, np.int32)
    for row in range(rows):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x7FFFFFFF)
        for column in range(columns):
            value = _ordered(bits[row, column])
            key[column] = value
            low, high = min(low, value), max(high, value)
        below = np.int64(low)  # at least `pruned` scores are <= top, fewer are < below
        top = np.int64(high)
        while below < top:
            middle = (below + top) >> 1
            threshold = np.int32(middle)
            count: Any = np.int32(0)
            for column in range(columns):
                count += np.int32(key[column] <= threshold)
            if count >= pruned:
                top = middle
            else:
                below = middle + 1
        threshold = np.int32(top)
        count = np.int32(0)
        for column in range(columns):
            count += np.int32(key[column] < threshold)
            keep[row, column] = key[column] > threshold
        ties = pruned - count
        for column in range(columns):
            if key[column] == threshold:
                keep[row, column] = ties <= 0
                ties -= 1


@numba.njit(cache=True, nogil=True)
def _keep_in_windows(bits: Any, pruned: Any, keep: Any) -> Any:
    """Windows of up to 16 scores: a score is pruned if fewer than ``pruned`` of its window come before it."""
    windows, width = bits.shape
    key = np.empty(width, np.int32)
    for window in range(windows):
        for place in range(width):
            key[place] = _ordered(bits[window, place])
        for place in range(width):
            before: Any = 0
            for other in range(place):
                before += np.int32(key[other] <= key[place])
            for other in range(place + 1, width):
                before += np.int32(key[other] < key[place])
            keep[window, place] = before >= pruned
