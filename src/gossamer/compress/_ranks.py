"""Masks of every sparsity from one sort.

Masks that keep the highest scores of every row are nested: what is pruned at 50 % is pruned at 60 %. The rank of each
weight in its row therefore holds the masks of all sparsities, and an allocation is tried at the cost of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gossamer.compress._workbench import BenchLayer, Workbench


class RankedLayers:
    """Ranks of all weights of a workbench in their rows, two bytes a weight.

    scores: gives the scores ``(out, in)`` of a layer, higher is more important; equal ones rank by position.

    Raises:
        ValueError: a layer has more than 32767 inputs.
    """

    def __init__(
        self, bed: Workbench, scores: Callable[[BenchLayer], Tensor],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:  # fmt: skip
        self.bed = bed
        self.ranks = []
        for index, layer in enumerate(bed.layers):
            self.ranks.append(row_ranks(scores(layer)))
            progress(index + 1, len(bed.layers))

    def weights(self, pruned: Sequence[int]) -> Iterator[tuple[BenchLayer, Tensor]]:
        """Every layer with its ``pruned`` lowest of each row set to zero."""
        for layer, ranks, count in zip(self.bed.layers, self.ranks, pruned, strict=True):
            yield layer, layer.weight * (ranks >= count)

    def perplexity(self, pruned: Sequence[int], windows: Tensor) -> float:
        """Perplexity over ``windows`` with so many zeros per row of each layer."""
        return self.bed.perplexity(self.weights(pruned), windows)


def row_ranks(scores: Tensor) -> Tensor:
    """Place of every score in its row from the lowest, int16 ``(out, in)``.

    >>> row_ranks(torch.tensor([[3.0, 1.0, 2.0, 1.0]]))
    tensor([[3, 0, 2, 1]], dtype=torch.int16)
    """
    if scores.ndim != 2 or scores.shape[1] > 32767:
        raise ValueError(f"scores must be (out, in) with at most 32767 inputs, got {tuple(scores.shape)}")
    order = torch.argsort(scores, dim=1, stable=True)
    places = torch.arange(scores.shape[1], dtype=torch.int16, device=scores.device).expand(scores.shape)
    return torch.empty(scores.shape, dtype=torch.int16, device=scores.device).scatter_(1, order, places)
