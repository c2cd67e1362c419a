"""What a rank has not sent yet, by parameter.

Groups of parameters come and go (DDP rebuilds its buckets after the first step, plans change), so the truth is one
float32 tensor a parameter; a group that stays works on one flat tensor of which those are views, without copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Residuals:
    """Residual gradients of one rank, keyed by the parameter's name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tensor] = {}
        self._flat: dict[tuple[str, ...], Tensor] = {}

    def flat(self, names: Sequence[str], sizes: Sequence[int], device: torch.device) -> Tensor:
        """The residuals of a group, one after another, as a tensor that may be written to.

        Raises:
            ValueError: a parameter's size is another than before.
        """
        key = tuple(names)
        known = self._flat.get(key)
        if known is not None and known.device == device and known.numel() == sum(sizes):
            return known
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        for name, part in zip(names, flat.split(list(sizes)), strict=True):
            before = self._by_name.get(name)
            if before is not None:
                if before.numel() != part.numel():
                    raise ValueError(f"parameter {name!r} has {part.numel()} entries, its residual {before.numel()}")
                part.copy_(before)
            self._by_name[name] = part
        taken = set(names)
        self._flat = {other: tensor for other, tensor in self._flat.items() if not taken & set(other)}
        self._flat[key] = flat
        return flat

    def state(self) -> dict[str, Tensor]:
        """Copies of all residuals."""
        return {name: tensor.clone() for name, tensor in self._by_name.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals."""
        self._flat.clear()
        self._by_name = {name: tensor.detach().float().reshape(-1).clone() for name, tensor in state.items()}
