"""Continue a text with a causal language model, dense or compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from gossamer.compress._decode import Decoder
from gossamer.compress._sampling import sampler

OnText = Callable[[str], object]


@dataclass(frozen=True)
class Generation:
    """A continuation.

    text: without the prompt and without special tokens.
    token_ids: the new tokens, a final end-of-text token included.
    tokens_per_second: of the steps after the prompt; 0 if there was none.
    prefill_seconds: from the prompt's tokens to the first new one.
    """

    text: str
    token_ids: list[int]
    tokens_per_second: float
    prefill_seconds: float


def generate(
    model: PreTrainedModel | Decoder,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    on_text: OnText | None = None,
    threads: int | None = None,
) -> Generation:
    """Continue ``prompt`` by at most ``max_new_tokens`` tokens, or until the model ends the text.

    Args:
        model: a causal language model of transformers, or a :class:`Decoder` of one, which saves setting it up again.
        tokenizer: the model's; no chat template is applied.
        temperature, top_k, top_p, seed: see :func:`sampler`; greedy by default.
        on_text: called with every piece of new text as soon as it is complete.
        threads: of the decoder that is set up for ``model``; see :class:`Decoder`.

    Raises:
        ValueError: the prompt has no tokens, prompt and continuation exceed the context, or a sampling argument is
            out of range.
    """
    choose = sampler(temperature, top_k, top_p, seed)
    prompt_ids = tokenizer(prompt)["input_ids"]
    decoder = _fitting_decoder(model, len(prompt_ids), max_new_tokens, threads)
    ends = end_tokens(decoder.model, tokenizer)
    stream = _Stream(tokenizer, on_text)
    start = perf_counter()
    logits = decoder.prefill(prompt_ids)
    token_ids = [choose(logits)]
    prefilled = perf_counter()
    while token_ids[-1] not in ends and len(token_ids) < max_new_tokens:
        stream.add(token_ids)
        token_ids.append(choose(decoder.step(token_ids[-1])))
    seconds, steps = perf_counter() - prefilled, len(token_ids) - 1
    stream.end(token_ids)
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return Generation(text, token_ids, steps / seconds if steps else 0.0, prefilled - start)


def _fitting_decoder(model: PreTrainedModel | Decoder, prompt: int, new: int, threads: int | None) -> Decoder:
    if prompt < 1:
        raise ValueError("the prompt has no tokens; give at least one word")
    if new < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {new}")
    length = prompt + new - 1  # the last new token is never fed back
    config = model.model.config if isinstance(model, Decoder) else model.config
    limit = model.max_length if isinstance(model, Decoder) else getattr(config, "max_position_embeddings", length)
    if length > limit:
        raise ValueError(
            f"the prompt of {prompt} tokens and max_new_tokens={new} need {length} positions, the context has {limit}; "
            "shorten the prompt or lower max_new_tokens"
        )
    return model if isinstance(model, Decoder) else Decoder(model, length, threads)


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation settings and by the tokenizer."""
    settings = getattr(model, "generation_config", None)
    ends = getattr(settings, "eos_token_id", None)
    found = set(ends) if isinstance(ends, list) else {ends}
    return {token for token in found | {tokenizer.eos_token_id} if token is not None}


class _Stream:
    """Hands text on piece by piece; a piece waits while its last character may still lack bytes."""

    def __init__(self, tokenizer: Any, on_text: OnText | None) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._sent = 0

    def add(self, token_ids: list[int]) -> None:
        if self._on_text is not None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            if not text.endswith("\ufffd"):
                self._send(text)

    def end(self, token_ids: list[int]) -> None:
        if self._on_text is not None:
            self._send(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _send(self, text: str) -> None:
        if self._on_text is not None and len(text) > self._sent:
            self._on_text(text[self._sent :])
            self._sent = len(text)
