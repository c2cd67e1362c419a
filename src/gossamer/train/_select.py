"""The k entries of largest magnitude, and the sum of two such lists: what every round of gTop-k does.

Magnitudes of float32 numbers order like their bits read as integers, so the k-th largest is found by counting digits of
11, 11 and 9 bits, without sorting. Ties are broken by the lower index, so that every rank decides alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_INFINITY_BITS = 0x7F800000


def select_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ascending int32 positions of the ``k`` entries of ``x`` with the largest magnitude.

    x: ``(d,)`` float32, contiguous. Among equal magnitudes the lowest positions are taken. NaN counts as the largest.

    Raises:
        ValueError: ``k`` is not in 1...d, or ``x`` has 2^31 entries or more.
        TypeError: ``x`` is not a float32 vector.

    >>> select_topk(torch.tensor([1.0, -3.0, 2.0, 3.0]), 2)
    (tensor([-3.,  3.]), tensor([1, 3], dtype=torch.int32))
    """
    if x.dtype != torch.float32 or x.dim() != 1:
        raise TypeError(f"x must be a float32 vector, got {x.dtype} of shape {tuple(x.shape)}")
    if not 1 <= k <= x.numel():
        raise ValueError(f"k must be between 1 and the {x.numel()} entries of x, got {k}")
    if x.numel() >= 1 << 31:
        raise ValueError(f"x must have fewer than 2^31 entries, got {x.numel()}; exchange it in several groups")
    if x.device.type != "cpu":
        indices = _stable_topk(x, k)
        return x[indices], indices.int()
    values, indices = _select(x.contiguous().numpy(), k)
    return torch.from_numpy(values), torch.from_numpy(indices)


def merge_topk(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add two sparse vectors and keep the ``k`` largest sums; returns kept values and indices, then the dropped ones.

    first, second: values (float32) and strictly ascending int32 indices. Where an index is in both, the value of
    ``first`` is the left operand. Results are ascending in their indices; the dropped ones are all that is not kept.
    """
    if first[0].device.type != "cpu":
        return _merge_by_sorting(first, second, k)
    arrays = _merge(first[0].numpy(), first[1].numpy(), second[0].numpy(), second[1].numpy(), k)
    return (
        torch.from_numpy(arrays[0]),
        torch.from_numpy(arrays[1]),
        torch.from_numpy(arrays[2]),
        torch.from_numpy(arrays[3]),
    )


def all_finite(values: Tensor) -> bool:
    """Whether ``values``, which hold the largest magnitudes of a vector, and hence the vector, are free of NaN and Inf."""
    return bool(torch.isfinite(values).all())


def _stable_topk(x: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes, ascending; ties to the lowest position."""
    bits = x.abs().view(torch.int32)
    threshold = torch.topk(bits, k).values[-1]
    above = (bits > threshold).nonzero().view(-1)
    level = (bits == threshold).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, level]).sort().values


def _merge_by_sorting(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`merge_topk` in tensor operations, for other devices."""
    indices, order = torch.cat([first[1], second[1]]).sort(stable=True)
    values = torch.cat([first[0], second[0]])[order]
    twin = torch.zeros_like(indices, dtype=torch.bool)
    twin[1:] = indices[1:] == indices[:-1]
    values[:-1] = torch.where(twin[1:], values[:-1] + values[1:], values[:-1])
    values, indices = values[~twin], indices[~twin]
    if values.numel() <= k:
        return values, indices, values[:0], indices[:0]
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[_stable_topk(values, k)] = True
    return values[kept], indices[kept], values[~kept], indices[~kept]


@njit(cache=True, nogil=True)
def _threshold(bits: Ints, k: int) -> tuple[int, int]:  # pragma: no cover
    """The k-th largest magnitude's bits, and how many entries equal to it are among the k largest."""
    prefix, wanted = np.int32(0), k
    for shift, width, known in ((20, 11, 31), (9, 11, 20), (0, 9, 9)):
        counts = np.zeros(1 << width, np.int64)
        mask = np.int32((1 << width) - 1)
        for i in range(bits.size):
            magnitude = bits[i] & np.int32(0x7FFFFFFF)
            if known == 31 or (magnitude >> known) == (prefix >> known):
                counts[(magnitude >> shift) & mask] += 1
        digit = (1 << width) - 1
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        prefix |= np.int32(digit << shift)
    return int(prefix), wanted


@njit(cache=True, nogil=True)
def _select(x: Floats, k: int) -> tuple[Floats, Ints]:  # pragma: no cover
    bits = x.view(np.int32)
    # One pass over all: count by the leading digit. What is above its bucket is chosen, the bucket itself is refined.
    counts = np.zeros(1 << 11, np.int64)
    for i in range(bits.size):
        counts[(bits[i] & np.int32(0x7FFFFFFF)) >> 20] += 1
    digit, wanted = (1 << 11) - 1, k
    while counts[digit] < wanted:
        wanted -= counts[digit]
        digit -= 1
    floor = np.int32(digit << 20)
    candidates = np.empty(k - wanted + counts[digit], np.int32)
    magnitudes = np.empty(candidates.size, np.int32)
    found = 0
    for i in range(bits.size):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        if magnitude >= floor:
            candidates[found] = i
            magnitudes[found] = magnitude
            found += 1
    threshold, level = _threshold(magnitudes, k)
    values, indices = np.empty(k, np.float32), np.empty(k, np.int32)
    place = 0
    for j in range(candidates.size):
        take = magnitudes[j] > threshold
        if magnitudes[j] == threshold and level > 0:
            take = True
            level -= 1
        if take:
            indices[place] = candidates[j]
            values[place] = x[candidates[j]]
            place += 1
    return values, indices


@njit(cache=True, nogil=True)
def _merge(v1: Floats, i1: Ints, v2: Floats, i2: Ints, k: int) -> tuple[Floats, Ints, Floats, Ints]:  # pragma: no cover
    values, indices = np.empty(v1.size + v2.size, np.float32), np.empty(v1.size + v2.size, np.int32)
    a, b, n = 0, 0, 0
    while a < i1.size and b < i2.size:  # without branches: which list is next cannot be predicted
        x, y = i1[a], i2[b]
        from_first, from_second = x <= y, y <= x
        indices[n] = min(x, y)
        values[n] = (v1[a] if from_first else np.float32(0)) + (v2[b] if from_second else np.float32(0))
        a += from_first
        b += from_second
        n += 1
    while a < i1.size:
        indices[n], values[n] = i1[a], v1[a]
        a += 1
        n += 1
    while b < i2.size:
        indices[n], values[n] = i2[b], v2[b]
        b += 1
        n += 1
    if n <= k:
        return values[:n], indices[:n], np.empty(0, np.float32), np.empty(0, np.int32)
    bits = values[:n].view(np.int32)
    threshold, level = _threshold(bits, k)
    # Every entry is written to both outputs, and only one of the places moves on; hence one entry of room more.
    kept_v, kept_i = np.empty(k + 1, np.float32), np.empty(k + 1, np.int32)
    lost_v, lost_i = np.empty(n - k + 1, np.float32), np.empty(n - k + 1, np.int32)
    place = 0
    for j in range(n):
        magnitude = bits[j] & np.int32(0x7FFFFFFF)
        tied = (magnitude == threshold) & (level > 0)
        kept_v[place], kept_i[place] = values[j], indices[j]
        lost_v[j - place], lost_i[j - place] = values[j], indices[j]
        place += (magnitude > threshold) | tied
        level -= tied
    return kept_v[:k], kept_i[:k], lost_v[: n - k], lost_i[: n - k]
