"""One job on its way through the simulated cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from gossamer.cluster._jobs import Job
from gossamer.core.events import Event


class Trainer(Protocol):
    """How a job's work goes on. Work is counted in the trainer's own unit; the engine only integrates speed.

    work: all that is to be done.
    """

    work: float

    def place(self, placement: tuple[int, ...], sub_batch: int) -> None:
        """The job now runs with so many GPUs on each node."""

    def speed(self, done: float) -> float:
        """Work per second, alone on its GPUs, once ``done`` is done."""

    def milestone(self, done: float) -> float:
        """The amount of work at which the speed changes next, or all of it."""


class FixedTrainer:
    """A rigid job: its work is its seconds alone, on tightly packed GPUs with full batches."""

    __slots__ = ("_job", "_packed", "_speed", "work")

    def __init__(self, job: Job, packed: tuple[int, ...]) -> None:
        self.work = job.duration
        self._job, self._packed, self._speed = job, packed, 1.0

    def place(self, placement: tuple[int, ...], sub_batch: int) -> None:
        """A looser placement or smaller sub-batches slow the job down, as its profile says."""
        profile = self._job.profile
        if profile is not None:
            self._speed = 1.0 / profile.slowdown(sub_batch, placement, self._packed)

    def speed(self, done: float) -> float:
        """Constant while the placement is."""
        return self._speed

    def milestone(self, done: float) -> float:
        """The end."""
        return self.work


class Run:
    """The state of a job; policies read it and never write it.

    done: work done at ``since``. gpus: GPU numbers, empty while the job waits. slowdown: by sharing, gang-wide.
    partners: runs on the same GPUs, and on how many of them. alone: GPUs that this run has for itself.
    ready: when a start or restart is through. service: GPU-seconds held. turn: counts
    starts of all jobs: of two jobs on a GPU the one with the higher turn came second. started, finished: times or None.
    """

    __slots__ = (
        "alone", "done", "event", "finished", "gpus", "held", "job", "number", "order", "partners", "placement", "ready",
        "restarts", "service", "since", "slowdown", "speed", "started", "sub_batch", "substrate", "trainer", "turn",
    )  # fmt: skip

    def __init__(self, job: Job, number: int, trainer: Trainer) -> None:
        self.job, self.number, self.trainer = job, number, trainer
        self.done, self.since, self.speed, self.ready = 0.0, job.submit, 0.0, 0.0
        self.gpus: tuple[int, ...] = ()
        self.placement: tuple[int, ...] = ()
        self.alone: dict[int, None] = {}
        self.partners: dict[Run, int] = {}
        self.slowdown, self.sub_batch, self.substrate = 1.0, 0, "time-slice"
        self.started: float | None = None
        self.finished: float | None = None
        self.held, self.service, self.restarts, self.turn = 0.0, 0.0, 0, 0
        self.order = 0.0
        self.event: Event | None = None

    def __lt__(self, other: Run) -> bool:
        return self.number < other.number

    @property
    def running(self) -> bool:
        """Whether it has GPUs."""
        return bool(self.gpus)

    def work_done(self, now: float) -> float:
        """Work done by ``now``."""
        return self.done + self.speed * max(0.0, now - max(self.since, self.ready)) if self.gpus else self.done

    def remaining(self, now: float) -> float:
        """Seconds alone that the scheduler believes to be left."""
        return self.job.expected * max(0.0, 1.0 - self.work_done(now) / self.trainer.work)

    def expected_end(self, now: float) -> float:
        """When it ends at its present speed, as the scheduler believes; infinity while it waits."""
        if not self.speed:
            return math.inf
        believed = self.job.expected / self.job.duration if self.job.application is None else 1.0
        left = (self.trainer.work - self.work_done(now)) * believed
        return max(now, self.ready) + left / self.speed

    def gpu_seconds(self, now: float) -> float:
        """GPU-seconds held by ``now``."""
        return self.service + (now - self.held) * len(self.gpus) if self.gpus else self.service


def nodes_of(gpus: Sequence[int], gpus_per_node: int) -> tuple[int, ...]:
    """GPUs on each node used, as a placement.

    >>> nodes_of((0, 1, 5), 4)
    (2, 1)
    """
    if len(gpus) == 1:
        return (1,)
    counts: dict[int, int] = {}
    for gpu in gpus:
        node = gpu // gpus_per_node
        counts[node] = counts.get(node, 0) + 1
    return tuple(counts.values())
