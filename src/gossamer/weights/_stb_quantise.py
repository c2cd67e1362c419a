"""Binarises a matrix on an N:8 structure: what :class:`~gossamer.weights.STBWeight` stores.

Of every 8 consecutive inputs of a row, N are kept. In blocks of 128 columns, a few salient columns are written as
two signs with two scales (a residual is binarised again); the other kept weights fall into three regions of
magnitude, split at ``p`` and ``2 p``, and each row has a mean and a scale per region: a weight becomes
``mean +- scale`` (Dong et al., "STBLLM", ICLR 2025). This is the plain form: ``p`` and the salient columns are
searched by squared error, and no error is carried over to later columns.

A weight's *level* says which of the values of its row and block it takes: 0 is pruned, ``1 + 2 * region + sign``, and
``7 + sign + 2 * second sign`` for salient columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP, BLOCK, LEVELS = 8, 128, 11
REGIONS, SCALES = 3, 5
"""Three regions, and two orders of salient columns, have a mean and a scale each."""
_THRESHOLDS = 40
_SALIENT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 50)


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
    weight: Tensor, norms: Tensor | None = None, n: int = 4, symmetric: bool = False, thresholds: int = _THRESHOLDS
) -> STBLevels:
    """Binarise ``weight`` ``(out, in)``, keeping ``n`` of every 8 inputs.

    norms: ``(in,)``, the norms of the layer's inputs, which weigh what is kept; 1 by default. symmetric: no means.
    thresholds: how many ``p`` are tried per block.

    Raises:
        ValueError: ``weight`` is not a finite matrix, ``n`` is not in 1..7, or ``norms`` does not fit.
    """
    if weight.ndim != 2 or 0 in weight.shape or not bool(torch.isfinite(weight).all()):
        raise ValueError(f"weight must be a finite matrix without empty dimensions, got shape {tuple(weight.shape)}")
    if not 1 <= n < GROUP:
        raise ValueError(f"n must be in 1..{GROUP - 1}, kept inputs of every {GROUP}, got {n}")
    rows, columns = weight.shape
    if norms is not None and norms.shape != (columns,):
        raise ValueError(f"norms must have shape ({columns},), got {tuple(norms.shape)}")
    padded = weight.new_zeros(rows, -(-columns // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:, :columns] = weight.detach()
    keep = _kept(_importance(padded, columns, norms), n)
    pieces = [
        _block(padded[:, left : left + BLOCK], keep[:, left : left + BLOCK], symmetric, thresholds)
        for left in range(0, padded.shape[1], BLOCK)
    ]
    level, mean, scale = zip(*pieces, strict=True)
    return STBLevels((rows, columns), n, torch.cat(level, 1), torch.stack(mean, 1), torch.stack(scale, 1))


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


def _block(weight: Tensor, keep: Tensor, symmetric: bool, thresholds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Level, mean and scale of one block, with the number of salient columns that gives the least error."""
    order = (weight * keep).square().sum(0).argsort(descending=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.inf
    for count in _SALIENT:
        salient = torch.zeros(BLOCK, dtype=torch.bool, device=weight.device)
        salient[order[:count]] = True
        found = _split(weight, keep, salient, symmetric, thresholds=1)
        error = _error(weight, *found)
        if error < least:
            least, best, chosen = error, found, salient
    assert best is not None
    fine = _split(weight, keep, chosen, symmetric, thresholds)
    return fine if _error(weight, *fine) <= least else best


def _error(weight: Tensor, level: Tensor, mean: Tensor, scale: Tensor) -> float:
    levels = STBLevels((weight.shape[0], BLOCK), 0, level, mean[:, None], scale[:, None])
    return float((levels.to_dense() - weight).double().square().sum())


def _split(
    weight: Tensor, keep: Tensor, salient: Tensor, symmetric: bool, thresholds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Binarise with given salient columns: the best of some thresholds for the others."""
    first_sign, first, first_mean, first_scale = _binarise(weight, keep & salient, symmetric)
    second_sign, _, second_mean, second_scale = _binarise(weight - first, keep & salient, symmetric)
    rest = keep & ~salient
    size = weight.abs()
    best, least = torch.zeros((), device=weight.device), torch.inf
    if bool(rest.any()):
        places = torch.linspace(0.1, 0.9, thresholds) if thresholds > 1 else torch.tensor([0.5])
        candidates = torch.quantile(size[rest][:: max(1, int(rest.sum()) // 100_000)], places.to(size))
        for p in candidates:
            error = sum(
                (torch.where(region, weight, 0) - _binarise(weight, region, symmetric)[1]).square().sum()
                for region in _regions(size, rest, p)
            )
            if error < least:
                least, best = float(error), p
    level = 7 * (keep & salient) + (keep & salient) * (first_sign.int() + 2 * second_sign.int())
    means, scales = [], []
    for number, region in enumerate(_regions(size, rest, best)):
        sign, _, mean, scale = _binarise(weight, region, symmetric)
        level += region * (1 + 2 * number + sign.int())
        means.append(mean)
        scales.append(scale)
    mean = torch.cat([*means, first_mean, second_mean], 1)
    scale = torch.cat([*scales, first_scale, second_scale], 1)
    return level.to(torch.uint8), _half(mean), _half(scale)


def _regions(size: Tensor, rest: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rest & (size < p), rest & (size >= p) & (size < 2 * p), rest & (size >= 2 * p)


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
