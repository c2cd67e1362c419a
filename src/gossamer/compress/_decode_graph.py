"""One sequence on a GPU: :class:`Decoder`'s steps, by :class:`BatchDecoder`."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.compress._batch_decode import BatchDecoder


class GraphSteps:
    """The steps of one LLaMA-like model."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._decoder = BatchDecoder(model, 1, max_length)

    def fill(self, ids: Tensor) -> None:
        """Put ``ids`` ``(n,)`` at the first positions."""
        self._decoder.prefill(ids[None])

    def step(self, token: int, position: int) -> np.ndarray:
        """Logits ``(vocabulary,)`` after ``token``; the decoder itself knows the position."""
        return self._decoder.step(torch.tensor([token]))[0].float().cpu().numpy()

    def reset(self) -> None:
        """Forget the sequence."""
        self._decoder.rewind(0)

    def profile(self, position: int, steps: int) -> dict[str, float]:
        """Seconds of a step, under the key "step": a median over ``steps``."""
        times = []
        for _ in range(steps):
            start = perf_counter()
            self.step(0, position)
            times.append(perf_counter() - start)
            self._decoder.rewind(position)
        return {"step": median(times)}
