"""Decoding several sequences at once, on a GPU as one CUDA graph a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.compress._llama_forward import Cache, forward, logits_of
from gossamer.compress._llama_weights import LlamaWeights, llama_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COMPRESSED_ROWS, _DENSE_ROWS = 32, 4096
"""Rows of a prompt at once: so many still meet compressed weights as they are stored; dense ones take more."""


class BatchDecoder:
    """Decodes ``batch`` sequences of equal length with a LLaMA-like model, dense or compressed.

    On a GPU, with 16-bit weights, a step is one CUDA graph: the products, four kernels a block between them, and the
    choice of the likeliest tokens, so that nothing of Python and of launches is left between two tokens. Elsewhere a step
    runs in torch. A prompt runs in torch everywhere, in pieces so small that compressed weights need not be decoded.

    Args:
        model: a model of transformers that is LLaMA-like (LLaMA, Mistral, Qwen2, Qwen3), or its parts.
        batch: sequences. Up to 32 is what compressed weights are made for.
        max_length: positions of the cache, whose memory is taken at once.

    Raises:
        ValueError: the model is not LLaMA-like, or ``batch`` or ``max_length`` is not positive.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> decoder = BatchDecoder(model, batch=2, max_length=16)
    >>> logits = decoder.prefill(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    >>> decoder.generate(5).shape, decoder.position
    (torch.Size([2, 5]), 7)
    """

    def __init__(self, model: PreTrainedModel | LlamaWeights, batch: int, max_length: int) -> None:
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch and max_length must be positive, got {batch} and {max_length}")
        self.weights = model if isinstance(model, LlamaWeights) else _parts(model)
        self.batch, self.max_length = batch, max_length
        self.position = 0
        self._cache = Cache(self.weights, batch, max_length)
        device = self.weights.embedding.device
        self._tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._text = torch.zeros(batch, max_length + 1, dtype=torch.long, device=device)
        self._logits = torch.empty(0)
        self._step: Callable[[], Tensor] | None = None
        self._replay = self._captured()

    @property
    def captured(self) -> bool:
        """Whether steps are replayed from a CUDA graph."""
        return self._replay is not None

    @property
    def cache_nbytes(self) -> int:
        """Bytes of keys and values."""
        return self._cache.nbytes

    def prefill(self, ids: Tensor) -> Tensor:
        """Start anew with prompts ``(batch, n)``; the logits ``(batch, vocabulary)`` after their last tokens.

        Raises:
            ValueError: ``ids`` has another shape, or does not fit the cache or the vocabulary.
        """
        if ids.ndim != 2 or ids.shape[0] != self.batch or not 1 <= ids.shape[1] <= self.max_length:
            raise ValueError(
                f"ids must be ({self.batch}, n) with n from 1 to max_length = {self.max_length}, got {tuple(ids.shape)}"
            )
        ids = ids.to(self._tokens.device, torch.long)
        lowest, highest = ids.aminmax()
        if int(lowest) < 0 or int(highest) >= len(self.weights.embedding):
            raise ValueError(f"tokens must be 0 to {len(self.weights.embedding) - 1}, got {lowest} to {highest}")
        self._text[:, : ids.shape[1]] = ids
        self.position = 0
        most = _COMPRESSED_ROWS if self.weights.compressed else _DENSE_ROWS
        piece = max(1, most // self.batch)
        if piece == 1 and self.captured:
            return self._stepped_through(ids)
        with torch.no_grad():
            for start in range(0, ids.shape[1], piece):
                hidden = forward(self.weights, self._cache, ids[:, start : start + piece], start)
            logits = logits_of(self.weights, hidden[:, -1])
        self._finish(logits, ids.shape[1])
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` ``(batch,)``; the logits ``(batch, vocabulary)`` of what follows, overwritten by the next step.

        Raises:
            ValueError: the cache is full, or ``tokens`` has another shape.
        """
        if tokens.shape != (self.batch,):
            raise ValueError(f"tokens must have shape ({self.batch},), got {tuple(tokens.shape)}")
        self._check_room(1)
        self._tokens.copy_(tokens)
        self._text[:, self.position] = self._tokens
        return self._advance()

    def generate(self, count: int) -> Tensor:
        """The likeliest ``count`` tokens, one by one: int64 ``(batch, count)``, on the weights' device.

        The first follows from the logits so far; the last is chosen, but not yet put into the cache.

        Raises:
            ValueError: there is no prompt yet, or the cache has no room for ``count - 1`` more tokens.
        """
        if self.position == 0:
            raise ValueError("generate needs a prompt: call prefill or step first")
        if count < 1:
            raise ValueError(f"count must be positive, got {count}")
        self._check_room(count - 1)
        start = self.position
        for _ in range(count - 1):
            self._advance()
        return self._text[:, start : start + count].clone()

    def rewind(self, position: int) -> None:
        """Go back to where so many positions were filled: what came after is forgotten.

        Raises:
            ValueError: ``position`` is negative or beyond the present one.
        """
        if not 0 <= position <= self.position:
            raise ValueError(f"position must be 0 to {self.position}, got {position}")
        self.position = position
        self._place.fill_(position)
        self._tokens.copy_(self._text[:, position])

    def _advance(self) -> Tensor:
        """Put the current tokens into the cache and choose the next."""
        if self._replay is not None:
            self._replay()
            self.position += 1
            return self._logits
        with torch.no_grad():
            hidden = forward(self.weights, self._cache, self._tokens[:, None], self.position)
            logits = logits_of(self.weights, hidden[:, 0])
        self._finish(logits, self.position + 1)
        return logits

    def _finish(self, logits: Tensor, position: int) -> None:
        """The likeliest tokens become the current ones, at ``position``."""
        self.position = position
        self._place.fill_(position)
        self._tokens.copy_(logits.argmax(-1))
        self._text[:, position] = self._tokens

    def _stepped_through(self, ids: Tensor) -> Tensor:
        """The prompt token by token, through the graph."""
        self._place.zero_()
        for place in range(ids.shape[1]):
            self._tokens.copy_(ids[:, place])
            logits = self._advance()
        self._text[:, : ids.shape[1]] = ids
        return logits

    def _check_room(self, count: int) -> None:
        if self.position + count > self.max_length:
            raise ValueError(
                f"the context of {self.max_length} tokens is full at {self.position} of them; "
                "make a decoder with a larger max_length or rewind"
            )

    def _captured(self) -> Callable[[], None] | None:
        """A step in a CUDA graph, where the kernels can compute it."""
        if not self._tokens.is_cuda:
            return None
        from gossamer.compress._llama_step import Step, kernels_fit

        if not kernels_fit(self.weights):
            return None
        with torch.cuda.device(self._tokens.device), torch.no_grad():
            step = Step(self.weights, self._cache, self._tokens, self._place)
            self._step = step  # its buffers have to live as long as the graph that writes to them
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # kernels are compiled and plans measured before anything is captured
                self._run(step)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._run(step)
        for changed in (self._tokens, self._place, self._text):
            changed.zero_()
        return graph.replay

    def _run(self, step: Callable[[], Tensor]) -> Tensor:
        logits = step()
        torch.argmax(logits, -1, out=self._tokens)
        self._place.add_(1)
        self._text.index_copy_(1, self._place, self._tokens[:, None])
        return logits


def _parts(model: PreTrainedModel) -> LlamaWeights:
    from gossamer.compress._decode_llama import MODEL_TYPES, is_llama_like

    if not is_llama_like(model):
        raise ValueError(
            f"model must be one of {', '.join(MODEL_TYPES)} with SiLU, rotary embeddings that do not depend on the length "
            f"and whole heads rotated, got {type(model).__name__}; Decoder runs every causal model"
        )
    return llama_weights(model)
