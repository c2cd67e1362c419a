"""Decoding of LLaMA-like models as a fixed list of calls.

Everything that a step touches is allocated once: vectors, a key/value cache of ``max_length`` positions, rotary
tables. A step is then the same list of argument-free calls every time, one per matrix and one per group of small
operations between matrices (four a block), so that little of a token's time is Python's. Activations, cache and
logits are float32, whatever the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gossamer.compress import _decode_kernels as kernels
from gossamer.compress._decode_matrices import Call, Dense, Layer, bind_matrix, joint_bias
from gossamer.compress._decode_prompt import attention_window, projections, prompt_cache
from gossamer.compress._decode_threads import Team
from gossamer.weights import CompressedLinear

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the text is."""

SHORT_PROMPT = 8
"""Up to so many tokens, steps are faster than unpacking every matrix once."""

KINDS = ("linears", "attention", "norms", "activations", "head")

_NONE = np.empty(0, np.float32)


class Operation(NamedTuple):
    """One call of a step; ``kind`` is one of ``KINDS``."""

    kind: str
    call: Call


def is_llama_like(model: PreTrainedModel) -> bool:
    """Whether :class:`LlamaSteps` computes what ``model`` computes: by its type, and by what its blocks contain."""
    config, body = model.config, getattr(model, "model", model)
    if config.model_type not in MODEL_TYPES or not hasattr(body, "layers"):
        return False
    fixed = config.rope_parameters.get("rope_type", "default") in FIXED_ROTATIONS
    whole = 2 * body.rotary_emb.inv_freq.numel() == body.layers[0].self_attn.head_dim
    if not fixed or not whole or config.hidden_act not in ("silu", "swish"):
        return False
    layers = [layer for block in body.layers for group in projections(block) for layer in group]
    return all(isinstance(layer, CompressedLinear) or type(layer) is nn.Linear for layer in [*layers, model.lm_head])


class LlamaSteps:
    """The steps of one model; positions are the caller's business.

    Args:
        model: a causal LM for which :func:`is_llama_like` holds.
        max_length: positions in the cache.
        threads: of the kernels.
        dense: how ``nn.Linear`` layers are multiplied.
        adapt: let one thread work alone while all of them are slower.
    """

    def __init__(
        self, model: PreTrainedModel, max_length: int, threads: int, dense: Dense, adapt: bool = False
    ) -> None:
        config, body = model.config, model.model
        self.model = model
        self._scale: float = body.layers[0].self_attn.scaling
        self._place = np.zeros(1, np.int64)
        self._hidden, self._normed = np.zeros((2, config.hidden_size), np.float32)
        self._logits = np.zeros(model.lm_head.out_features, np.float32)
        cache = (len(body.layers), config.num_key_value_heads, max_length, body.layers[0].self_attn.head_dim)
        self._keys, self._values = np.empty(cache, np.float32), np.empty(cache, np.float32)
        self._cos, self._sin = _rotary_tables(body.rotary_emb, max_length)
        self._embedding = body.embed_tokens.weight.detach()
        self._hidden_view = torch.from_numpy(self._hidden)
        vectors = _Vectors.of(model, max_length)
        self._together = self._step_calls(vectors, threads, dense)
        self._alone = self._step_calls(vectors, 1, dense) if adapt and threads > 1 else None
        self._team: Team | None = None

    def warm(self) -> None:
        """Compile or load the kernels, and learn what a step takes: not in somebody's first token."""
        self.step(0, 0)
        if self._alone is not None:
            self._team = Team(min(self._timed(self._alone) for _ in range(3)))

    def step(self, token: int, position: int) -> np.ndarray:
        """Logits ``(vocabulary,)`` after ``token`` at ``position``; overwritten by the next step."""
        self._enter(token, position)
        if self._team is None or self._alone is None:
            self._together.run()
        else:
            self._team.took(self._timed(self._together if self._team.together else self._alone))
        return self._logits

    @staticmethod
    def _timed(calls: _StepCalls) -> float:
        start = perf_counter()
        calls.run()
        return perf_counter() - start

    def _enter(self, token: int, position: int) -> None:
        """Put the embedding of ``token`` where the first operation expects it."""
        self._place[0] = position
        self._hidden_view.copy_(self._embedding[token])

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
        self._enter(0, position)
        for kind, call in [*self._together.body, *self._together.head]:
            start = perf_counter()
            call()
            spent[kind] += perf_counter() - start
        return spent

    def fill(self, ids: Tensor) -> None:
        """Put ``ids`` ``(n,)`` at the first positions of the cache: a short prompt in steps, a longer one at once."""
        if len(ids) <= SHORT_PROMPT:
            for position, token in enumerate(ids.tolist()):
                self._enter(token, position)
                self._together.run_body()
            return
        tables = torch.from_numpy(self._cos[: len(ids)]), torch.from_numpy(self._sin[: len(ids)])
        for index, (keys, values) in enumerate(prompt_cache(self.model, ids, *tables)):
            torch.from_numpy(self._keys[index, :, : len(ids)]).copy_(keys)
            torch.from_numpy(self._values[index, :, : len(ids)]).copy_(values)

    def _step_calls(self, vectors: _Vectors, threads: int, dense: Dense) -> _StepCalls:
        return _StepCalls(self._up_to_last_norm(vectors, threads, dense), self._head(threads, dense))

    def _up_to_last_norm(self, v: _Vectors, threads: int, dense: Dense) -> list[Operation]:
        """The calls of a step up to the last norm, in order."""
        body = self.model.model
        norms = [(block.post_attention_layernorm, after.input_layernorm) for block, after in pairwise(body.layers)]
        norms.append((body.layers[-1].post_attention_layernorm, body.norm))
        operations = [
            Operation("norms", partial(v.delta.fill, 0.0)),
            _norm(body.layers[0].input_layernorm, self._hidden, v.delta, _NONE, self._normed),
        ]
        for index, (block, (middle, after)) in enumerate(zip(body.layers, norms, strict=True)):
            qkv, o_proj, gate_up, down_proj = projections(block)
            operations += [
                *_linears(qkv, self._normed, v.qkv, threads, dense),
                *self._attention(index, block, v, threads),
                *_linears(o_proj, v.seen, v.delta, threads, dense),
                _norm(middle, self._hidden, v.delta, joint_bias(o_proj), self._normed),
                *_linears(gate_up, self._normed, v.gate_up, threads, dense),
                Operation("activations", partial(kernels.gate, v.gate_up, joint_bias(gate_up), v.gated)),
                *_linears(down_proj, v.gated, v.delta, threads, dense),
                _norm(after, self._hidden, v.delta, joint_bias(down_proj), self._normed),
            ]
        return operations

    def _attention(self, index: int, block: Layer, v: _Vectors, threads: int) -> list[Operation]:
        cache = self._keys[index], self._values[index]
        bias, norms = joint_bias(projections(block)[0]), _head_norms(block.self_attn)
        append = partial(
            kernels.append, v.qkv, bias, *norms, self._cos, self._sin, *cache, self._place, np.float32(self._scale)
        )
        attend = kernels.attend if threads == 1 else kernels.attend_parallel
        seen = attention_window(block.self_attn, self._keys.shape[2])
        attend_to = partial(attend, v.qkv, *cache, self._place, seen, v.scores, v.seen)
        return [Operation("attention", append), Operation("attention", attend_to)]

    def _head(self, threads: int, dense: Dense) -> list[Operation]:
        head = self.model.lm_head
        operations = [Operation("head", bind_matrix(head, self._normed, self._logits, threads, dense))]
        if (bias := joint_bias([head])).size:
            operations.append(Operation("head", partial(np.add, self._logits, bias, out=self._logits)))
        return operations


@dataclass(frozen=True)
class _StepCalls:
    """The calls of a step by some number of threads: up to the last norm, and from there to the logits."""

    body: list[Operation]
    head: list[Operation]

    def run_body(self) -> None:
        for operation in self.body:
            operation.call()

    def run(self) -> None:
        self.run_body()
        for operation in self.head:
            operation.call()


@dataclass(frozen=True)
class _Vectors:
    """What one block hands from operation to operation."""

    qkv: np.ndarray
    scores: np.ndarray
    seen: np.ndarray
    gate_up: np.ndarray
    gated: np.ndarray
    delta: np.ndarray

    @classmethod
    def of(cls, model: PreTrainedModel, max_length: int) -> Self:
        qkv, (o_proj,), gate_up, _ = projections(model.model.layers[0])
        heads = model.config.num_attention_heads
        sizes = [
            sum(layer.out_features for layer in qkv),
            (heads, max_length),
            o_proj.in_features,
            2 * gate_up[0].out_features,
            gate_up[0].out_features,
            model.config.hidden_size,
        ]
        return cls(*(np.empty(size, np.float32) for size in sizes))


def _norm(module: Layer, hidden: np.ndarray, delta: np.ndarray, bias: np.ndarray, out: np.ndarray) -> Operation:
    weight, eps = _vector(module.weight), np.float32(module.variance_epsilon)
    return Operation("norms", partial(kernels.add_norm, hidden, delta, bias, weight, eps, out))


def _linears(layers: list[Layer], x: np.ndarray, out: np.ndarray, threads: int, dense: Dense) -> list[Operation]:
    """The products of ``layers`` with ``x``, one behind the other in ``out``."""
    parts = np.split(out, np.cumsum([layer.out_features for layer in layers])[:-1])
    bound = (bind_matrix(layer, x, part, threads, dense) for layer, part in zip(layers, parts, strict=True))
    return [Operation("linears", call) for call in bound]


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
