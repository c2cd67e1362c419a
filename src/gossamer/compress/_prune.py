"""Prune one weight matrix as the settings say, and say how much of the layer's output that changes."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.compress._gradients import GradientStatistics
from gossamer.compress._masks import keep_n_of_m, keep_per_row
from gossamer.compress._scores import score_named
from gossamer.compress._settings import Settings
from gossamer.compress._sparsegpt import sparsegpt
from gossamer.compress._statistics import LinearStatistics
from gossamer.weights import NMPattern, nm_mask


def prune(
    weight: Tensor, statistics: LinearStatistics, settings: Settings, gradients: GradientStatistics | None = None
) -> Tensor:
    """``weight`` ``(out, in)`` with zeros, contiguous, in its own dtype; SparseGPT also corrects what is kept.

    Raises:
        ValueError: the pattern does not divide the inputs, or statistics are missing that the score needs.
    """
    if settings.score == "sparsegpt":
        hessian = _hessian(statistics, "score 'sparsegpt'")
        return sparsegpt(weight, hessian, settings.sparsity, settings.n_of_m).to(weight.dtype)
    scores = scores_of(weight, statistics, settings, gradients)
    pattern = settings.n_of_m
    if pattern is None:
        keep = keep_per_row(scores, settings.sparsity)
    elif settings.format == "nm":
        keep = nm_mask(scores, NMPattern(*pattern))
    else:
        keep = keep_n_of_m(scores, *pattern)
    if settings.update:
        return sparsegpt(weight, _hessian(statistics, "update"), keep=keep).to(weight.dtype)
    return torch.where(keep, weight, torch.zeros_like(weight)).contiguous()


def _hessian(statistics: LinearStatistics, what: str) -> Tensor:
    if statistics.hessian is None:
        raise ValueError(f"{what} needs statistics with a Hessian: calibrate(..., hessian=True)")
    return statistics.hessian


def scores_of(
    weight: Tensor, statistics: LinearStatistics, settings: Settings, gradients: GradientStatistics | None
) -> Tensor:
    """Importance ``(out, in)`` by the score or formula of ``settings``."""
    metric = settings.metric
    return metric(weight, statistics, gradients) if metric else score_named(settings.score)(weight, statistics)


def relative_output_error(original: Tensor, compressed: Tensor, statistics: LinearStatistics) -> float:
    """Root of the share of the layer's output energy that is lost: ``||X (W - V)ᵀ|| / ||X Wᵀ||``, 0 if there is none.

    Exact where the statistics have a Hessian; otherwise from ``E x²`` alone, which takes the inputs as uncorrelated.
    """
    return (_energy(original - compressed, statistics) / max(_energy(original, statistics), 1e-30)) ** 0.5


def _energy(weight: Tensor, statistics: LinearStatistics) -> float:
    """``E ||x Wᵀ||²``, up to a factor that is the same for all weights."""
    weight = weight.float()
    if statistics.hessian is not None:
        return float((weight @ statistics.hessian * weight).sum().clamp_min(0.0))
    return float((weight.square() @ statistics.second_moment.float()).sum())
