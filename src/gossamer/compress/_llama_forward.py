"""The blocks of a LLaMA-like model over one or more positions of several sequences, in torch: for prompts, for every
device and type, and as what the kernels of :mod:`gossamer.compress._llama_step` are tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.compress._llama_weights import LlamaBlock, LlamaWeights


class Cache:
    """Keys and values of all blocks, ``(blocks, batch, key_heads, length, head_dim)``, and the rotary tables."""

    def __init__(self, weights: LlamaWeights, batch: int, length: int) -> None:
        shape = (len(weights.blocks), batch, weights.key_heads, length, weights.head_dim)
        self.keys, self.values = (weights.embedding.new_zeros(shape) for _ in range(2))
        self.cos, self.sin = weights.rotary(length)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def forward(weights: LlamaWeights, cache: Cache, ids: Tensor, position: int) -> Tensor:
    """Put ``ids`` ``(batch, n)`` at ``position`` and after; the residual stream ``(batch, n, hidden)`` in float32."""
    places = slice(position, position + ids.shape[1])
    hidden = F.embedding(ids, weights.embedding).float()
    for index, block in enumerate(weights.blocks):
        normed = rms_norm(hidden, block.input_norm, weights.epsilon).to(weights.embedding.dtype)
        seen = _attended(weights, block, cache, index, block.qkv(normed), places)
        hidden = hidden + block.output(seen)
        normed = rms_norm(hidden, block.middle_norm, weights.epsilon).to(weights.embedding.dtype)
        gate, up = block.gate_up(normed).chunk(2, -1)
        hidden = hidden + block.down((F.silu(gate.float()) * up.float()).to(normed.dtype))
    return hidden


def logits_of(weights: LlamaWeights, hidden: Tensor) -> Tensor:
    """``(..., vocabulary)`` of the residual stream ``(..., hidden)``."""
    return weights.head(rms_norm(hidden, weights.norm, weights.epsilon).to(weights.embedding.dtype))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), epsilon)


def _attended(weights: LlamaWeights, block: LlamaBlock, cache: Cache, index: int, qkv: Tensor, places: slice) -> Tensor:
    """``(batch, n, heads * head_dim)``; the new keys and values are in the cache then."""
    heads = qkv.unflatten(-1, (-1, weights.head_dim)).transpose(1, 2)
    queries, keys, values = heads.split([weights.heads, weights.key_heads, weights.key_heads], 1)
    if block.query_norm is not None and block.key_norm is not None:
        queries = rms_norm(queries, block.query_norm, weights.epsilon)
        keys = rms_norm(keys, block.key_norm, weights.epsilon)
    cos, sin = cache.cos[places], cache.sin[places]
    cache.keys[index, :, :, places] = _rotated(keys, cos, sin)
    cache.values[index, :, :, places] = values
    queries = _rotated(queries, cos, sin).to(qkv.dtype)
    new, old = torch.arange(places.start, places.stop, device=qkv.device), torch.arange(places.stop, device=qkv.device)
    age = new[:, None] - old
    seen = F.scaled_dot_product_attention(
        queries, cache.keys[index, :, :, : places.stop], cache.values[index, :, :, : places.stop],
        (age >= 0) & (age < block.window), scale=weights.scale, enable_gqa=True,
    )  # fmt: skip
    return seen.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
