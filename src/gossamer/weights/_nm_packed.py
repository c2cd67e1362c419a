"""The packing strategy of N:M products: which inputs a block of outputs needs at all.

A GPU block computes ``block`` outputs and walks through the inputs in steps of some windows. At high sparsity its
``block / vector`` groups together miss many inputs of a step; the list of those that any of them keeps, made once per
weight, lets the block load only these, and positions in the list take the place of positions in the window (Ma et
al., IPDPS 2025, "packing"). At low sparsity nearly all inputs are listed, and the plain form is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.weights._nm_pattern import MOST_INPUTS, NMPattern

if TYPE_CHECKING:
    from gossamer.weights._nm import NMWeight


@dataclass(frozen=True, eq=False)
class NMPacked:
    """Lists of inputs and positions in them, derived from an :class:`NMWeight`; ``values`` stay as they are.

    block, windows: outputs of a block, windows of a step.
    columns: int32 ``(blocks, steps, windows * m)``, the distinct inputs of a step that any group of the block keeps,
        ascending, then -1. Imaginary inputs of a last window (``in`` and above) are listed like others.
    count: int32 ``(blocks, steps)``, how many are listed.
    index: uint8 ``(blocks, steps, windows * n, block / vector)``, the position in that list of every kept input; 0
        beyond the last window and group.
    """

    block: int
    windows: int
    columns: Tensor
    count: Tensor
    index: Tensor

    @property
    def listed(self) -> float:
        """Share of inputs that are listed, over all blocks and steps: what a block loads."""
        return float(self.count.sum()) / self.columns.numel()


def nm_pack(weight: NMWeight, block: int, windows: int = 1) -> NMPacked:
    """The packed form of ``weight`` for blocks of ``block`` outputs and steps of ``windows`` windows.

    Raises:
        ValueError: ``block`` is no multiple of the vector, or a step has more than 256 inputs.

    >>> from gossamer.weights import NMWeight
    >>> packed = nm_pack(NMWeight.from_dense(torch.eye(64), "2:32"), block=64)
    >>> packed.columns.shape, packed.count.tolist()
    (torch.Size([1, 2, 32]), [[2, 2]])
    """
    pattern = weight.pattern
    width = windows * pattern.m
    if block < 1 or block % pattern.vector:
        raise ValueError(f"block must be a multiple of the vector, {pattern.vector}, got {block}")
    if windows < 1 or width > MOST_INPUTS:
        raise ValueError(f"a step must have 1 to {MOST_INPUTS // pattern.m} windows of {pattern.m}, got {windows}")
    steps = -(-pattern.windows(weight.shape[1]) // windows)
    across = block // pattern.vector
    blocks = -(-weight.groups // across)
    kept = windows * pattern.n
    places = weight.inputs.new_full((steps * kept, blocks * across), -1)
    places[: weight.kept, : weight.groups] = weight.inputs
    places = places.view(steps, kept, blocks, across).permute(2, 0, 1, 3).reshape(blocks, steps, -1)
    start = width * torch.arange(steps, device=places.device)[:, None]
    local = torch.where(places < 0, width, places - start)
    used = torch.zeros(blocks, steps, width + 1, dtype=torch.bool, device=places.device)
    used.scatter_(2, local, True)
    used[:, :, width] = False
    rank = used.cumsum(2) - 1
    index = torch.where(places < 0, 0, rank.gather(2, local)).to(torch.uint8)
    count = used.sum(2)
    inputs = torch.argsort(~used[:, :, :width], dim=2, stable=True) + start
    listed = torch.arange(width, device=places.device) < count[:, :, None]
    columns = torch.where(listed, inputs, -1).to(torch.int32)
    return NMPacked(block, windows, columns, count.to(torch.int32), index.view(blocks, steps, kept, across))


def expected_listed(pattern: NMPattern, block: int) -> float:
    """The share that is listed on average if the groups choose independently.

    >>> round(expected_listed(NMPattern(8, 32), 128), 2)
    0.68
    """
    return 1 - (1 - pattern.density) ** (block // pattern.vector)
