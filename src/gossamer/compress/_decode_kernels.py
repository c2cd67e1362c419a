"""What a LLaMA-like block computes between its matrices, for one token.

Each function is one call per block over preallocated float32 arrays; biases are added here, because the matrices'
kernels have none. An array of size 0 stands for "the model has none". The loops are written so that LLVM turns them
into vector code: float32 throughout, sums in any order, and an exponential without a library call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Array = NDArray[np.float32]
Place = NDArray[np.int64]

REORDER = {"reassoc", "contract", "nsz", "arcp", "afn"}
"""Fast arithmetic that still respects infinities and NaN."""

_PARALLEL_FROM = 256
"""Positions below which starting threads costs more than it saves."""

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693145752)
_LN2_LOW = np.float32(1.42860677e-6)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_C2, _C3, _C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
_C5, _C6 = np.float32(1 / 120), np.float32(1 / 720)


@njit(fastmath=REORDER, error_model="numpy", inline="always")
def exp32(x: Any) -> Any:
    """``exp(x)`` to 5e-7 relative, clamped to what float32 can hold.

    Splits ``x = n ln 2 + r`` with ``|r| <= ln 2 / 2``, takes a Taylor polynomial of ``r`` and writes ``n`` into the
    exponent bits.
    """
    inside = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(inside * _LOG2_E + _HALF)
    r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
    tail = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * _C6)))
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (_ONE + r + r * r * tail) * power


@njit(cache=True, fastmath=REORDER, error_model="numpy")
def add_norm(hidden: Array, delta: Array, bias: Array, weight: Array, eps: np.float32, out: Array) -> None:
    """``hidden += delta + bias``, then ``out`` = RMS norm of ``hidden`` (Zhang and Sennrich, NeurIPS 2019)."""
    total = _ZERO
    if bias.size:
        for i in range(hidden.size):
            delta[i] += bias[i]
    for i in range(hidden.size):
        value = hidden[i] + delta[i]
        hidden[i] = value
        total += value * value
    inverse = _ONE / np.sqrt(total / np.float32(hidden.size) + eps)
    for i in range(hidden.size):
        out[i] = hidden[i] * inverse * weight[i]


@njit(cache=True, fastmath=REORDER, error_model="numpy")
def gate(gate_up: Array, bias: Array, out: Array) -> None:
    """SwiGLU: ``out = silu(g) * u`` for ``gate_up`` = g and u, one behind the other (Shazeer, arXiv 2002.05202)."""
    size = out.size
    if bias.size:
        for i in range(2 * size):
            gate_up[i] += bias[i]
    for i in range(size):
        g = gate_up[i]
        out[i] = g * gate_up[size + i] / (_ONE + exp32(-g))


@njit(fastmath=REORDER, error_model="numpy", inline="always")
def _norm_head(head: Array, weight: Array, eps: np.float32) -> None:
    total = _ZERO
    for i in range(head.size):
        total += head[i] * head[i]
    inverse = _ONE / np.sqrt(total / np.float32(head.size) + eps)
    for i in range(head.size):
        head[i] *= inverse * weight[i]


@njit(fastmath=REORDER, error_model="numpy", inline="always")
def _rotate(head: Array, cos: Array, sin: Array, scale: np.float32, out: Array) -> None:
    half = head.size // 2
    for i in range(half):
        first, second = head[i], head[half + i]
        out[i] = (first * cos[i] - second * sin[i]) * scale
        out[half + i] = (second * cos[i] + first * sin[i]) * scale


@njit(cache=True, fastmath=REORDER, error_model="numpy")
def append(
    qkv: Array,
    bias: Array,
    q_norm: Array,
    k_norm: Array,
    eps: np.float32,
    cos: Array,
    sin: Array,
    keys: Array,
    values: Array,
    place: Place,
    scale: np.float32,
) -> None:
    """Turn the projections ``qkv`` (queries, keys, values) into rotated queries and one more column of the cache.

    qkv: ``((heads + 2 kv_heads) * head_dim,)``; its queries are replaced by ``scale`` times the rotated ones.
    cos, sin: ``(positions, head_dim // 2)``. keys, values: ``(kv_heads, positions, head_dim)``. place: ``(1,)``, the
    position of the token.
    """
    position = place[0]
    kv_heads, _, dim = keys.shape
    heads = qkv.size // dim - 2 * kv_heads
    if bias.size:
        for i in range(qkv.size):
            qkv[i] += bias[i]
    for head in range(heads):
        query = qkv[head * dim : (head + 1) * dim]
        if q_norm.size:
            _norm_head(query, q_norm, eps)
        _rotate(query, cos[position], sin[position], scale, query)
    for head in range(kv_heads):
        start = (heads + head) * dim
        key = qkv[start : start + dim]
        if k_norm.size:
            _norm_head(key, k_norm, eps)
        _rotate(key, cos[position], sin[position], _ONE, keys[head, position])
        start += kv_heads * dim
        values[head, position] = qkv[start : start + dim]


@njit(cache=True, fastmath=REORDER, error_model="numpy")
def _attend_head(query: Array, keys: Array, values: Array, scores: Array, out: Array) -> None:
    """``out = softmax(keys @ query) @ values`` for ``(positions, head_dim)`` keys and values."""
    length, dim = keys.shape
    peak = np.float32(-np.inf)
    for t in range(length):
        dot = _ZERO
        for i in range(dim):
            dot += query[i] * keys[t, i]
        scores[t] = dot
        peak = max(peak, dot)
    total = _ZERO
    for t in range(length):
        share = exp32(scores[t] - peak)
        scores[t] = share
        total += share
    out[:] = _ZERO
    fours = length - length % 4
    for t in range(0, fours, 4):
        a, b, c, d = scores[t], scores[t + 1], scores[t + 2], scores[t + 3]
        for i in range(dim):
            out[i] += (a * values[t, i] + b * values[t + 1, i]) + (c * values[t + 2, i] + d * values[t + 3, i])
    for t in range(fours, length):
        for i in range(dim):
            out[i] += scores[t] * values[t, i]
    inverse = _ONE / total
    for i in range(dim):
        out[i] *= inverse


@njit(cache=True, fastmath=REORDER, error_model="numpy")
def attend(qkv: Array, keys: Array, values: Array, place: Place, window: int, scores: Array, out: Array) -> None:
    """Let the queries of :func:`append` attend to the last ``window`` positions.

    scores: ``(heads, positions)`` scratch. out: ``(heads * head_dim,)``. Query heads share key heads in groups
    (Ainslie et al., EMNLP 2023).
    """
    dim, group = keys.shape[2], scores.shape[0] // keys.shape[0]
    first, last = max(0, place[0] + 1 - window), place[0] + 1
    for head in range(scores.shape[0]):
        seen_keys, seen_values = keys[head // group, first:last], values[head // group, first:last]
        start, end = head * dim, (head + 1) * dim
        _attend_head(qkv[start:end], seen_keys, seen_values, scores[head], out[start:end])


@njit(cache=True, fastmath=REORDER, error_model="numpy", parallel=True)
def attend_parallel(
    qkv: Array, keys: Array, values: Array, place: Place, window: int, scores: Array, out: Array
) -> None:
    """:func:`attend` with the heads spread over numba's threads once there are enough positions for that to pay."""
    dim, group = keys.shape[2], scores.shape[0] // keys.shape[0]
    first, last = max(0, place[0] + 1 - window), place[0] + 1
    if last - first < _PARALLEL_FROM:
        attend(qkv, keys, values, place, window, scores, out)
        return
    for head in prange(scores.shape[0]):
        seen_keys, seen_values = keys[head // group, first:last], values[head // group, first:last]
        start, end = head * dim, (head + 1) * dim
        _attend_head(qkv[start:end], seen_keys, seen_values, scores[head], out[start:end])
