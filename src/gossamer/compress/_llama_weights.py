"""A LLaMA-like model as its matrices and sizes: what decoding needs of it, wherever they come from.

Matrices that read the same activations are one: queries, keys and values, and gate and up. A GPU then multiplies them in
one launch, as serving engines do. :func:`llama_weights` takes a model of transformers apart; anything else may build a
:class:`LlamaWeights` itself, transformers is not needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.weights import (
    CompressedLinear,
    FragmentBitmapWeight,
    FragmentLosslessWeight,
    FragmentSTBWeight,
    WeightFormat,
    describe,
    fragment_rows,
    stack_fragments,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Matrix = Tensor | WeightFormat
Layer = Any
Rotary = Callable[[int], tuple[Tensor, Tensor]]
"""Length -> cosines and sines of the positions below it, float32 ``(length, head_dim // 2)``."""

EVERYTHING = 2**31 - 1
"""The window of a block that sees all positions."""

_FRAGMENTS = (FragmentBitmapWeight, FragmentLosslessWeight, FragmentSTBWeight)


@dataclass(frozen=True, eq=False)
class Joint:
    """One or more ``(out, in)`` matrices that read the same activations; their outputs stand one behind the other."""

    parts: tuple[Matrix, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Tensor):
            return F.linear(x, self.parts[0], self.bias)
        products = [F.linear(x, part) if isinstance(part, Tensor) else part.linear(x) for part in self.parts]
        y = products[0] if len(products) == 1 else torch.cat(products, -1)
        return y if self.bias is None else y + self.bias

    @property
    def compressed(self) -> bool:
        """Whether any of the matrices is."""
        return not all(isinstance(part, Tensor) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, eq=False)
class LlamaBlock:
    """One block. Norms are weights ``(width,)``; those of queries and keys are there or not. window: positions it sees."""

    input_norm: Tensor
    qkv: Joint
    output: Joint
    middle_norm: Tensor
    gate_up: Joint
    down: Joint
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int = EVERYTHING

    @property
    def matrices(self) -> tuple[Joint, Joint, Joint, Joint]:
        """All four, in the order of their use."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, eq=False)
class LlamaWeights:
    """A whole model; activations have the dtype of ``embedding`` ``(vocabulary, hidden)``, all tensors its device."""

    heads: int
    key_heads: int
    head_dim: int
    epsilon: float
    scale: float
    embedding: Tensor
    blocks: Sequence[LlamaBlock]
    norm: Tensor
    head: Joint
    rotary: Rotary

    @property
    def compressed(self) -> bool:
        """Whether a matrix of a block is."""
        return any(matrix.compressed for block in self.blocks for matrix in block.matrices)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices that a step multiplies, the head among them."""
        return self.head.nbytes + sum(matrix.nbytes for block in self.blocks for matrix in block.matrices)


def plain_rotary(head_dim: int, base: float, device: str | torch.device) -> Rotary:
    """Rotary embeddings without scaling: frequencies ``base ** (-2 i / head_dim)``.

    >>> cos, sin = plain_rotary(4, 10_000.0, "cpu")(3)
    >>> cos.shape, round(float(sin[1, 1]), 4)
    (torch.Size([3, 2]), 0.01)
    """

    def tables(length: int) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        angles = torch.arange(length, dtype=torch.float64, device=device)[:, None] * base**-exponents
        return angles.cos().float(), angles.sin().float()

    return tables


def llama_weights(model: PreTrainedModel) -> LlamaWeights:
    """The parts of ``model``, LLaMA-like by :func:`is_llama_like`, on its device.

    Where matrices are joined, the model's layers become views of the joint ones, so that no weight is there twice.
    """
    config, body = model.config, model.model
    attention, device = body.layers[0].self_attn, model.device

    def rotary(length: int) -> tuple[Tensor, Tensor]:
        cos, sin = body.rotary_emb(torch.empty(0, device=device), torch.arange(length, device=device)[None])
        return cos[0, :, : cos.shape[-1] // 2].contiguous(), sin[0, :, : sin.shape[-1] // 2].contiguous()

    return LlamaWeights(
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        epsilon=config.rms_norm_eps,
        scale=attention.scaling,
        embedding=body.embed_tokens.weight.detach(),
        blocks=[_block(block) for block in body.layers],
        norm=body.norm.weight.detach(),
        head=joined([model.lm_head]),
        rotary=rotary,
    )


def _block(block: Layer) -> LlamaBlock:
    from gossamer.compress._decode_prompt import attention_window, projections

    qkv, output, gate_up, down = (joined(layers) for layers in projections(block))
    attention = block.self_attn
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else (None, None)
    return LlamaBlock(
        input_norm=block.input_layernorm.weight.detach(),
        qkv=qkv,
        output=output,
        middle_norm=block.post_attention_layernorm.weight.detach(),
        gate_up=gate_up,
        down=down,
        query_norm=None if norms[0] is None else norms[0].weight.detach(),
        key_norm=None if norms[1] is None else norms[1].weight.detach(),
        window=attention_window(attention, EVERYTHING),
    )


def joined(layers: Sequence[Layer]) -> Joint:
    """Layers, ``nn.Linear`` or ``CompressedLinear``, as one matrix where it can be; the layers share its memory then."""
    bias = _joint_bias(layers)
    if len(layers) == 1:
        return Joint((_matrix(layers[0]),), bias)
    sizes = [layer.out_features for layer in layers]
    if all(type(layer) is nn.Linear for layer in layers):
        dense = torch.cat([layer.weight.detach() for layer in layers])
        for layer, rows in zip(layers, dense.split(sizes), strict=True):
            layer.weight.data = rows
        return Joint((dense,), bias)
    weights: Any = [_matrix(layer) for layer in layers]
    whole = stack_fragments(weights) if all(isinstance(weight, _FRAGMENTS) for weight in weights) else None
    if whole is None:
        return Joint(tuple(weights), bias)
    for layer, (start, stop) in zip(layers, pairwise(accumulate(sizes, initial=0)), strict=True):
        part = fragment_rows(whole, start, stop)
        layer.description = describe(part)
        for name, array in part.arrays().items():
            setattr(layer, name, array)
    return Joint((whole,), bias)


def _joint_bias(layers: Sequence[Layer]) -> Tensor | None:
    like = next((layer.bias for layer in layers if layer.bias is not None), None)
    if like is None:
        return None
    biases = [like.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat([bias.detach() for bias in biases])


def _matrix(layer: Layer) -> Matrix:
    return layer.weight_format if isinstance(layer, CompressedLinear) else layer.weight.detach()
