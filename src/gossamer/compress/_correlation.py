"""Rank correlation: whether two figures order the same things alike."""

from __future__ import annotations

import numpy as np


def spearman(left: list[float], right: list[float]) -> float | None:
    """Rank correlation, ties averaged; None for fewer than 5 pairs or a constant side.

    >>> spearman([1, 2, 3, 4, 5], [10, 20, 30, 50, 40])
    0.9
    """
    if len(left) < 5:
        return None
    first, second = _ranks(left), _ranks(right)
    if first.std() == 0 or second.std() == 0:
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), 12)


def _ranks(values: list[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.array(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
