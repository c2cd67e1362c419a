"""The blocks of a LLaMA-like model over a whole prompt at once.

In float32, with one matrix at a time as a dense panel: float32 products of many rows are the only ones that torch
computes fast on every CPU (without bfloat16 instructions its bfloat16 ones are many times slower).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from gossamer.compress._decode_matrices import Layer, float_matrix


@torch.inference_mode()
def prompt_cache(model: PreTrainedModel, ids: Tensor, cos: Tensor, sin: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For every block, the rotated keys and the values of ``ids`` ``(n,)``, each ``(kv_heads, n, head_dim)``.

    cos, sin: ``(n, head_dim // 2)``.
    """
    body = model.model
    hidden = F.embedding(ids, body.embed_tokens.weight).float()
    for block in body.layers:
        queries, keys, values = _heads(block, hidden, cos[:, None], sin[:, None])
        yield keys, values
        if block is not body.layers[-1]:
            hidden = _rest_of_block(block, hidden, _attended(block.self_attn, queries, keys, values))


def projections(block: Layer) -> tuple[list[Layer], list[Layer], list[Layer], list[Layer]]:
    """The matrices of a block: queries, keys and values; output; gate and up; down."""
    attention, mlp = block.self_attn, block.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return qkv, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]


def attention_window(attention: Layer, length: int) -> int:
    """How many positions a token sees, itself included: ``length`` unless the layer has a smaller window."""
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    return length if window is None else min(window, length)


def _heads(block: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, each ``(heads, n, head_dim)``."""
    attention, normed = block.self_attn, _rms_norm(block.input_layernorm, hidden)
    queries, keys, values = (
        _product(layer, normed).unflatten(-1, (-1, attention.head_dim)) for layer in projections(block)[0]
    )
    if hasattr(attention, "q_norm"):
        queries, keys = _rms_norm(attention.q_norm, queries), _rms_norm(attention.k_norm, keys)
    queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
    return queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)


def _attended(attention: Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``(n, heads * head_dim)``."""
    length, group = queries.shape[1], len(queries) // len(keys)
    window, mask = attention_window(attention, length), None
    if window < length:
        age = torch.arange(length)[:, None] - torch.arange(length)
        mask = (age >= 0) & (age < window)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    seen = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], mask, is_causal=mask is None, scale=attention.scaling
    )
    return seen[0].transpose(0, 1).flatten(1)


def _rest_of_block(block: Layer, hidden: Tensor, seen: Tensor) -> Tensor:
    _, (o_proj,), (gate_proj, up_proj), (down_proj,) = projections(block)
    hidden = hidden + _product(o_proj, seen)
    normed = _rms_norm(block.post_attention_layernorm, hidden)
    return hidden + _product(down_proj, F.silu(_product(gate_proj, normed)) * _product(up_proj, normed))


def _product(layer: Layer, x: Tensor) -> Tensor:
    return F.linear(x, float_matrix(layer), None if layer.bias is None else layer.bias.float())


def _rms_norm(module: Layer, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight.float(), module.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
