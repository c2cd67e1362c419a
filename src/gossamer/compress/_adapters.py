"""Many low-rank adapters of one layer in two products, however many there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AdapterBank(nn.Module):
    """Any number of low-rank adapters of one layer as two products.

    Args:
        adapters: ``(A, B, scale)`` each, ``A (rank, in)`` and ``B (out, rank)``; ranks may differ.

    Raises:
        ValueError: there are none, or their shapes do not fit each other.

    >>> bank = AdapterBank([(torch.ones(1, 2), torch.ones(3, 1), 0.5), (torch.ones(2, 2), torch.ones(3, 2), 1.0)])
    >>> bank(torch.ones(1, 2)), bank(torch.ones(1, 2), torch.tensor([0]))
    (tensor([[5., 5., 5.]]), tensor([[1., 1., 1.]]))
    """

    first: Tensor
    second: Tensor
    owner: Tensor

    def __init__(self, adapters: Sequence[tuple[Tensor, Tensor, float]]) -> None:
        super().__init__()
        if not adapters:
            raise ValueError("an adapter bank needs at least one adapter")
        for a, b, _ in adapters:
            if (
                a.shape[1] != adapters[0][0].shape[1]
                or b.shape[0] != adapters[0][1].shape[0]
                or a.shape[0] != b.shape[1]
            ):
                raise ValueError(f"adapters must be (rank, in) and (out, rank), got {tuple(a.shape)}, {tuple(b.shape)}")
        self.register_buffer("first", torch.cat([a.detach() for a, _, _ in adapters]).t().contiguous())
        self.register_buffer("second", torch.cat([b.detach() * scale for _, b, scale in adapters], 1).t().contiguous())
        ranks = torch.tensor([len(a) for a, _, _ in adapters], device=adapters[0][0].device)
        self.register_buffer("owner", torch.repeat_interleave(torch.arange(len(adapters), device=ranks.device), ranks))

    def forward(self, x: Tensor, choice: Tensor | None = None) -> Tensor:
        """All adapters on ``x`` ``(..., in)``, summed; with ``choice`` ``(...)`` int64 one per token, -1 for none."""
        inner = x @ self.first
        if choice is not None:
            inner = inner * (choice[..., None] == self.owner)
        return inner @ self.second
