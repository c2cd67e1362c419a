"""As much of lm-eval as its models need, written after its documentation, for where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


class NoCache:
    def add_partial(self, attr: str, request: Any, result: Any) -> None:
        pass


class TemplateLM:
    """Encodes context and continuation together; spaces at a context's end belong to the continuation."""

    def __init__(self) -> None:
        self.cache_hook = NoCache()

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id  # type: ignore[attr-defined, no-any-return]

    def loglikelihood(self, requests: list[Any]) -> Any:
        encoded = []
        for request in requests:
            context, continuation = request.args
            kept = context.rstrip()
            continuation = context[len(kept) :] + continuation
            before = self.tok_encode(kept) or [self.prefix_token_id]  # type: ignore[attr-defined]
            whole = self.tok_encode(kept + continuation)  # type: ignore[attr-defined]
            encoded.append((request.args, before, whole[len(before) :] if kept else whole))
        return self._loglikelihood_tokens(encoded)  # type: ignore[attr-defined]


def get_rolling_token_windows(
    token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Every token predicted once; all windows but the first see ``max_seq_len`` tokens before what they predict last."""
    tokens, done = [prefix_token, *token_list], 0
    while done < len(token_list):
        size = min(max_seq_len if done == 0 else max_seq_len - context_len + 1, len(token_list) - done)
        end = done + size
        yield tokens[max(end - max_seq_len, 0) : end], tokens[done + 1 : end + 1]
        done = end


def make_disjoint_window(pair: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    context, continuation = pair
    return context[: len(context) - len(continuation) + 1], continuation


def install() -> None:
    """Put the stand-in where lm-eval would be, unless that is here."""
    if "lm_eval" in sys.modules or importlib.util.find_spec("lm_eval") is not None:
        return
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.utils")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["lm_eval.api.model"].TemplateLM = TemplateLM
    modules["lm_eval.utils"].get_rolling_token_windows = get_rolling_token_windows
    modules["lm_eval.utils"].make_disjoint_window = make_disjoint_window
    sys.modules.update(modules)
