"""Binarise one layer by its inputs: N of every 8 kept by a score, errors made up for by later columns.

What STBLLM does to a layer (Dong et al., ICLR 2025), into the container of the room ``weights``. The pruned entries count
among the errors, so that pruning and binarising are compensated together. Baselines share the code: BiLLM-style
binarisation has one threshold and, without a pattern, no zeros (Huang et al., ICML 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.compress._scores import ria
from gossamer.compress._sparsegpt import inverse_factor
from gossamer.compress._statistics import LinearStatistics
from gossamer.weights import STBLevels, stb_quantize

GROUP = 8
STB_CODES = ("faithful", "lean", "code4")


def keep_n_of_8(scores: Tensor, n: int) -> Tensor:
    """Keep the ``n`` highest of every 8 consecutive inputs; the last group may be shorter and keeps at most ``n``.

    >>> keep_n_of_8(torch.tensor([[1.0, 5.0, 3.0]]), 2)
    tensor([[False,  True,  True]])
    """
    missing = -scores.shape[1] % GROUP
    groups = torch.nn.functional.pad(scores.float(), (0, missing), value=-torch.inf).view(-1, GROUP)
    lowest = torch.argsort(groups, dim=1, stable=True)[:, : GROUP - n]
    keep = torch.ones_like(groups, dtype=torch.bool).scatter_(1, lowest, False)
    return keep.view(scores.shape[0], -1)[:, : scores.shape[1]].contiguous()


def binarise(
    weight: Tensor,
    statistics: LinearStatistics,
    n: int = 4,
    scores: Tensor | None = None,
    symmetric: bool = False,
    regions: int = 3,
    compensate: bool = True,
) -> STBLevels:
    """Binarise ``weight`` ``(out, in)`` on the CPU, keeping ``n`` of every 8 inputs; all of them at ``n = 8``.

    Args:
        statistics: of the layer's inputs, with a Hessian if ``compensate``.
        scores: ``(out, in)``, what ranks the weights; by default relative importance and activations, as STBLLM has it.
        symmetric: no means, for the code "lean".
        regions: 3, or 2 for one threshold.
        compensate: let later columns make up for the errors of earlier ones.

    Raises:
        ValueError: no Hessian where one is needed, or ``n`` is not in 1..8.

    >>> statistics = LinearStatistics(16, hessian=True)
    >>> statistics.update(torch.randn(64, 16))
    >>> (binarise(torch.randn(4, 16), statistics, n=4).to_dense() != 0).view(-1, 8).sum(1).tolist()
    [4, 4, 4, 4, 4, 4, 4, 4]
    """
    if not 1 <= n <= GROUP:
        raise ValueError(f"n must be in 1..{GROUP}, got {n}")
    if compensate and statistics.hessian is None:
        raise ValueError("compensation needs statistics with a Hessian: calibrate(..., hessian=True)")
    weight = weight.detach().float().clone(memory_format=torch.contiguous_format)
    keep = keep_n_of_8(ria(weight, statistics) if scores is None else scores, n)
    factor = None
    if compensate:
        assert statistics.hessian is not None
        weight[:, statistics.hessian.diagonal() == 0] = 0.0
        factor = inverse_factor(statistics.hessian)
    return stb_quantize(weight, n=n, symmetric=symmetric, keep=keep, factor=factor, regions=regions)


def sign_times_scale(weight: Tensor, n: int = 4) -> Tensor:
    """The plainest baseline, float32: the ``n`` largest of every 8 as sign times their row's mean magnitude."""
    size = weight.detach().float().abs()
    keep = keep_n_of_8(size, n)
    scale = (size * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True).clamp_min(1)
    return torch.where(keep, weight.float().sign() * scale, 0.0)


def flip_signs(weight: Tensor, share: float, scores: Tensor | None = None, seed: int = 0) -> Tensor:
    """``weight`` with the signs of a ``share`` of its entries flipped: those of least ``scores``, or random ones.

    The experiment that motivates binarising on a structure: a model survives many flips of unimportant signs.
    """
    count = int(weight.numel() * share)
    if scores is None:
        order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    else:
        order = torch.argsort(scores.flatten(), stable=True)
    flipped = weight.detach().clone().flatten()
    flipped[order[:count]] *= -1
    return flipped.view(weight.shape)
