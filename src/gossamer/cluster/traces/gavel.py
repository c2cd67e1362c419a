"""Gavel's measurements (Narayanan et al., OSDI 2020) as profiles: how a step grows with the batch and with GPUs."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numpy as np

from gossamer.cluster._interference import gavel_load
from gossamer.cluster._jobs import Profile
from gossamer.cluster._step_time import StepTime


def read_profiles(path: str | os.PathLike[str], gpu: str = "v100") -> dict[tuple[str, float], Profile]:
    """A profile per model and batch that was measured alone on one GPU.

    Compute is a line through the step times of a model's batches; the all-reduce is what a step takes longer on 2, 4
    and 8 GPUs, packed on a node or not. Memory is not in the file: which pairs do not fit is in the interference
    table. Batches are rounded down to powers of two or five times them, as measured.

    Raises:
        ValueError: the file has no such GPU.
    """
    measured = json.loads(Path(path).read_text(encoding="utf-8"))
    if gpu not in measured:
        raise ValueError(f"gpu must be one of {', '.join(measured)}, got {gpu!r}")
    within, across = (_step_times(measured.get(name, {})) for name in (gpu, f"{gpu}_unconsolidated"))
    models: dict[str, list[float]] = {}
    for model, batch, gpus in within:
        if gpus == 1:
            models.setdefault(model, []).append(batch)
    profiles = {}
    for model, batches in models.items():
        alpha, beta = _line(np.array(batches), np.array([within[model, batch, 1] for batch in batches]))
        for batch in batches:
            network = [
                _line(*_extra(times, model, batch, within[model, batch, 1])) for times in (across or within, within)
            ]
            step = StepTime(alpha, beta, *network[0], *network[1])
            profiles[model, batch] = Profile(model, step, int(batch))
    return profiles


def _step_times(rates: dict[str, dict[str, float]]) -> dict[tuple[str, float, int], float]:
    """Seconds of a step by model, batch and number of GPUs; without those that did not run."""
    times = {}
    for key, row in rates.items():
        name, gpus = ast.literal_eval(key)
        if row["null"] > 0:
            times[*gavel_load(name), int(gpus)] = gpus / row["null"]  # rates of gangs are sums over their workers
    return times


def _extra(
    times: dict[tuple[str, float, int], float], model: str, batch: float, alone: float
) -> tuple[np.ndarray, np.ndarray]:
    """GPUs beyond two, and the time that a step takes more than on one GPU."""
    found = {gpus: seconds for (name, size, gpus), seconds in times.items() if (name, size) == (model, batch)}
    several = [gpus for gpus in sorted(found) if gpus > 1]
    return np.array(several, dtype=float) - 2, np.array([max(0.0, found[gpus] - alone) for gpus in several])


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope, neither negative, of the least squares line."""
    if not len(x):
        return 0.0, 0.0
    if len(x) == 1:
        return float(y[0]), 0.0
    from scipy.optimize import nnls

    (alpha, beta), _ = nnls(np.stack([np.ones_like(x), x], axis=1), y)
    return float(alpha), float(beta)
