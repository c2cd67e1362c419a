"""Token-by-token decoding whose own overhead does not hide the kernels.

transformers' forward of a small model spends more time in Python than in products. :class:`Decoder` runs LLaMA-like
models (LLaMA, Mistral, Qwen2, Qwen3) in a loop of its own, on a GPU as one CUDA graph a step, and every other causal model
through its own forward, behind the same verbs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.compress._decode_forward import ForwardSteps
from gossamer.compress._decode_graph import GraphSteps
from gossamer.compress._decode_llama import LlamaSteps, is_llama_like
from gossamer.compress._decode_matrices import DENSE, Dense


class Steps(Protocol):
    """How one model decodes; what :class:`Decoder` checks and counts is not checked again."""

    def fill(self, ids: Tensor) -> None:
        """Put a prompt ``(n,)`` at the first positions."""

    def step(self, token: int, position: int) -> np.ndarray:
        """Logits ``(vocabulary,)`` after ``token`` at ``position``; may be overwritten by the next step."""

    def reset(self) -> None:
        """Forget the sequence."""

    def profile(self, position: int, steps: int) -> dict[str, float]:
        """Seconds of a step by kind of operation, the whole under "step"."""


class Decoder:
    """Decodes one sequence with a causal language model of transformers, on the CPU or a GPU.

    Args:
        model: its linear layers may be dense or compressed. Nothing of it is copied but small vectors, unless
            ``dense`` asks for a dtype that its weights do not have. On a GPU, its queries, keys and values become views of
            one matrix, and gate and up too.
        max_length: positions that the cache holds (float32, memory is taken as it fills; on a GPU in the model's type and
            at once).
        threads: of the kernels; by default as many as torch uses now, or one while that is faster, as it is where other
            processes keep cores busy (the logits are the same). Products that torch computes (the prompt, and
            ``dense="torch-..."``) use torch's own number.
        dense: how dense layers multiply in LLaMA-like models: "gossamer" with our own kernel, "torch-bf16" and
            "torch-fp32" with torch, for comparison. Models on a GPU or in their own forward ignore it.

    Raises:
        ValueError: ``max_length`` is not positive or beyond the model's context, the model is neither on the CPU nor on a
            GPU, or an argument is none of those accepted.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    >>> decoder = Decoder(model, max_length=16, threads=1)
    >>> logits = decoder.prefill([1, 2, 3])
    >>> logits = decoder.step(int(logits.argmax()))
    >>> logits.shape, decoder.position
    ((64,), 4)
    """

    def __init__(
        self, model: PreTrainedModel, max_length: int, threads: int | None = None, dense: Dense = "gossamer"
    ) -> None:
        _check_arguments(model, max_length, threads, dense)
        self.model = model
        self.max_length = max_length
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.position = 0
        self._steps: Steps
        if is_llama_like(model) and model.device.type == "cuda":
            self._steps = GraphSteps(model, max_length)
        elif is_llama_like(model):
            steps = LlamaSteps(model, max_length, threads or torch.get_num_threads(), dense, adapt=threads is None)
            steps.warm()
            self._steps = steps
        else:
            self._steps = ForwardSteps(model)

    @property
    def own_loop(self) -> bool:
        """Whether steps run in our loop; if not, in the model's own forward."""
        return not isinstance(self._steps, ForwardSteps)

    def prefill(self, ids: Sequence[int] | Tensor) -> np.ndarray:
        """Start anew with the prompt ``ids`` and return the logits after its last token.

        Raises:
            ValueError: ``ids`` is empty, longer than ``max_length`` or holds no valid tokens.
        """
        tokens = torch.as_tensor(ids, dtype=torch.long).flatten()
        if not 1 <= len(tokens) <= self.max_length:
            raise ValueError(
                f"the prompt must have 1 to max_length = {self.max_length} tokens, got {len(tokens)}; "
                "shorten it or make a Decoder with a larger max_length"
            )
        self._check_tokens(int(tokens.min()), int(tokens.max()))
        self.reset()
        if len(tokens) > 1:
            self._steps.fill(tokens[:-1])
        self.position = len(tokens) - 1
        return self.step(int(tokens[-1]))

    def step(self, token: int) -> np.ndarray:
        """Append ``token`` and return the logits of what follows: float32 ``(vocabulary,)``.

        Raises:
            ValueError: the cache is full, or ``token`` is outside the vocabulary.
        """
        if self.position >= self.max_length:
            raise ValueError(
                f"the context of {self.max_length} tokens is full; make a Decoder with a larger max_length or reset()"
            )
        self._check_tokens(token, token)
        logits = self._steps.step(token, self.position)
        self.position += 1
        return logits.copy()

    def reset(self) -> None:
        """Forget the sequence."""
        self.position = 0
        self._steps.reset()

    def profile(self, steps: int = 16) -> dict[str, float]:
        """Where the time of a step at the current position goes, in seconds: medians over ``steps`` steps.

        Keys: "linears", "attention", "norms", "activations", "head", "loop" (what a whole step takes beyond these)
        and "step" (all of it); for a model in its own forward only "step". The sequence is as before afterwards.
        """
        if self.position >= self.max_length:
            raise ValueError("profile needs one free position; reset() or make a Decoder with a larger max_length")
        return self._steps.profile(self.position, steps)

    def _check_tokens(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.vocabulary:
            token = lowest if lowest < 0 else highest
            raise ValueError(
                f"token {token} is outside the vocabulary of {self.vocabulary}: is the tokenizer the model's?"
            )


def _check_arguments(model: PreTrainedModel, max_length: int, threads: int | None, dense: str) -> None:
    if dense not in DENSE:
        raise ValueError(f"dense must be one of {', '.join(DENSE)}, got {dense!r}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if model.device.type not in ("cpu", "cuda"):
        raise ValueError(f"the model must be on the CPU or a GPU, got {model.device}; move it with model.cpu()")
    context = getattr(model.config, "max_position_embeddings", None) or max_length
    if not 1 <= max_length <= context:
        raise ValueError(f"max_length must be 1 to {context}, the context of the model, got {max_length}")
