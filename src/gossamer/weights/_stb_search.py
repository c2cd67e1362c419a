"""Exact errors of every candidate split of a block, without making the splits.

Binarising a set of values to ``m ± a``, with ``m`` their mean and ``a`` the mean of ``|w - m|``, leaves the squared error
``Σw² - (Σw)²/n - (Σ|w - m|)²/n``. Two passes over a row that stays in the first cache therefore judge a split; nothing as
large as the block is written.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from gossamer.core.jit import inlined, parallel_kernel


@parallel_kernel
def split_gains(
    weight: np.ndarray, rest: np.ndarray, thresholds: np.ndarray, ratio: float, symmetric: bool, gains: np.ndarray
) -> None:
    """``gains[row, t]``: by how much binarising three regions, split at ``p`` and ``ratio * p``, lowers the row's energy.

    weight float32 and rest bool ``(rows, columns)``; thresholds float32 ``(T,)``, of ``|w|``; gains float64 ``(rows, T)``.
    """
    for row in prange(weight.shape[0]):
        count, total, spread = np.zeros(3), np.zeros(3), np.zeros(3)
        for t in range(len(thresholds)):
            gains[row, t] = _regions_gain(weight[row], rest[row], thresholds[t], ratio, symmetric, count, total, spread)


@parallel_kernel
def salient_errors(
    weight: np.ndarray, keep: np.ndarray, place: np.ndarray, threshold: float, ratio: float, symmetric: bool,
    errors: np.ndarray,
) -> None:  # fmt: skip
    """``errors[row, k]``: squared error of the kept entries if the ``k`` most salient columns are binarised twice.

    place: int64 ``(columns,)``, position of each column in the order of saliency. The others are split at ``threshold`` and
    ``ratio * threshold``. errors: float64 ``(rows, counts)``.
    """
    columns = weight.shape[1]
    for row in prange(weight.shape[0]):
        count, total, spread = np.zeros(3), np.zeros(3), np.zeros(3)
        rest = np.zeros(columns, np.bool_)
        values, kept = weight[row], keep[row]
        for k in range(errors.shape[1]):
            energy = 0.0
            for column in range(columns):
                rest[column] = kept[column] and place[column] >= k
                if rest[column]:
                    energy += values[column] * values[column]
            gain = _regions_gain(values, rest, threshold, ratio, symmetric, count, total, spread)
            errors[row, k] = energy - gain + _twice(values, kept, place, k, symmetric)


@inlined
def _regions_gain(
    values: np.ndarray, rest: np.ndarray, p: float, ratio: float, symmetric: bool,
    count: np.ndarray, total: np.ndarray, spread: np.ndarray,
) -> float:  # fmt: skip
    count[:], total[:], spread[:] = 0.0, 0.0, 0.0
    q = ratio * p
    for column in range(len(values)):
        if rest[column]:
            size = abs(values[column])
            region = int(size >= p) + int(size >= q)
            count[region] += 1.0
            total[region] += values[column]
    for column in range(len(values)):
        if rest[column]:
            size = abs(values[column])
            region = int(size >= p) + int(size >= q)
            mean = 0.0 if symmetric else total[region] / count[region]
            spread[region] += abs(values[column] - mean)
    gain = 0.0
    for region in range(3):
        if count[region] > 0:
            gain += spread[region] ** 2 / count[region]
            if not symmetric:
                gain += total[region] ** 2 / count[region]
    return gain


@inlined
def _twice(values: np.ndarray, kept: np.ndarray, place: np.ndarray, k: int, symmetric: bool) -> float:
    """Squared error of the columns before place ``k``, binarised and their remainder binarised again."""
    count, total = 0.0, 0.0
    for column in range(len(values)):
        if kept[column] and place[column] < k:
            count += 1.0
            total += values[column]
    if count == 0:
        return 0.0
    mean = 0.0 if symmetric else total / count
    scale = 0.0
    for column in range(len(values)):
        if kept[column] and place[column] < k:
            scale += abs(values[column] - mean)
    scale /= count
    total = 0.0
    for column in range(len(values)):
        if kept[column] and place[column] < k:
            total += values[column] - mean - (scale if values[column] >= mean else -scale)
    second = 0.0 if symmetric else total / count
    spread, energy = 0.0, 0.0
    for column in range(len(values)):
        if kept[column] and place[column] < k:
            remainder = values[column] - mean - (scale if values[column] >= mean else -scale) - second
            spread += abs(remainder)
            energy += remainder * remainder
    return energy - spread * spread / count
