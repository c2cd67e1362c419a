"""Goodput: steps per second times what a step is worth (Pollux, Qiao et al., OSDI 2021).

A batch of m times the initial one is worth less than m initial batches: with gradient mean square ``q`` and variance
``v`` (at the initial batch) one step of it is worth ``(v + q) / (v / m + q)`` initial steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossamer.cluster._step_time import StepTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CANDIDATES = 50
_EPS = 1e-8


def gain_of(sqr: float, var: float, scale: float) -> float:
    """Initial steps that one step with ``scale`` times the initial batch is worth, from 1 to ``scale``.

    >>> gain_of(1.0, 1.0, 4.0)
    1.6
    """
    below = var / scale + sqr
    return (var + sqr) / below if below > 0 else 1.0


@dataclass(frozen=True)
class Goodput:
    """A job's goodput as a function of nodes and GPUs, batch chosen best.

    noise: gradient mean square and variance. initial, largest: total batch sizes; smallest_local, largest_local: what
    one GPU takes at a time.
    """

    step: StepTime
    noise: tuple[float, float]
    initial: int
    largest: int
    smallest_local: int
    largest_local: int

    def best_batch(self, nodes: int, gpus: int) -> tuple[int, int]:
        """Local batch and accumulation steps of best goodput."""
        goodput, local, accumulation = self._candidates(np.array([nodes]), np.array([gpus]))
        best = int(goodput[:, 0].argmax())
        return int(local[best, 0]), int(accumulation[best, 0])

    def best(self, nodes: NDArray, gpus: NDArray) -> NDArray:
        """Best goodput (initial steps per second) for each pair of nodes and GPUs."""
        return self._candidates(nodes, gpus)[0].max(axis=0)

    def _candidates(self, nodes: NDArray, gpus: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """Goodput, local batch and accumulation for total batches in geometric steps, ``(candidates, pairs)``."""
        smallest = np.maximum(self.initial, self.smallest_local * gpus)
        total = np.geomspace(np.minimum(smallest, self.largest), self.largest, _CANDIDATES)
        local = total / gpus
        accumulation = np.ceil(local / self.largest_local - _EPS)
        alone_and_larger = (gpus == 1) & (local > self.initial + _EPS)
        accumulation = np.maximum(accumulation, np.where(alone_and_larger, 2, 1)).astype(int)
        atomic = np.ceil(local / accumulation - _EPS).astype(int)
        step = self.step
        compute = step.alpha_compute + step.beta_compute * atomic
        beyond = np.maximum(gpus - 2, 0)
        across, within = step.alpha_across + step.beta_across * beyond, step.alpha_within + step.beta_within * beyond
        network = np.where(nodes > 1, across, np.where(gpus > 1, within, 0.0)) + 1e-12
        last = (compute**step.overlap + network**step.overlap) ** (1 / step.overlap)
        scale = gpus * atomic * accumulation / self.initial
        sqr, var = self.noise
        below = var / scale + sqr
        gain = np.divide(var + sqr, below, out=np.ones_like(scale), where=below > 0)
        goodput = gain / (last + (accumulation - 1) * compute)
        allowed = (atomic >= self.smallest_local) & (atomic <= self.largest_local)
        return np.where(allowed, goodput, 0.0), atomic, accumulation
