"""Our models behind the interface of lm-eval (Gao et al., 2024), so that its tasks run them.

Contexts and continuations are encoded as lm-eval's own models do, together and then parted by the number of the context's
tokens, and cut from the left where they exceed the model's context.
"""

from __future__ import annotations

import os
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gossamer.compress._checkpoint import load_any
from gossamer.compress._decode import Decoder
from gossamer.compress._generate import end_tokens
from gossamer.compress._likelihoods import score_continuations
from gossamer.compress._sampling import sampler

MOST_TOKENS = 2048
"""Longest context by default: lm-eval's own default for models that do not say more."""
NEW_TOKENS = 256
"""Of a generation whose task sets no limit, as lm-eval's own models have it."""


class GossamerLM(TemplateLM):
    """A compressed folder, or any model that :func:`load_any` takes, as lm-eval's ``LM``.

    Args:
        pretrained: the folder or name; or a loaded model with ``model`` and ``tokenizer``.
        batch_size: sequences scored at a time.
        max_length: tokens of context; by default the model's own, at most 2048.
        device: where the model runs; by default where it is.
    """

    def __init__(
        self, pretrained: Any, batch_size: int | str = 8, max_length: int | None = None, device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        loaded = load_any(pretrained) if isinstance(pretrained, str | os.PathLike) else pretrained
        self.model, self.tokenizer = loaded.model.eval(), loaded.tokenizer
        if device is not None:
            self.model.to(device)
        self._device = next(self.model.parameters()).device
        own = getattr(self.model.config, "max_position_embeddings", MOST_TOKENS)
        self.max_length = min(own, MOST_TOKENS) if max_length is None else int(max_length)
        if not 2 <= self.max_length <= own:
            raise ValueError(f"max_length must be in [2, {own}], the model's context, got {max_length}")
        self.batch_size = (max_batch_size or 8) if batch_size == "auto" else int(batch_size)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 or auto, got {batch_size}")

    @property
    def tokenizer_name(self) -> str:
        """Where the tokenizer comes from; lm-eval keys its caches by it."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; it also stands for an empty context."""
        found = self.tokenizer.eos_token_id
        if found is None:
            raise ValueError("the tokenizer has no end-of-text token, which lm-eval needs for empty contexts")
        return int(found)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of ``string``, without special tokens unless asked for."""
        return list(self.tokenizer(string, add_special_tokens=bool(add_special_tokens))["input_ids"])

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = score_continuations(self.model, pairs, self.batch_size, self.max_length)
        for (texts, _, _), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each token predicted once with as much context as fits."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            found = score_continuations(self.model, pairs, self.batch_size, self.max_length)
            totals.append(sum(value for value, _ in found))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first of the stopping texts, the end of the text, or the limit of tokens."""
        found = []
        for request in requests:
            context, options = request.args
            found.append(self._continue(context, dict(options)))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _continue(self, context: str, options: dict[str, Any]) -> str:
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        most = int(options.get("max_gen_toks", options.get("max_new_tokens", NEW_TOKENS)))
        if not 0 < most < self.max_length:
            raise ValueError(f"max_gen_toks must be in [1, {self.max_length - 1}] for this context, got {most}")
        ids = self.tok_encode(context)[most - self.max_length :] or [self.prefix_token_id]
        sampled = bool(options.get("do_sample", False))
        temperature = float(options.get("temperature", 1.0)) if sampled else 0.0
        choose = sampler(temperature, options.get("top_k"), options.get("top_p"), seed=0)
        decoder, ends = Decoder(self.model, len(ids) + most), end_tokens(self.model, self.tokenizer)
        new: list[int] = []
        text, logits = "", decoder.prefill(ids)
        while len(new) < most and (token := choose(logits)) not in ends:
            new.append(token)
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            if any(stop in text for stop in stops):
                break
            logits = decoder.step(token)
        places = [text.index(stop) for stop in stops if stop in text]
        return text[: min(places, default=len(text))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The history as one text, by the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )  # fmt: skip
