"""The matrix products of a decode step, each bound to its vectors beforehand.

What a layer's weight is decides how it is multiplied: a compressed one by its format's kernel, a dense one by our own
dense kernel or, so that a comparison in the same loop is possible, by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gossamer.weights import CompressedLinear, DenseWeight

Dense = Literal["gossamer", "torch-bf16", "torch-fp32"]
DENSE = get_args(Dense)
Call = Callable[[], object]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
Layer = Any
"""A module with the attributes of its kind; where a matrix is meant, an ``nn.Linear`` or a ``CompressedLinear``."""


def bind_matrix(layer: Layer, x: np.ndarray, out: np.ndarray, threads: int, dense: Dense) -> Call:
    """A call that writes ``layer.weight @ x`` into ``out``, without the bias.

    x: float32 ``(in,)``; out: float32 ``(out,)``; both stay in use. ``dense`` matters only to an ``nn.Linear``.
    """
    if isinstance(layer, CompressedLinear):
        return partial(layer.weight_format.bind(threads), x, out)
    weight = layer.weight.detach()
    if dense == "gossamer":
        return partial(_in_place(weight).bind(threads), x, out)
    if dense == "torch-fp32":
        return partial(torch.mv, weight.float(), torch.from_numpy(x), out=torch.from_numpy(out))
    return _bfloat16_product(weight.bfloat16(), torch.from_numpy(x), torch.from_numpy(out))


def _in_place(weight: Tensor) -> DenseWeight:
    """A dense format over the memory of ``weight``."""
    bits = weight.contiguous().view(BITS[weight.dtype]).flatten()
    return DenseWeight.from_arrays({"values": bits}, (weight.shape[0], weight.shape[1]), weight.dtype, {})


def _bfloat16_product(weight: Tensor, x: Tensor, out: Tensor) -> Call:
    rounded = torch.empty(x.shape, dtype=torch.bfloat16)
    product = torch.empty(out.shape, dtype=torch.bfloat16)

    def multiply() -> None:
        rounded.copy_(x)
        torch.mv(weight, rounded, out=product)
        out.copy_(product)

    return multiply


def float_matrix(layer: Layer) -> Tensor:
    """The dense ``(out, in)`` weight of ``layer`` in float32: a scratch panel, unless the layer holds just that."""
    weight = layer.weight_format.to_dense() if isinstance(layer, CompressedLinear) else layer.weight.detach()
    return weight.float()


def joint_bias(layers: list[Layer]) -> np.ndarray:
    """The biases of ``layers`` one behind the other in float32; of size 0 where none has one."""
    if all(layer.bias is None for layer in layers):
        return np.empty(0, np.float32)
    return torch.cat([_bias_or_zeros(layer) for layer in layers]).numpy()


def _bias_or_zeros(layer: Layer) -> Tensor:
    return torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()
