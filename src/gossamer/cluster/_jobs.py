"""Training jobs, and the checks that no bad one passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gossamer.cluster._cluster import Cluster
from gossamer.cluster._step_time import StepTime

if TYPE_CHECKING:
    from gossamer.cluster._applications import Application


@dataclass(frozen=True, eq=False)
class Profile:
    """What is known about training one model: its step time and memory at a given batch on each GPU.

    model: name, as interference tables know it. batch: samples per GPU and step. table_batch: the batch by which an
    interference table files that load (``batch`` where 0). memory_fixed, memory_per_sample: MiB.

    Raises:
        ValueError: ``batch`` is below 1 or a memory is negative.
    """

    model: str
    step: StepTime
    batch: int
    memory_fixed: float = 0.0
    memory_per_sample: float = 0.0
    table_batch: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if not (self.memory_fixed >= 0 and self.memory_per_sample >= 0):
            raise ValueError(f"memory must not be negative, got {self.memory_fixed}, {self.memory_per_sample} a sample")

    def memory(self, sub_batch: int) -> float:
        """MiB on each GPU when ``sub_batch`` samples are in flight."""
        return self.memory_fixed + self.memory_per_sample * sub_batch

    def sub_batches(self) -> tuple[int, ...]:
        """Sub-batches that accumulate exactly to ``batch``: divisors, each at most half of the one before.

        >>> Profile("m", StepTime(0, 1), batch=24).sub_batches()
        (24, 12, 6, 3, 1)
        """
        found = [self.batch]
        for divisor in range(self.batch // 2, 0, -1):
            if self.batch % divisor == 0 and 2 * divisor <= found[-1]:
                found.append(divisor)
        return tuple(found)

    def slowdown(self, sub_batch: int, placement: Sequence[int], reference: Sequence[int]) -> float:
        """Step time with ``sub_batch`` on ``placement`` (GPUs of each node) over that of full batches on ``reference``."""
        step, gpus = self.step, sum(placement)
        now = step.seconds(sub_batch, self.batch // sub_batch, gpus, len(placement))
        return now / step.seconds(self.batch, 1, gpus, len(reference))

    def load(self, sub_batch: int) -> tuple[str, float]:
        """The name and batch under which an interference table files this load."""
        return self.model, (self.table_batch or self.batch) * sub_batch / self.batch


@dataclass(frozen=True, eq=False)
class Job:
    """A gang of ``gpus`` workers that trains for ``duration`` seconds when alone on tightly packed GPUs.

    id: unique. submit: seconds. profile: what the performance model knows; None where only the duration is known.
    estimate: what the scheduler believes the duration to be (the truth where None). tenant: whose it is.
    application, batch: for elastic jobs, a measured application and its total batch size; ``duration`` is then only a
    scheduler's estimate.
    """

    id: str
    submit: float
    gpus: int
    duration: float
    profile: Profile | None = None
    estimate: float | None = None
    tenant: str = ""
    application: Application | None = field(default=None, repr=False)
    batch: int = 0

    @property
    def expected(self) -> float:
        """Seconds alone, as the scheduler believes."""
        return self.duration if self.estimate is None else self.estimate


def check_jobs(jobs: Iterable[Job], cluster: Cluster) -> list[Job]:
    """The jobs as a list, if every one of them can be run on ``cluster``.

    Raises:
        ValueError: the first job that is wrong, by its row (from 0) and id: a time that is negative or not a number,
            no GPU, a gang or a memory larger than the cluster's, a submission before that of the row above, an id
            that was there before. Nothing is dropped or mended.

    >>> check_jobs([Job("a", 0.0, 8, 60.0)], Cluster(1, 4))
    Traceback (most recent call last):
        ...
    ValueError: job 'a' (row 0): gpus 8 is more than the cluster's 4
    """
    checked, seen, last = [], set(), -math.inf
    for row, job in enumerate(jobs):
        wrong = _fault(job, cluster)
        if not wrong and job.id in seen:
            wrong = "its id was there before"
        if not wrong and job.submit < last:
            wrong = f"submit {job.submit:g} is before {last:g} of the row above; sort the trace by submission"
        if wrong:
            raise ValueError(f"job {job.id!r} (row {row}): {wrong}")
        seen.add(job.id)
        last = job.submit
        checked.append(job)
    return checked


def _fault(job: Job, cluster: Cluster) -> str:
    if not 0 <= job.submit < math.inf:
        return f"submit must be a time from 0 on, got {job.submit}"
    if not 0 < job.duration < math.inf:
        return f"duration must be positive, got {job.duration}"
    if not 0 < job.expected < math.inf:
        return f"estimate must be positive, got {job.estimate}"
    if job.gpus != int(job.gpus) or job.gpus < 1:
        return f"gpus must be a whole number from 1 on, got {job.gpus}"
    if job.gpus > cluster.gpus:
        return f"gpus {job.gpus} is more than the cluster's {cluster.gpus}"
    if job.profile is not None and job.profile.memory(job.profile.batch) > cluster.gpu_memory:
        needed = job.profile.memory(job.profile.batch)
        return f"needs {needed:.0f} MiB on a GPU, which has {cluster.gpu_memory:.0f}"
    return ""
