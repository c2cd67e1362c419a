"""Vector-wise N:M patterns: which weights of a matrix to keep.

In every window of ``m`` consecutive inputs and every group of ``vector`` consecutive outputs, the same ``n`` inputs
are kept (Ma et al., "NM-SpMM", IPDPS 2025). It is not the element-wise N:M of sparse tensor cores: one position is
stored for ``vector`` weights, and a product needs no decoding.

A last window that reaches beyond the matrix holds imaginary inputs, which are kept last; where it has fewer than
``n`` real ones, it keeps some of them, with weight 0. A last group of outputs may be narrower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

VECTORS = (32, 64, 128)
MOST_INPUTS = 256
_LARGEST = 1e300


@dataclass(frozen=True)
class NMPattern:
    """Keep ``n`` of every ``m`` consecutive inputs, alike for ``vector`` consecutive outputs.

    Raises:
        ValueError: not 1 <= n <= m <= 256, or ``vector`` is not 32, 64 or 128.

    >>> NMPattern(2, 32).density
    0.0625
    """

    n: int
    m: int
    vector: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m <= MOST_INPUTS:
            raise ValueError(f"pattern N:M needs 1 <= N <= M <= {MOST_INPUTS}, got {self.n}:{self.m}")
        if self.vector not in VECTORS:
            raise ValueError(f"vector must be one of {', '.join(map(str, VECTORS))}, got {self.vector}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """A pattern from "N:M" or "N:M:VECTOR".

        >>> NMPattern.parse("4:16:64")
        NMPattern(n=4, m=16, vector=64)
        """
        parts = text.split(":")
        if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
            raise ValueError(f"pattern must be N:M or N:M:VECTOR, like 8:32 or 8:32:64, got {text!r}")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        """``N:M:VECTOR``, as :meth:`parse` reads it."""
        return f"{self.n}:{self.m}:{self.vector}"

    @property
    def density(self) -> float:
        """Share of weights that are kept."""
        return self.n / self.m

    def windows(self, in_features: int) -> int:
        """Windows that cover ``in_features`` inputs."""
        return -(-in_features // self.m)

    def kept(self, in_features: int) -> int:
        """Inputs that are kept for every group: ``n`` a window."""
        return self.windows(in_features) * self.n

    def groups(self, out_features: int) -> int:
        """Groups that cover ``out_features`` outputs."""
        return -(-out_features // self.vector)


def nm_mask(scores: Tensor, pattern: NMPattern) -> Tensor:
    """Bool ``(out, in)``, True where a weight is kept: the ``n`` highest sums of scores in each window and group.

    scores: ``(out, in)``, finite, higher is more important, like ``|W| * norm(x)``. Of equal sums the earlier input is
    pruned first.

    Raises:
        ValueError: ``scores`` is not a matrix, or not finite.

    >>> nm_mask(torch.tensor([[3.0, 1.0, 2.0, 2.0, 5.0, 0.0]]), NMPattern(2, 4)).int()
    tensor([[1, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    out_features, in_features = _check_scores(scores)
    kept = kept_inputs(scores, pattern)
    mask = torch.zeros(kept.shape[0], pattern.windows(in_features) * pattern.m, dtype=torch.bool, device=scores.device)
    mask.scatter_(1, kept, True)
    return mask.repeat_interleave(pattern.vector, 0)[:out_features, :in_features]


def nm_prune(weight: Tensor, pattern: NMPattern, scores: Tensor | None = None) -> Tensor:
    """``weight`` ``(out, in)`` with zeros where ``pattern`` keeps nothing; the scores are ``|weight|`` by default.

    Raises:
        ValueError: ``scores`` has another shape or is not finite.

    >>> nm_prune(torch.tensor([[3.0, -4.0], [1.0, -1.0]]), NMPattern(1, 2))
    tensor([[ 0., -4.],
            [ 0., -1.]])
    """
    scores = magnitudes(weight) if scores is None else scores
    if scores.shape != weight.shape:
        raise ValueError(f"scores must have the shape of weight, {tuple(weight.shape)}, got {tuple(scores.shape)}")
    return torch.where(nm_mask(scores, pattern), weight, torch.zeros_like(weight))


def kept_inputs(scores: Tensor, pattern: NMPattern) -> Tensor:
    """The inputs that each group keeps, ascending: int64 ``(groups, kept)``."""
    out_features, in_features = _check_scores(scores)
    groups, windows = pattern.groups(out_features), pattern.windows(in_features)
    sums = scores.new_zeros(groups, windows * pattern.m, dtype=torch.float64)
    group_of = torch.arange(out_features, device=scores.device) // pattern.vector
    sums[:, :in_features].index_add_(0, group_of, scores.to(torch.float64))
    sums[:, in_features:] = -torch.inf
    ranked = torch.argsort(sums.view(groups, windows, pattern.m), dim=2, stable=True)
    chosen = ranked[:, :, pattern.m - pattern.n :].sort(dim=2).values
    starts = pattern.m * torch.arange(windows, device=scores.device)
    return (chosen + starts[:, None]).reshape(groups, -1)


def magnitudes(weight: Tensor) -> Tensor:
    """``|weight|`` as finite float64: NaN and infinities count as the most important."""
    return torch.nan_to_num(weight.detach().to(torch.float64).abs(), nan=_LARGEST, posinf=_LARGEST)


def _check_scores(scores: Tensor) -> tuple[int, int]:
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"scores must be a matrix (out, in) without empty dimensions, got shape {tuple(scores.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores must be finite, got NaN or infinities among them")
    return scores.shape[0], scores.shape[1]
