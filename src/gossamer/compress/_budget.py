"""Sparsities that meet a total: densities shifted and clamped, then whole numbers of zeros or of kept inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_DENSITY, MOST_DENSITY = 0.02, 0.98


def to_budget(densities: Sequence[float], sizes: Sequence[int], sparsity: float) -> list[float]:
    """``densities`` shifted and clamped to [0.02, 0.98] so that their mean, weighted by ``sizes``, is ``1 - sparsity``.

    All densities inside the bounds move by the same amount (water-filling).

    Raises:
        ValueError: densities are not finite, lengths differ, or the bounds cannot reach the target.

    >>> to_budget([0.5, 0.7], [1, 1], 0.5)
    [0.4, 0.6]
    """
    if len(densities) != len(sizes) or not densities:
        raise ValueError(f"need a size for every density, got {len(densities)} densities and {len(sizes)} sizes")
    if not all(map(math.isfinite, densities)):
        raise ValueError(f"densities must be finite, got {list(densities)}")
    target = 1 - sparsity
    if not LEAST_DENSITY <= target <= MOST_DENSITY:
        raise ValueError(f"sparsity must be in [{1 - MOST_DENSITY:.2f}, {1 - LEAST_DENSITY:.2f}], got {sparsity}")
    low, high = LEAST_DENSITY - max(densities), MOST_DENSITY - min(densities)
    for _ in range(100):
        shift = (low + high) / 2
        if _mean(_clamped(densities, shift), sizes) < target:
            low = shift
        else:
            high = shift
    return [round(value, 9) for value in _clamped(densities, high)]


def _clamped(densities: Sequence[float], shift: float) -> list[float]:
    return [min(max(value + shift, LEAST_DENSITY), MOST_DENSITY) for value in densities]


def _mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


def pruned_per_row(shapes: Sequence[tuple[int, int]], sparsities: Sequence[float]) -> list[int]:
    """Zeros in every row of each layer ``(out, in)``: rounding errors are carried on, so that the total is right.

    The total differs from ``Σ out · in · sparsity`` by at most half a row count of the largest layer.

    >>> pruned_per_row([(4, 5), (4, 5)], [0.5, 0.5])
    [2, 3]
    """
    counts, carry = [], 0.0
    for (rows, columns), sparsity in zip(shapes, sparsities, strict=True):
        wanted = rows * columns * sparsity + carry
        count = min(max(round(wanted / rows), 0), columns - 1)
        carry = wanted - count * rows
        counts.append(count)
    return counts


def integer_pattern(densities: Sequence[float], sizes: Sequence[int], sparsity: float, m: int) -> list[int]:
    """Kept N of every ``m`` per block: integers whose weighted sum is right by the largest remainder.

    Blocks get the whole part of ``m · density`` and then, largest remainder first, one more while the total allows.

    >>> integer_pattern([0.45, 0.55, 0.5], [1, 1, 1], 0.5, 4)
    [2, 2, 2]
    """
    exact = [m * value for value in to_budget(densities, sizes, sparsity)]
    kept = [min(max(math.floor(value + 1e-9), 1), m - 1) for value in exact]
    target = m * (1 - sparsity) * sum(sizes)
    for block in sorted(range(len(kept)), key=lambda block: (kept[block] - exact[block], block)):
        if (
            sum(n * size for n, size in zip(kept, sizes, strict=True)) + sizes[block] <= target + 1e-6
            and kept[block] < m
        ):
            kept[block] += 1
    return kept
