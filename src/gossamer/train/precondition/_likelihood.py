"""The distribution that a model's output stands for: what the Fisher information is an expectation over.

A **prediction** is one row of outputs; a batch of n sequences of T tokens makes n T predictions. Losses are means over
predictions of the negative log-likelihood, and so is the Fisher matrix:
``F = mean over predictions of E_y[grad log p(y) grad log p(y)^T]``, with y from the model's own distribution.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


class Likelihood(ABC):
    """Gradients of the negative log-likelihood with respect to outputs of shape ``(batch, ..., outputs)``."""

    @abstractmethod
    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """The gradient at labels drawn from the model, independently for every prediction; shaped like ``output``."""

    @abstractmethod
    def factors(self, output: Tensor) -> Iterator[Tensor]:
        """Vectors per prediction, ``(predictions, outputs)`` each, whose outer products add up to its Fisher matrix."""

    def exact(self, output: Tensor) -> Iterator[Tensor]:
        """Output gradients, shaped like ``output``, whose outer products add up to the Fisher matrix of each example.

        One per factor and per prediction of an example: predictions of one example must not meet in one backward pass.
        """
        batch, outputs = output.shape[0], output.shape[-1]
        positions = output.numel() // (batch * outputs)
        for factor in self.factors(output.reshape(-1, outputs)):
            for position in range(positions):
                gradient = torch.zeros_like(output).view(batch, positions, outputs)
                gradient[:, position] = factor.view(batch, positions, outputs)[:, position]
                yield gradient.view(output.shape)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Class probabilities ``softmax(output)``: the cross-entropy loss.

    >>> output = torch.tensor([[0.0, 1.0]])
    >>> fisher = sum(g.T @ g for g in Categorical().exact(output))
    >>> p = output.softmax(1)[0]
    >>> torch.allclose(fisher, torch.diag(p) - torch.outer(p, p))
    True
    """

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``p - onehot(y)`` with y drawn from p."""
        p = output.softmax(-1)
        rows = p.reshape(-1, p.shape[-1])
        # The smallest of exponential waiting times at rates p: as torch.multinomial, without its limits on dtypes.
        waiting = torch.empty_like(rows).exponential_(generator=generator)
        labels = (rows / waiting).argmax(-1, keepdim=True)
        return rows.scatter_add(-1, labels, rows.new_full(labels.shape, -1.0)).view(output.shape)

    def factors(self, output: Tensor) -> Iterator[Tensor]:
        """``sqrt(p_c) (p - e_c)`` for every class c."""
        p = output.softmax(-1)
        for c in range(p.shape[-1]):
            factor = p.clone()
            factor[:, c] -= 1.0
            yield factor * p[:, c : c + 1].sqrt()


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no per output with probability ``sigmoid(output)``: the binary cross-entropy, summed over outputs."""

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``p - y`` with y drawn from p."""
        p = output.sigmoid()
        return p - (torch.rand(p.shape, generator=generator, dtype=p.dtype, device=p.device) < p).to(p.dtype)

    def factors(self, output: Tensor) -> Iterator[Tensor]:
        """``sqrt(p (1 - p)) e_c`` for every output c."""
        p = output.sigmoid()
        yield from _unit_rows((p * (1 - p)).sqrt())


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Normal around the output: the loss ``sum over outputs of (output - y)**2 / (2 variance)``.

    ``torch.nn.MSELoss()`` on ``(batch, c)`` is this with ``variance = c / 2``.
    """

    variance: float = 1.0

    def sample(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``noise / sqrt(variance)``."""
        noise = torch.empty_like(output).normal_(generator=generator)
        return noise / math.sqrt(self.variance)

    def factors(self, output: Tensor) -> Iterator[Tensor]:
        """``e_c / sqrt(variance)`` for every output c."""
        yield from _unit_rows(torch.full_like(output, 1 / math.sqrt(self.variance)))


def _unit_rows(values: Tensor) -> Iterator[Tensor]:
    for c in range(values.shape[-1]):
        factor = torch.zeros_like(values)
        factor[:, c] = values[:, c]
        yield factor
