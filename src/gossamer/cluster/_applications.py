"""Elastic jobs: applications whose step time was measured on many placements and whose gradients were, too.

Reads the tables published with Pollux (Qiao et al., OSDI 2021): step and synchronisation time per placement and local
batch, and the mean and variance of the gradient per epoch and batch. Work is counted in steps at the initial batch
size: a larger batch makes a step worth more, but not in proportion, as the gradient's noise says.
"""

from __future__ import annotations

import csv
import math
import os
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.cluster._goodput import Goodput, gain_of
from gossamer.cluster._jobs import Job
from gossamer.cluster._step_time import StepTime

if TYPE_CHECKING:
    from numpy.typing import NDArray

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Epochs that each of the six published applications trains."""

_LARGEST_LOCAL = {"yolov3": 8}
_LARGEST_NODES = 16


@dataclass(eq=False)
class Application:
    """One measured application; make it with :meth:`read`.

    placements: ``(measured placement) -> (local batches, step times, synchronisation times)``.
    validated: ``batch -> (progress, mean square gradient, gradient variance)``, each by epoch.
    smallest_local, largest_local: local batches that were measured.
    """

    name: str
    epochs: int
    placements: dict[tuple[int, ...], tuple[NDArray, NDArray, NDArray]]
    scalability: NDArray
    validated: dict[int, tuple[NDArray, NDArray, NDArray]]
    smallest_local: int
    largest_local: int
    _steps: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict, repr=False)
    _totals: dict[int, float] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, folder: str | os.PathLike[str], epochs: int | None = None) -> Application:
        """Read ``placements.csv``, ``scalability.csv`` and ``validation-BATCH.csv`` of one application.

        epochs: how long it trains; by default what was published for the folder's name, or all that were measured.

        Raises:
            FileNotFoundError: a table is missing.
            ValueError: a column is missing, or a placement has no time.
        """
        folder = Path(folder)
        rows = _table(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"))
        grouped: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        for placement, *numbers in rows:
            grouped.setdefault(tuple(map(int, placement)), []).append(tuple(map(float, numbers)))
        placements = {placement: _three_columns(np.array(sorted(times))) for placement, times in grouped.items()}
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        scalability = np.array(_table(folder / "scalability.csv", columns), dtype=float)
        validated = {}
        for path in folder.glob("validation-*.csv"):
            table = np.array(_table(path, ("progress", "grad_sqr", "grad_var")), dtype=float)
            validated[int(path.stem.split("-")[1])] = _three_columns(table)
        if not validated:
            raise FileNotFoundError(f"{folder} has no validation-*.csv")
        locals_ = [int(batch) for batches, _, _ in placements.values() for batch in batches]
        return cls(
            name=folder.name,
            epochs=epochs or EPOCHS.get(folder.name) or min(len(table[0]) for table in validated.values()),
            placements=placements,
            scalability=scalability,
            validated=dict(sorted(validated.items())),
            smallest_local=min(locals_),
            largest_local=_LARGEST_LOCAL.get(folder.name, max(locals_)),
        )

    @property
    def initial_batch(self) -> int:
        """The batch size that progress is counted in."""
        return next(iter(self.validated))

    @property
    def largest_batch(self) -> int:
        """The largest batch size that was validated."""
        return next(reversed(self.validated))

    @cached_property
    def boundaries(self) -> list[float]:
        """Progress at the end of each epoch: that of the quickest batch size."""
        return [float(min(table[0][epoch] for table in self.validated.values())) for epoch in range(self.epochs)]

    def gradients(self, batch: float, epoch: int) -> tuple[float, float]:
        """Mean square and variance of the gradient, interpolated between validated batch sizes."""
        known = list(self.validated)
        epoch = min(epoch, self.epochs - 1)
        sqr = [self.validated[size][1][epoch] for size in known]
        var = [self.validated[size][2][epoch] for size in known]
        return float(np.interp(batch, known, sqr)), float(np.interp(batch, known, var))

    def step(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        """Seconds of one step and of its synchronisation part.

        Placements that were measured are interpolated over the batch; others over nodes, GPUs and batch.

        Raises:
            ValueError: it lies outside what was measured.
        """
        turned = min(placement[turn:] + placement[:turn] for turn in range(len(placement)))
        key = (turned, local)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._interpolated(turned, local)
        return found

    def _interpolated(self, placement: tuple[int, ...], local: int) -> tuple[float, float]:
        measured = self.placements.get(placement)
        if measured is not None and measured[0][0] <= local <= measured[0][-1]:
            batches, steps, syncs = measured
            return float(np.interp(local, batches, steps)), float(np.interp(local, batches, syncs))
        nodes = min(len(placement), _LARGEST_NODES)
        step, sync = self._volume([[nodes, sum(placement), local]])[0]
        if not step > 0:
            raise ValueError(f"{self.name} was not measured near placement {placement} with local batch {local}")
        return float(step), float(sync)

    @cached_property
    def _volume(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator

        means: dict[tuple[float, ...], list[tuple[float, float]]] = {}
        for placement, (batches, steps, syncs) in self.placements.items():
            for batch, step, sync in zip(batches, steps, syncs, strict=True):
                means.setdefault((len(placement), sum(placement), batch), []).append((step, sync))
        points = np.array([*means, *(tuple(row[:3]) for row in self.scalability)])
        values = np.array([*(np.mean(times, axis=0) for times in means.values()), *self.scalability[:, 3:]])
        return LinearNDInterpolator(points, values)

    def split(self, batch: int, gpus: int) -> tuple[int, int]:
        """Local batch and accumulation steps (1 or more) by which ``gpus`` GPUs make up ``batch``.

        One GPU above the initial batch accumulates at least twice: gradient noise cannot be told from one sample.
        """
        local = math.ceil(batch / gpus - 1e-8)
        accumulation = math.ceil(local / self.largest_local - 1e-8)
        if gpus == 1 and batch > self.initial_batch:
            accumulation = max(2, accumulation)
        atomic = math.ceil(local / accumulation - 1e-8)
        return min(atomic, self.largest_batch // (gpus * accumulation)), accumulation

    def seconds(self, batch: int, placement: tuple[int, ...]) -> float:
        """Seconds of a step of ``batch`` samples in all."""
        local, accumulation = self.split(batch, sum(placement))
        step, sync = self.step(placement, local)
        return step + (step - sync) * (accumulation - 1)

    def steps(self, size: int) -> float:
        """Steps of ``size`` samples that the whole training takes."""
        known = self._totals.get(size)
        if known is None:
            scale = size / self.initial_batch
            epochs = np.diff([0.0, *self.boundaries])
            known = sum(
                float(progress) / gain_of(*self.gradients(size, epoch), scale) for epoch, progress in enumerate(epochs)
            )
            self._totals[size] = known
        return known

    def duration(self, batch: int, placement: tuple[int, ...]) -> float:
        """Seconds of the whole training at a fixed batch and placement."""
        gpus = sum(placement)
        local, accumulation = self.split(batch, gpus)
        return self.steps(gpus * local * accumulation) * self.seconds(batch, placement)


class FixedBatchTrainer:
    """An elastic job that keeps the batch of its owner: its work is counted in its own steps.

    A step is worth less or more from epoch to epoch, but how many steps the training takes is known beforehand. On a
    number of GPUs that the batch does not divide by, a step is a little larger, and worth that much more in the mean.
    """

    def __init__(self, job: Job) -> None:
        assert job.application is not None
        self._app, self._batch = job.application, job.batch
        self.work = self._steps(job.gpus)
        self._speed = 0.0

    def _steps(self, gpus: int) -> float:
        return self._app.steps(self._size(gpus))

    def _size(self, gpus: int) -> int:
        local, accumulation = self._app.split(self._batch, gpus)
        return gpus * local * accumulation

    def place(self, placement: tuple[int, ...], sub_batch: int) -> None:
        """New GPUs, another time per step."""
        worth = self.work / self._steps(sum(placement))
        self._speed = worth / self._app.seconds(self._batch, placement)

    def milestone(self, done: float) -> float:
        """The end."""
        return self.work

    def speed(self, done: float) -> float:
        """Steps per second."""
        return self._speed


class AdaptiveTrainer:
    """An elastic job that chooses its batch: goodput changes with placement and, epoch by epoch, the gradient's noise.

    The job learns its step time from what it sees and takes the batch of best goodput, as in Pollux. Work is counted
    in steps at the initial batch size.
    """

    def __init__(self, job: Job) -> None:
        assert job.application is not None
        self.app = job.application
        self.work = self.app.boundaries[-1]
        self.epoch = 0
        self.local, self.accumulation = 0, 1
        self.fitted: StepTime | None = None
        self.noise: tuple[float, float] = (0.0, 0.0)
        self.seen: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._placement: tuple[int, ...] = ()

    def place(self, placement: tuple[int, ...], sub_batch: int) -> None:
        """New GPUs: choose the batch anew."""
        self._placement = placement

    def milestone(self, done: float) -> float:
        """The end of the present epoch."""
        return self.app.boundaries[min(bisect_right(self.app.boundaries, done), self.app.epochs - 1)]

    def speed(self, done: float) -> float:
        """Steps of the initial batch size per second, which is goodput."""
        app, gpus = self.app, sum(self._placement)
        self.epoch = min(bisect_right(app.boundaries, done), app.epochs - 1)
        if self.fitted is None:
            self.local, self.accumulation = app.split(max(app.initial_batch, app.smallest_local * gpus), gpus)
        else:
            self.local, self.accumulation = self.goodput().best_batch(len(self._placement), gpus)
        size = gpus * self.local * self.accumulation
        step, sync = app.step(self._placement, self.local)
        self.noise = app.gradients(size, self.epoch)
        self._learn(gpus, step, sync)
        seconds = step + (step - sync) * (self.accumulation - 1)
        return gain_of(*self.noise, size / app.initial_batch) / seconds

    def _learn(self, gpus: int, step: float, sync: float) -> None:
        key = len(self._placement), gpus, self.local
        if key in self.seen:
            return
        self.seen[key] = step - sync, step
        nodes, replicas, batches = zip(*self.seen, strict=True)
        compute, whole = zip(*self.seen.values(), strict=True)
        self.fitted = StepTime.fit(nodes, replicas, batches, compute, whole)

    def goodput(self) -> Goodput:
        """What the job believes of its own goodput; needs a first step."""
        assert self.fitted is not None
        app = self.app
        limits = app.initial_batch, app.largest_batch, app.smallest_local, app.largest_local
        return Goodput(self.fitted, self.noise, *limits)


def _three_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first, second, third = table.T
    return first, second, third


def _table(path: Path, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in columns if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ())}")
        return [tuple(row[name] for name in columns) for row in reader]
