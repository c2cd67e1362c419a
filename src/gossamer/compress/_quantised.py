"""What a user would pick instead of pruning: weights rounded to 8 bits by row and to 4 bits by group.

torchao does it where it is installed; without it the same grids are rounded to nearest here, which torchao's defaults do
too, so that a front never lacks these points. They are comparisons: no folder of ours is made of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 32
Call = Callable[[], object]


@dataclass(frozen=True)
class Quantised:
    """One way to quantise a matrix ``(out, in)``.

    weight: what is stored, dense and float32. bits: of one entry, scales and zero points included, 4-bit entries packed
    (torchao keeps them in 8 bits on the CPU). multiply: a call that multiplies one token by the stored matrix, None where
    there is no kernel.
    """

    name: str
    weight: Callable[[Tensor], Tensor]
    bits: Callable[[Tensor], float]
    multiply: Callable[[Tensor], Call] | None = None


def quantised_ways() -> list[Quantised]:
    """By torchao if it is installed, else by rounding to nearest."""
    if importlib.util.find_spec("torchao") is None:
        return [
            Quantised("int8 rows, rounded", _int8, _row_bits),
            Quantised(f"int4 groups of {GROUP}, rounded", _int4, lambda weight: 4 + 16 / GROUP + 4 / GROUP),
        ]
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    four: Any = torch.int4  # type: ignore[attr-defined]  # torch has it, its stubs do not
    grid = {"weight_dtype": four, "granularity": PerGroup(GROUP)}
    asymmetric = partial(IntxWeightOnlyConfig, mapping_type=MappingType.ASYMMETRIC, **grid)
    searched = partial(IntxWeightOnlyConfig, intx_choose_qparams_algorithm="hqq_scale_only", **grid)
    return [
        _by_torchao("int8 rows, torchao", Int8WeightOnlyConfig, _row_bits),
        _by_torchao(f"int4 groups of {GROUP}, torchao", asymmetric, lambda weight: 4 + 16 / GROUP + 4 / GROUP),
        _by_torchao(f"int4 groups of {GROUP}, torchao with HQQ", searched, lambda weight: 4 + 16 / GROUP),
    ]


def _by_torchao(name: str, config: Callable[[], Any], bits: Callable[[Tensor], float]) -> Quantised:
    """bfloat16 layers through ``quantize_``."""

    def quantised(weight: Tensor) -> nn.Linear:
        from torchao.quantization import quantize_

        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        quantize_(layer, config())
        return layer

    def dense(weight: Tensor) -> Tensor:
        stored: Any = quantised(weight).weight
        found: Tensor = stored.dequantize().float()
        return found

    def multiply(weight: Tensor) -> Call:
        return partial(quantised(weight), torch.ones(1, weight.shape[1], dtype=torch.bfloat16, device=weight.device))

    return Quantised(name, dense, bits, multiply)


def _row_bits(weight: Tensor) -> float:
    return 8 + 32 / weight.shape[1]


def _int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (weight / scale).round() * scale


def _int4(weight: Tensor) -> Tensor:
    """Sixteen levels between the least and the largest of every group of inputs."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    low, high = padded.amin(2, keepdim=True), padded.amax(2, keepdim=True)
    scale = (high - low).clamp_min(1e-12) / 15
    return (((padded - low) / scale).round() * scale + low).view(rows, -1)[:, :columns]
