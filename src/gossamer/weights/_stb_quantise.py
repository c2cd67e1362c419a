"""Binarises a matrix on an N:8 structure: what :class:`~gossamer.weights.STBWeight` stores.

Of every 8 consecutive inputs of a row, N are kept. In blocks of 128 columns, a few salient columns are written as
two signs with two scales (a residual is binarised again); the other kept weights fall into three regions of
magnitude, split at ``p`` and ``2 p``, and each row has a mean and a scale per region: a weight becomes
``mean +- scale`` (Dong et al., "STBLLM", ICLR 2025). ``p`` and the number of salient columns are searched by the squared
error of the weights; with a factor of the inverse Hessian, later columns make up for the errors of earlier ones.

A weight's *level* says which of the values of its row and block it takes: 0 is pruned, ``1 + 2 * region + sign``, and
``7 + sign + 2 * second sign`` for salient columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gossamer.weights._stb_search import salient_errors, split_gains

GROUP, BLOCK, LEVELS = 8, 128, 11
REGIONS, SCALES = 3, 5
"""Three regions, and two orders of salient columns, have a mean and a scale each."""
THRESHOLDS = 160
MOST_SALIENT = 50


@dataclass(frozen=True, eq=False)
class STBLevels:
    """A binarised matrix ``(out, in)`` before it is packed.

    level: uint8 ``(out, columns)``, columns filled up to whole blocks. mean, scale: float16 ``(out, blocks, 5)``, of the
    regions and of both orders of the salient columns. n: kept inputs of every 8.
    """

    shape: tuple[int, int]
    n: int
    level: Tensor
    mean: Tensor
    scale: Tensor

    def table(self) -> Tensor:
        """The value of every level: float32 ``(out, blocks, 11)``."""
        mean, scale = self.mean.float(), self.scale.float()
        low, high = mean - scale, mean + scale
        both = torch.stack([low, high], 3)
        regions = both[:, :, :REGIONS].flatten(2)
        salient = (both[:, :, 4, :, None] + both[:, :, 3, None, :]).flatten(2)
        return torch.cat([torch.zeros_like(mean[:, :, :1]), regions, salient], 2)

    def to_dense(self) -> Tensor:
        """The values, float32 ``(out, in)``."""
        return values_of(self.level, self.table(), self.shape)


def values_of(level: Tensor, table: Tensor, shape: tuple[int, int]) -> Tensor:
    """Look every level up in the table of its row and block."""
    rows, columns = shape
    blocks = level.shape[1] // BLOCK
    values = table[:rows].gather(2, level[:rows].view(rows, blocks, BLOCK).long())
    return values.reshape(rows, -1)[:, :columns].contiguous()


def stb_quantize(
    weight: Tensor,
    norms: Tensor | None = None,
    n: int = 4,
    symmetric: bool = False,
    thresholds: int = THRESHOLDS,
    *,
    keep: Tensor | None = None,
    factor: Tensor | None = None,
    regions: int = REGIONS,
) -> STBLevels:
    """Binarise ``weight`` ``(out, in)`` on the CPU, keeping ``n`` of every 8 inputs.

    norms: ``(in,)``, the norms of the layer's inputs, which weigh what is kept; 1 by default. symmetric: no means.
    thresholds: how many ``p`` are tried per block. keep: bool ``(out, in)``, what is kept instead, ``n`` of every 8 (fewer
    where inputs end). factor: ``(in, in)``, the upper Cholesky factor of the inverse Hessian of the layer's output: errors
    of a block, pruned entries included, are then made up for by the columns to its right, and salient columns are those
    that the output depends on most. regions: 3, or 2 for one threshold (Huang et al., "BiLLM", ICML 2024).

    Raises:
        ValueError: ``weight`` is not a finite matrix, ``n`` is not in 1..8, or an argument does not fit.
    """
    if weight.ndim != 2 or 0 in weight.shape or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"weight must be a finite matrix without empty dimensions, got shape {tuple(weight.shape)}")
    if not 1 <= n < GROUP and (keep is None or n != GROUP):
        raise ValueError(f"n must be in 1..{GROUP - 1}, kept inputs of every {GROUP}, got {n}")
    rows, columns = weight.shape
    if norms is not None and norms.shape != (columns,):
        raise ValueError(f"norms must have shape ({columns},), got {tuple(norms.shape)}")
    if factor is not None and factor.shape != (columns, columns):
        raise ValueError(f"factor must have shape ({columns}, {columns}), got {tuple(factor.shape)}")
    if regions not in (2, REGIONS):
        raise ValueError(f"regions must be 2 or {REGIONS}, got {regions}")
    padded = weight.new_zeros(rows, -(-columns // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:, :columns] = weight.detach()
    kept = _kept(_importance(padded, columns, norms), n) if keep is None else _checked(keep, n, padded)
    return _blocks(padded, kept, n, columns, factor, _Splits(symmetric, thresholds, 2.0 if regions == 3 else torch.inf))


@dataclass(frozen=True)
class _Splits:
    """What is searched for: ``thresholds`` places of the first threshold, the second ``ratio`` times as high."""

    symmetric: bool
    thresholds: int
    ratio: float


def _checked(keep: Tensor, n: int, padded: Tensor) -> Tensor:
    """``keep`` filled up to whole blocks: imaginary inputs count as kept where a group would have too few."""
    rows, columns = padded.shape
    if keep.dtype != torch.bool or keep.shape[0] != rows or not columns - BLOCK < keep.shape[1] <= columns:
        raise ValueError(f"keep must be bool and of the weight's shape, got {keep.dtype} {tuple(keep.shape)}")
    full = torch.zeros(rows, columns, dtype=torch.bool)
    full[:, : keep.shape[1]] = keep
    groups = full.view(rows, -1, GROUP)
    real = (torch.arange(columns) < keep.shape[1]).view(-1, GROUP)
    missing = n - groups.sum(2)
    if bool((missing < 0).any()) or bool((missing > (~real).sum(1)).any()):
        raise ValueError(f"keep must hold {n} of every {GROUP} consecutive inputs of each row")
    free = (~groups) & ~real
    return (groups | (free & (free.cumsum(2) <= missing[..., None]))).view(rows, columns)


def _blocks(weight: Tensor, keep: Tensor, n: int, columns: int, factor: Tensor | None, splits: _Splits) -> STBLevels:
    """Block by block from left to right; ``weight`` is used up."""
    rows = weight.shape[0]
    diagonal = torch.ones(weight.shape[1])
    if factor is not None:
        diagonal[:columns] = factor.diagonal()
    pieces = []
    for left in range(0, weight.shape[1], BLOCK):
        inside, stop = slice(left, left + BLOCK), min(left + BLOCK, columns)
        found = _block(weight[:, inside].contiguous(), keep[:, inside].contiguous(), diagonal[inside], splits)
        pieces.append(found)
        if factor is not None and stop < columns:
            level, mean, scale = found
            values = STBLevels((rows, BLOCK), n, level, mean[:, None], scale[:, None]).to_dense()
            errors = (weight[:, inside] - values)[:, : stop - left] / diagonal[left:stop]
            weight[:, stop:columns] -= errors @ factor[left:stop, stop:columns]
    levels, means, scales = zip(*pieces, strict=True)
    return STBLevels((rows, columns), n, torch.cat(levels, 1), torch.stack(means, 1), torch.stack(scales, 1))


def _importance(weight: Tensor, columns: int, norms: Tensor | None) -> Tensor:
    """Relative importance, ``|w| / row sum + |w| / column sum``, times the root of the input norm; imaginary inputs -1."""
    size = weight.abs()
    shares = size / size.sum(1, keepdim=True).clamp_min(1e-30) + size / size.sum(0).clamp_min(1e-30)
    if norms is not None:
        shares[:, :columns] *= norms.float().sqrt()
    shares[:, columns:] = -1
    return shares


def _kept(scores: Tensor, n: int) -> Tensor:
    """The ``n`` highest of every 8; of equal ones the earlier is pruned first."""
    groups = scores.reshape(-1, GROUP)
    pruned = torch.argsort(groups, dim=1, stable=True)[:, : GROUP - n]
    return torch.ones_like(groups, dtype=torch.bool).scatter_(1, pruned, False).view(scores.shape)


def _block(weight: Tensor, keep: Tensor, diagonal: Tensor, splits: _Splits) -> tuple[Tensor, Tensor, Tensor]:
    """Level, mean and scale of one block: the salient columns, then the threshold, that give the least error."""
    order = (weight * keep / diagonal).square().sum(0).argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(BLOCK)
    size = weight.abs()
    middle = float(size[keep].median()) if bool(keep.any()) else 0.0
    errors = np.empty((weight.shape[0], MOST_SALIENT + 1))
    arrays = weight.numpy(), keep.numpy(), place.numpy()
    salient_errors(*arrays, middle, splits.ratio, splits.symmetric, errors)
    salient = place < int(errors.sum(0).argmin())
    return _levels(weight, keep, salient, _threshold(weight, size, keep & ~salient, splits), splits)


def _threshold(weight: Tensor, size: Tensor, rest: Tensor, splits: _Splits) -> float:
    """The first threshold of the regions with the least error; both lie within the inner 80 % of magnitudes."""
    if not bool(rest.any()):
        return 0.0
    shares = torch.linspace(0.1, 0.9, splits.thresholds)
    chosen = size[rest]
    candidates = torch.quantile(chosen[:: max(1, len(chosen) // 100_000)], shares)
    if splits.ratio < torch.inf and bool((inner := splits.ratio * candidates <= candidates[-1]).any()):
        candidates = candidates[inner]
    gains = np.empty((weight.shape[0], len(candidates)))
    split_gains(weight.numpy(), rest.numpy(), candidates.numpy(), splits.ratio, splits.symmetric, gains)
    return float(candidates[int(gains.sum(0).argmax())])


def _levels(
    weight: Tensor, keep: Tensor, salient: Tensor, threshold: float, splits: _Splits
) -> tuple[Tensor, Tensor, Tensor]:
    """Level, mean and scale with given salient columns and threshold."""
    symmetric = splits.symmetric
    first_sign, first, first_mean, first_scale = _binarise(weight, keep & salient, symmetric)
    second_sign, _, second_mean, second_scale = _binarise(weight - first, keep & salient, symmetric)
    level = 7 * (keep & salient) + (keep & salient) * (first_sign.int() + 2 * second_sign.int())
    means, scales = [], []
    for number, region in enumerate(_regions(weight.abs(), keep & ~salient, threshold, splits.ratio)):
        sign, _, mean, scale = _binarise(weight, region, symmetric)
        level += region * (1 + 2 * number + sign.int())
        means.append(mean)
        scales.append(scale)
    mean = torch.cat([*means, first_mean, second_mean], 1)
    scale = torch.cat([*scales, first_scale, second_scale], 1)
    return level.to(torch.uint8), _half(mean), _half(scale)


def _regions(size: Tensor, rest: Tensor, p: float, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    return rest & (size < p), rest & (size >= p) & (size < ratio * p), rest & (size >= ratio * p)


def _binarise(weight: Tensor, chosen: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sign, value (0 where not chosen), mean and scale ``(out, 1)`` of the chosen entries of every row."""
    count = chosen.sum(1, keepdim=True).clamp_min(1)
    mean = torch.zeros_like(weight[:, :1]) if symmetric else torch.where(chosen, weight, 0).sum(1, keepdim=True) / count
    scale = torch.where(chosen, (weight - mean).abs(), 0).sum(1, keepdim=True) / count
    sign = weight >= mean
    return sign, torch.where(chosen, torch.where(sign, mean + scale, mean - scale), 0), mean, scale


def _half(numbers: Tensor) -> Tensor:
    """As float16, large ones as its largest."""
    return numbers.clamp(-65504, 65504).to(torch.float16)
