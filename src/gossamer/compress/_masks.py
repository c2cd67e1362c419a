"""Which weights to keep: exact counts and stable ties.

Every function takes scores ``(out, in)``, higher is more important, and returns a bool tensor of that shape that is
True where the weight is kept. Of equal scores the earlier position is pruned first, so that the number of zeros is
exact even where quantised weights repeat; a threshold would not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.compress._select import keep_highest


def keep_per_row(scores: Tensor, sparsity: float) -> Tensor:
    """Prune the ``int(in * sparsity)`` lowest scores of every row (rounded down).

    Raises:
        ValueError: ``scores`` is not 2-D, or ``sparsity`` is outside [0, 1].

    >>> keep_per_row(torch.tensor([[3.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 0.5)
    tensor([[ True, False, False,  True],
            [False, False,  True,  True]])
    """
    _check(scores, sparsity)
    return _keep_all_but(scores, int(scores.shape[1] * sparsity))


def keep_per_layer(scores: Tensor, sparsity: float) -> Tensor:
    """Prune the ``int(out * in * sparsity)`` lowest scores of the whole matrix (rounded down; ties in row-major order).

    Raises:
        ValueError: ``scores`` is not 2-D, or ``sparsity`` is outside [0, 1].
    """
    _check(scores, sparsity)
    return _keep_all_but(scores.reshape(1, -1), int(scores.numel() * sparsity)).view(scores.shape)


def keep_n_of_m(scores: Tensor, n: int, m: int) -> Tensor:
    """Keep the ``n`` highest scores among every ``m`` consecutive inputs.

    Raises:
        ValueError: ``scores`` is not 2-D, not 0 < n <= m, or ``m`` does not divide the number of inputs.

    >>> keep_n_of_m(torch.tensor([[3.0, 1.0, 1.0, 2.0]]), 2, 4)
    tensor([[ True, False, False,  True]])
    """
    _check(scores, 0.0)
    if not 0 < n <= m:
        raise ValueError(f"pattern N:M needs 0 < N <= M, got {n}:{m}")
    check_divides(scores.shape[1], n, m)
    return _keep_all_but(scores.reshape(-1, m), m - n).view(scores.shape)


def check_divides(in_features: int, n: int, m: int) -> None:
    """Refuse a pattern N:M whose M does not divide ``in_features``, and say which ones would."""
    if in_features % m:
        fitting = [width for width in range(2, 65) if in_features % width == 0]
        raise ValueError(
            f"pattern {n}:{m} needs the input features to be a multiple of {m}, got {in_features}; choose M among "
            f"{', '.join(map(str, fitting)) or 'its divisors'}, or give a sparsity instead"
        )


def _keep_all_but(scores: Tensor, pruned: int) -> Tensor:
    """Per row, True for all but the ``pruned`` lowest."""
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return keep_highest(scores, pruned)
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    lowest = torch.argsort(scores, dim=1, stable=True)[:, :pruned]
    return keep.scatter_(1, lowest, False)


def _check(scores: Tensor, sparsity: float) -> None:
    if scores.ndim != 2:
        raise ValueError(f"scores must be 2-D (out, in), got shape {tuple(scores.shape)}")
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")
