"""The door for lm-eval, which is imported only by whoever asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gossamer.compress._lm_eval_model import GossamerLM


def lm_eval_model(
    path: str | os.PathLike[str], batch_size: int = 8, max_length: int | None = None, device: str | None = None
) -> GossamerLM:
    """A compressed folder, or a dense model, as an ``LM`` of lm-eval: ``lm_eval.simple_evaluate(model=..., tasks=...)``.

    Args:
        path: as for :func:`load_any`.
        batch_size: sequences scored at a time.
        max_length: tokens of context; by default the model's own, at most 2048.
        device: where it runs, like "cuda"; by default the CPU.

    Raises:
        ModuleNotFoundError: lm-eval is not installed.
        ValueError: ``path`` is no model, or a number is out of range.
    """
    try:
        from gossamer.compress._lm_eval_model import GossamerLM
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ModuleNotFoundError("lm-eval is not installed: pip install lm-eval", name="lm_eval") from error
    return GossamerLM(path, batch_size, max_length, device)
