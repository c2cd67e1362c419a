"""One decode step of a LLaMA-like model on a GPU: its matrix products, and four kernels a block between them.

The kernels are in ``kernels/decode_step.cu``. Everything that changes from step to step (tokens, position) is read from
GPU memory, so that a step can be captured once in a CUDA graph and replayed.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.compress._llama_forward import Cache
from gossamer.compress._llama_weights import LlamaBlock, LlamaWeights
from gossamer.core.nvrtc import Kernel, load_kernel

HEAD_DIMS = (16, 32, 64, 128, 256)
MOST_GROUP = 8
"""Query heads of a key head: their sums are in registers."""
SHARE = 512
"""Positions that a block of threads attends to before it is worth to split them."""
MOST_SHARES = 64

_THREADS, _MERGE_THREADS, _NORM_THREADS = 256, 128, 1024
_EARLY = (9, 0)

Macros = tuple[tuple[str, int | str], ...]


def kernels_fit(weights: LlamaWeights) -> bool:
    """Whether the kernels compute this model; they take 16-bit types on a GPU."""
    width = weights.embedding.shape[1]
    inner = {matrix.shape[0] for block in weights.blocks for matrix in block.gate_up.parts}
    return (
        weights.embedding.is_cuda
        and weights.embedding.dtype in (torch.float16, torch.bfloat16)
        and weights.head_dim in HEAD_DIMS
        and weights.heads // weights.key_heads <= MOST_GROUP
        and width % 4 == 0
        and weights.norm.dtype == weights.embedding.dtype
        and all(rows % 8 == 0 for rows in inner)
    )


@cache
def source() -> str:
    """The CUDA source of the kernels."""
    folder = files("gossamer.compress") / "kernels"
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("decode_prelude.cu", "decode_step.cu"))


def norm_macros(width: int) -> dict[str, int]:
    """What ``add_norm`` is compiled with for rows of ``width``."""
    runs = -(-width // 4)
    threads = min(_NORM_THREADS, -(-runs // 32) * 32)
    return {"THREADS": threads, "PER": -(-runs // threads)}


def attend_macros(weights: LlamaWeights) -> dict[str, int]:
    """What ``attend`` and ``merge`` are compiled with."""
    norms = int(weights.blocks[0].query_norm is not None)
    group = weights.heads // weights.key_heads
    return {"THREADS": _THREADS, "HEAD": weights.head_dim, "GROUP": group, "NORMS": norms}


class Step:
    """The step of one model for one batch; call it to run it on torch's current stream.

    tokens: int64 ``(batch,)``, put at ``position``, int64 ``(1,)``, of every sequence.
    """

    def __init__(self, weights: LlamaWeights, cache: Cache, tokens: Tensor, position: Tensor) -> None:
        self._weights, self._cache, self._tokens, self._position = weights, cache, tokens, position
        batch, (_, width) = len(tokens), weights.embedding.shape
        self._hidden = torch.zeros(batch, width, device=tokens.device)
        length, blocks = cache.keys.shape[3], batch * weights.key_heads
        processors = torch.cuda.get_device_properties(tokens.device).multi_processor_count
        self._splits = max(1, min(-(-length // SHARE), 2 * processors // blocks, MOST_SHARES))
        room = batch * weights.heads * self._splits * (weights.head_dim + 2) if self._splits > 1 else 0
        self._partial = torch.empty(room, device=tokens.device)
        self._none = torch.empty(0, dtype=weights.embedding.dtype, device=tokens.device)
        self._norm = self._kernel("add_norm", norm_macros(width))
        self._attend = self._kernel("attend", attend_macros(weights))
        self._merge = self._kernel("merge", attend_macros(weights))
        self._gate = self._kernel("gate", {"THREADS": _THREADS, "GATE": 1})
        self._early = torch.cuda.get_device_capability(tokens.device) >= _EARLY

    def __call__(self) -> Tensor:
        """Logits ``(batch, vocabulary)`` of what follows."""
        weights = self._weights
        normed = self._added(weights.embedding, weights.blocks[0].input_norm, first=True)
        after = [block.input_norm for block in weights.blocks[1:]] + [weights.norm]
        for index, (block, norm) in enumerate(zip(weights.blocks, after, strict=True)):
            seen = self._attended(index, block, block.qkv(normed))
            normed = self._added(block.output(seen), block.middle_norm)
            normed = self._added(block.down(self._gated(block.gate_up(normed))), norm)
        return weights.head(normed)

    def _added(self, delta: Tensor, norm: Tensor, first: bool = False) -> Tensor:
        batch, width = self._hidden.shape
        out = delta.new_empty(batch, width)
        threads = norm_macros(width)["THREADS"]
        self._norm.launch(
            batch, threads, self._hidden, delta, self._tokens, norm, out, width, np.float32(self._weights.epsilon),
            int(first), shared_bytes=4 * 32, early=self._early,
        )  # fmt: skip
        return out

    def _attended(self, index: int, block: LlamaBlock, qkv: Tensor) -> Tensor:
        weights, cached, splits = self._weights, self._cache, self._splits
        seen = qkv.new_empty(len(qkv), weights.heads * weights.head_dim)
        norms = [self._none if norm is None else norm for norm in (block.query_norm, block.key_norm)]
        self._attend.launch(
            (weights.key_heads, len(qkv), splits), _THREADS,
            qkv, *norms, cached.cos, cached.sin, cached.keys[index], cached.values[index], self._position, seen,
            self._partial, cached.keys.shape[3], block.window, np.float32(weights.epsilon), np.float32(weights.scale),
            shared_bytes=attend_shared(weights), early=self._early,
        )  # fmt: skip
        if splits > 1:
            rows = len(qkv) * weights.heads
            self._merge.launch(rows, _MERGE_THREADS, self._partial, seen, splits, early=self._early)
        return seen

    def _gated(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        grid = (-(-out.shape[1] // (4 * _THREADS)), len(out))
        self._gate.launch(grid, _THREADS, gate_up, out, out.shape[1], early=self._early)
        return out

    def _kernel(self, name: str, macros: dict[str, int]) -> Kernel:
        embedding = self._weights.embedding
        chosen: Any = (*macros.items(), ("BFLOAT16", int(embedding.dtype == torch.bfloat16)))
        return load_kernel(source(), name, chosen, embedding.device.index or 0)


def attend_shared(weights: LlamaWeights) -> int:
    """Bytes of shared memory of ``attend``: queries and a key, and the sums of all that a warp reads at once."""
    group, head = weights.heads // weights.key_heads, weights.head_dim
    parts = _THREADS // 32 * (32 // (head // 8))
    return 4 * ((group + 1) * head + parts * group * (head + 2))
