"""Decoding of LLaMA-like models as a fixed list of calls.

Everything that a step touches is allocated once: vectors, a key/value cache of ``max_length`` positions, rotary
tables. A step is then the same list of argument-free calls every time, one per matrix and one per group of small
operations between matrices (four a block), so that little of a token's time is Python's. Activations, cache and
logits are float32, whatever the weights are.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gossamer.compress import _decode_kernels as kernels
from gossamer.compress._decode_matrices import Call, Dense, Layer, bind_matrix, float_matrix, joint_bias
from gossamer.weights import CompressedLinear

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the text is."""

KINDS = ("linears", "attention", "norms", "activations", "head")

_NONE = np.empty(0, np.float32)


class Operation(NamedTuple):
    """One call of a step; ``kind`` is one of ``KINDS``."""

    kind: str
    call: Call


def is_llama_like(model: PreTrainedModel) -> bool:
    """Whether :class:`LlamaSteps` computes what ``model`` computes: by its type, and by what its blocks contain."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act not in ("silu", "swish"):
        return False
    if config.rope_parameters.get("rope_type", "default") not in FIXED_ROTATIONS:
        return False
    layers = [layer for block in model.model.layers for group in _projections(block) for layer in group]
    return all(isinstance(layer, CompressedLinear) or type(layer) is nn.Linear for layer in [*layers, model.lm_head])


class LlamaSteps:
    """The steps of one model; positions are the caller's business.

    Args:
        model: a causal LM for which :func:`is_llama_like` holds.
        max_length: positions in the cache.
        threads: of the kernels.
        dense: how ``nn.Linear`` layers are multiplied.
    """

    def __init__(self, model: PreTrainedModel, max_length: int, threads: int, dense: Dense) -> None:
        config, body = model.config, model.model
        attention = body.layers[0].self_attn
        self.model = model
        self.dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.scale = np.float32(attention.scaling)
        self._place = np.zeros(1, np.int64)
        self._hidden = np.zeros(config.hidden_size, np.float32)
        self._logits = np.zeros(model.lm_head.out_features, np.float32)
        cache = (len(body.layers), self.kv_heads, max_length, self.dim)
        self._keys, self._values = np.empty(cache, np.float32), np.empty(cache, np.float32)
        self._cos, self._sin = _rotary_tables(body.rotary_emb, max_length)
        self.operations = self._operations(threads, dense)
        self._calls = [operation.call for operation in self.operations]
        self._embedding = body.embed_tokens.weight.detach()
        self._hidden_view = torch.from_numpy(self._hidden)

    def step(self, token: int, position: int) -> np.ndarray:
        """Logits ``(vocabulary,)`` after ``token`` at ``position``; overwritten by the next step."""
        self.enter(token, position)
        for call in self._calls:
            call()
        return self._logits

    def reset(self) -> None:
        """Nothing: what lies behind the current position in the cache is never read."""

    def profile(self, position: int, steps: int) -> dict[str, float]:
        """Seconds of a step at ``position`` by kind of operation, medians over ``steps``."""
        rounds = [self._profiled(position) for _ in range(steps)]
        parts = {kind: median(each[kind] for each in rounds) for kind in rounds[0]}
        parts["loop"] = max(0.0, parts["step"] - sum(parts[kind] for kind in KINDS))
        return parts

    def _profiled(self, position: int) -> dict[str, float]:
        start = perf_counter()
        self.step(0, position)
        spent = dict.fromkeys(KINDS, 0.0) | {"step": perf_counter() - start}
        self.enter(0, position)
        for kind, call in self.operations:
            start = perf_counter()
            call()
            spent[kind] += perf_counter() - start
        return spent

    def enter(self, token: int, position: int) -> None:
        """Put the embedding of ``token`` where the first operation expects it."""
        self._place[0] = position
        self._hidden_view.copy_(self._embedding[token])

    @torch.inference_mode()
    def fill(self, ids: Tensor) -> None:
        """Put ``ids`` ``(n,)`` at the first positions of the cache.

        In float32 with one matrix at a time as a dense panel: float32 products of many rows are the only ones that
        are fast on every CPU.
        """
        body, length = self.model.model, len(ids)
        hidden = F.embedding(ids, self._embedding).float()
        for index, block in enumerate(body.layers):
            qkv, (o_proj,), gate_up, (down_proj,) = _projections(block)
            queries, keys, values = self._projected(block, qkv, hidden)
            torch.from_numpy(self._keys[index, :, :length]).copy_(keys)
            torch.from_numpy(self._values[index, :, :length]).copy_(values)
            if index + 1 == len(body.layers):
                return
            seen = self._attended(queries, keys, values, _window(block.self_attn, length))
            hidden = hidden + _many(o_proj, seen)
            gate, up = (_many(layer, _rms_norm(block.post_attention_layernorm, hidden)) for layer in gate_up)
            hidden = hidden + _many(down_proj, F.silu(gate) * up)

    def _projected(self, block: Layer, qkv: list[Layer], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each ``(heads, n, head_dim)``."""
        normed = _rms_norm(block.input_layernorm, hidden)
        queries, keys, values = (_many(layer, normed).unflatten(-1, (-1, self.dim)) for layer in qkv)
        if hasattr(block.self_attn, "q_norm"):
            queries, keys = _rms_norm(block.self_attn.q_norm, queries), _rms_norm(block.self_attn.k_norm, keys)
        cos, sin = (torch.from_numpy(table[: len(hidden), None]) for table in (self._cos, self._sin))
        queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
        return queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
        length, group = queries.shape[1], self.heads // self.kv_heads
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        age = torch.arange(length)[:, None] - torch.arange(length)
        out = F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=None if window >= length else (age >= 0) & (age < window),
            is_causal=window >= length,
            scale=float(self.scale),
        )
        return out[0].transpose(0, 1).flatten(1)

    def _operations(self, threads: int, dense: Dense) -> list[Operation]:
        """The calls of a step, in order."""
        body, size = self.model.model, self._hidden.size
        ffn = _projections(body.layers[0])[2][0].out_features
        normed, delta = np.zeros(size, np.float32), np.zeros(size, np.float32)
        qkv = np.empty((self.heads + 2 * self.kv_heads) * self.dim, np.float32)
        seen = np.empty(self.heads * self.dim, np.float32)
        gate_up, gated = np.empty(2 * ffn, np.float32), np.empty(ffn, np.float32)
        scores = np.empty((self.heads, self._keys.shape[2]), np.float32)
        attend = kernels.attend if threads == 1 else kernels.attend_parallel

        def norm(module: Layer, bias: np.ndarray = _NONE) -> Operation:
            weight, eps = _vector(module.weight), np.float32(module.variance_epsilon)
            return Operation("norms", partial(kernels.add_norm, self._hidden, delta, bias, weight, eps, normed))

        def linear(layers: list[Layer], x: np.ndarray, out: np.ndarray, kind: str = "linears") -> list[Operation]:
            outs = np.split(out, np.cumsum([layer.out_features for layer in layers])[:-1])
            bound = (bind_matrix(layer, x, part, threads, dense) for layer, part in zip(layers, outs, strict=True))
            return [Operation(kind, call) for call in bound]

        zero = Operation("norms", partial(delta.fill, 0.0))
        operations = [zero, norm(body.layers[0].input_layernorm)]
        following = [block.input_layernorm for block in body.layers[1:]] + [body.norm]
        for index, (block, next_norm) in enumerate(zip(body.layers, following, strict=True)):
            projections, o_proj, gates, down_proj = _projections(block)
            operations += linear(projections, normed, qkv)
            operations.append(Operation("attention", self._append(index, qkv)))
            cache, window = (self._keys[index], self._values[index]), _window(block.self_attn, self._keys.shape[2])
            operations.append(Operation("attention", partial(attend, qkv, *cache, self._place, window, scores, seen)))
            operations += linear(o_proj, seen, delta)
            operations.append(norm(block.post_attention_layernorm, joint_bias(o_proj)))
            operations += linear(gates, normed, gate_up)
            gate = partial(kernels.gate, gate_up, joint_bias(gates), gated)
            operations.append(Operation("activations", gate))
            operations += linear(down_proj, gated, delta)
            operations.append(norm(next_norm, joint_bias(down_proj)))
        operations += linear([self.model.lm_head], normed, self._logits, "head")
        if (bias := joint_bias([self.model.lm_head])).size:
            operations.append(Operation("head", partial(np.add, self._logits, bias, out=self._logits)))
        return operations

    def _append(self, index: int, qkv: np.ndarray) -> Call:
        attention = self.model.model.layers[index].self_attn
        bias, norms = joint_bias(_projections(self.model.model.layers[index])[0]), _head_norms(attention)
        tables, cache = (self._cos, self._sin), (self._keys[index], self._values[index])
        return partial(kernels.append, qkv, bias, *norms, *tables, *cache, self._place, self.scale)


def _projections(block: Layer) -> tuple[list[Layer], list[Layer], list[Layer], list[Layer]]:
    """The matrices of a block: queries, keys and values; output; gate and up; down."""
    attention, mlp = block.self_attn, block.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    return qkv, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]


def _window(attention: Layer, length: int) -> int:
    """How many positions a token sees, itself included: ``length`` unless the layer has a smaller window."""
    window = getattr(attention, "sliding_window", None)
    if window is None and attention.config.model_type == "mistral":
        window = attention.config.sliding_window
    return length if window is None else min(window, length)


def _head_norms(attention: Layer) -> tuple[np.ndarray, np.ndarray, np.float32]:
    if not hasattr(attention, "q_norm"):
        return _NONE, _NONE, np.float32(0.0)
    norms = attention.q_norm, attention.k_norm
    return _vector(norms[0].weight), _vector(norms[1].weight), np.float32(norms[0].variance_epsilon)


def _rotary_tables(rotary: Layer, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``(length, head_dim // 2)``, by the model's own module: the halves of its rows are equal."""
    tables = rotary(torch.empty(0), torch.arange(length)[None])
    cos, sin = (table[0, :, : table.shape[-1] // 2].contiguous().numpy() for table in tables)
    return cos, sin


def _vector(parameter: Tensor) -> np.ndarray:
    return parameter.detach().float().numpy()


def _rms_norm(module: Layer, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight.float(), module.variance_epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _many(layer: Layer, x: Tensor) -> Tensor:
    return F.linear(x, float_matrix(layer), None if layer.bias is None else layer.bias.float())
