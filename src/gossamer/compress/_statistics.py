"""What calibration remembers of the inputs of one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor


class LinearStatistics:
    """Running sums over all inputs ``x`` of one linear layer with ``in_features`` inputs.

    tokens: number of input rows seen.
    sum_of_squares, sum_of_magnitudes, sum: ``(in,)`` float64, column sums of x², |x| and x.
    hessian: ``(in, in)`` float32, ``2/tokens · XᵀX``, the Hessian of the layer's squared output error, or None.

    >>> statistics = LinearStatistics(2, hessian=True)
    >>> statistics.update(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    >>> statistics.tokens, statistics.second_moment.tolist(), statistics.mean.tolist()
    (2, [5.0, 2.0], [2.0, 1.0])
    >>> statistics.hessian
    tensor([[10.,  6.],
            [ 6.,  4.]])
    """

    def __init__(self, in_features: int, hessian: bool = False) -> None:
        self.tokens = 0
        self.sum_of_squares = torch.zeros(in_features, dtype=torch.float64)
        self.sum_of_magnitudes = torch.zeros(in_features, dtype=torch.float64)
        self.sum = torch.zeros(in_features, dtype=torch.float64)
        self.hessian = torch.zeros(in_features, in_features) if hessian else None

    def update(self, x: Tensor) -> None:
        """Add the rows of ``x`` ``(..., in)``: summed in float32 within one call, in float64 across calls."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if len(rows) == 0:
            return
        self._move_to(rows.device)
        before, self.tokens = self.tokens, self.tokens + len(rows)
        self.sum_of_squares += rows.square().sum(0)
        self.sum_of_magnitudes += rows.abs().sum(0)
        self.sum += rows.sum(0)
        if self.hessian is not None:
            self.hessian.mul_(before / self.tokens).addmm_(rows.t(), rows, alpha=2.0 / self.tokens)

    def _move_to(self, device: torch.device) -> None:
        """Sums live where the inputs are."""
        if self.sum.device == device:
            return
        self.sum_of_squares, self.sum_of_magnitudes, self.sum = (
            sums.to(device) for sums in (self.sum_of_squares, self.sum_of_magnitudes, self.sum)
        )
        if self.hessian is not None:
            self.hessian = self.hessian.to(device)

    @property
    def second_moment(self) -> Tensor:
        """E x² of every input, ``(in,)`` float64."""
        return self.sum_of_squares / max(self.tokens, 1)

    @property
    def mean_magnitude(self) -> Tensor:
        """E |x| of every input, ``(in,)`` float64."""
        return self.sum_of_magnitudes / max(self.tokens, 1)

    @property
    def mean(self) -> Tensor:
        """E x of every input, ``(in,)`` float64."""
        return self.sum / max(self.tokens, 1)

    @property
    def variance(self) -> Tensor:
        """E (x - E x)² of every input, ``(in,)`` float64."""
        return (self.second_moment - self.mean.square()).clamp_min(0.0)
