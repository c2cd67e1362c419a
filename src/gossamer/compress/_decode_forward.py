"""Decoding with a model's own forward and cache: for every causal model of transformers."""

from __future__ import annotations

import inspect
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel


class ForwardSteps:
    """The steps of one model through ``model(ids, cache)``.

    Raises:
        ValueError: the model's forward takes no key/value cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        accepted = inspect.signature(model.forward).parameters
        names = [name for name in ("cache", "past_key_values") if name in accepted]
        if not names:
            raise ValueError(f"{type(model).__name__} keeps no key/value cache, so it cannot decode step by step")
        self._cache_name = names[0]
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache: Any = None

    def fill(self, ids: Tensor) -> None:
        """Put ``ids`` ``(n,)`` at the first positions."""
        self._forward(ids)

    def step(self, token: int, position: int) -> np.ndarray:
        """Logits ``(vocabulary,)`` after ``token``; the cache itself knows the position."""
        return self._forward(torch.tensor([token])).cpu().numpy()

    def reset(self) -> None:
        """Forget the sequence."""
        self._cache = None

    def profile(self, position: int, steps: int) -> dict[str, float]:
        """Seconds of a step, under the key "step": a median over ``steps``."""
        before, times = self._cache, []
        for _ in range(steps):
            self._cache = deepcopy(before)
            start = perf_counter()
            self.step(0, position)
            times.append(perf_counter() - start)
        self._cache = before
        return {"step": median(times)}

    @torch.inference_mode()
    def _forward(self, ids: Tensor) -> Tensor:
        given = {self._cache_name: self._cache, "use_cache": True, **self._options}
        output = self._model(ids[None].to(self._model.device), **given)
        self._cache = output[self._cache_name]
        return output.logits[0, -1].float()
