"""How much to prune where: sparsity per block, computed from per-block scores, with the exact total.

An allocation maps what calibration knows of each block to the block's density. Published rules are functions of one vector
per block, the element-wise pruning scores of all its weights: OWL counts outliers in it (Yin et al., ICML 2024), DSA
searches for the function (Li et al., "Discovering Sparsity Allocation", NeurIPS 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from gossamer.compress._workbench import BenchLayer, Workbench

OWL_OUTLIER, OWL_SPREAD = 5.0, 0.08

Source = Callable[[BenchLayer], Tensor]


def _wanda(layer: BenchLayer) -> Tensor:
    return layer.weight.abs() * layer.statistics.second_moment.sqrt().float()


def _fisher(layer: BenchLayer) -> Tensor:
    if layer.gradients is None:
        raise ValueError("source 'fisher' needs a workbench with gradients")
    return layer.weight.square() * layer.gradients.fisher


SOURCES: Mapping[str, Source] = MappingProxyType(
    {"wanda": _wanda, "magnitude": lambda layer: layer.weight.abs(), "fisher": _fisher}
)
"""Element-wise scores whose distribution inside a block is looked at."""


def block_vector(bed: Workbench, block: int, source: str) -> Tensor:
    """Scores of all weights of one block, ``(weights,)`` float32, a new tensor.

    Raises:
        ValueError: unknown ``source``.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    return torch.cat([SOURCES[source](layer).flatten() for layer in bed.layers if layer.block == block])


def spread_out(scores: Sequence[float], spread: float, direction: int = 1) -> list[float]:
    """Offsets of density from ``scores``: scaled to a range of ``2 * spread``, mean zero.

    direction: +1 prunes blocks with larger scores more, -1 less. Equal scores give no offsets.

    >>> spread_out([1.0, 2.0, 3.0], 0.08)
    [0.08, 0.0, -0.08]
    """
    low, high = min(scores), max(scores)
    if high == low:
        return [0.0] * len(scores)
    share = [(score - low) / (high - low) for score in scores]
    flipped = [1 - value if direction > 0 else value for value in share]
    mean = sum(flipped) / len(flipped)
    return [2 * spread * (value - mean) for value in flipped]


def uniform(blocks: int) -> list[float]:
    """No offsets."""
    return [0.0] * blocks


def line(blocks: int, slope: float = OWL_SPREAD) -> list[float]:
    """Offsets of a straight line from ``+slope`` in the first block to ``-slope`` in the last: early blocks stay denser.

    >>> line(3)
    [0.08, 0.0, -0.08]
    """
    return [slope * (1 - 2 * block / max(blocks - 1, 1)) for block in range(blocks)]


def half_cosine(blocks: int, spread: float = OWL_SPREAD, shift: float = 0.2) -> list[float]:
    """Offsets along half a cosine, dense first; ``shift`` moves its middle towards later blocks, as a share of depth."""
    raw = [math.cos(math.pi * min(max(block / max(blocks - 1, 1) - shift, 0.0), 1.0)) for block in range(blocks)]
    return spread_out(raw, spread, direction=-1)


def protected_ends(blocks: int, sparsity: float, least: float = 0.2) -> list[float]:
    """Offsets that prune the first and the last block to ``least`` only."""
    ends = {0, blocks - 1}
    return [max(sparsity - least, 0.0) if block in ends else 0.0 for block in range(blocks)]


def outlier_share(vector: Tensor, times: float = OWL_OUTLIER) -> float:
    """Per cent of ``vector`` above ``times`` its mean (Yin et al., ICML 2024)."""
    return 100.0 * float((vector > times * vector.mean()).double().mean())


def owl(bed: Workbench, spread: float = OWL_SPREAD, times: float = OWL_OUTLIER) -> list[float]:
    """OWL's offsets: blocks with more outliers among their Wanda scores stay denser."""
    shares = [outlier_share(block_vector(bed, block, "wanda"), times) for block in range(len(bed.blocks))]
    return spread_out(shares, spread, direction=-1)
