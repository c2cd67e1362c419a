"""How important each weight of a linear layer is: the formulas, by name.

A score takes the weight ``(out, in)`` and the statistics of the layer's inputs and returns ``(out, in)`` float32,
higher being more important. Which of them are pruned is the business of the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from gossamer.compress._statistics import LinearStatistics

Score = Callable[[Tensor, LinearStatistics], Tensor]

RIA_POWER = 0.5


def magnitude(weight: Tensor, statistics: LinearStatistics) -> Tensor:
    """``|W|`` (Han et al., NeurIPS 2015). The inputs play no part."""
    return weight.float().abs()


def wanda(weight: Tensor, statistics: LinearStatistics) -> Tensor:
    """``|W| · sqrt(E x²)``: weight times the size of its input (Sun et al., ICLR 2024)."""
    return weight.float().abs() * _input_size(statistics)


def ria(weight: Tensor, statistics: LinearStatistics) -> Tensor:
    """``(|W| / row sum + |W| / column sum) · sqrt(E x²)^0.5``: relative importance times activations.

    Rows or columns of zeros score zero (Zhang et al., ICLR 2024).
    """
    size = weight.float().abs()
    tiny = 1e-30
    relative = size / size.sum(1, keepdim=True).clamp_min(tiny) + size / size.sum(0, keepdim=True).clamp_min(tiny)
    return relative * _input_size(statistics) ** RIA_POWER


SCORES: Mapping[str, Score] = MappingProxyType({"magnitude": magnitude, "wanda": wanda, "ria": ria})
"""All scores by the name under which settings and command line know them."""


def score_named(name: str) -> Score:
    """The score called ``name``.

    Raises:
        ValueError: there is none.

    >>> score_named("wanda") is wanda
    True
    """
    if name not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {name!r}")
    return SCORES[name]


def _input_size(statistics: LinearStatistics) -> Tensor:
    """``sqrt(E x²)`` of every input, ``(in,)`` float32."""
    return statistics.second_moment.sqrt().float()
