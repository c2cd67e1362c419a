"""Replay a trace under a policy.

One engine for all policies, so that they can be compared: restarts cost time, memory is respected, gangs are whole, and
a job that shares slows down as a whole. Nothing happens between events: the cost is linear in their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gossamer.cluster._applications import AdaptiveTrainer, FixedBatchTrainer
from gossamer.cluster._cluster import Cluster
from gossamer.cluster._interference import Interference
from gossamer.cluster._jobs import Job, check_jobs
from gossamer.cluster._run import FixedTrainer, Run, Trainer
from gossamer.cluster._state import ClusterState
from gossamer.core.events import Event, Simulation

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Policy(Protocol):
    """A scheduler: one file with one ``schedule``.

    name: for tables. interval: seconds between rounds; None schedules at every arrival and end. adapts_batch: whether
    elastic jobs choose their batch themselves.
    """

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def interval(self) -> float | None:
        """Seconds between rounds."""

    @property
    def adapts_batch(self) -> bool:
        """Whether elastic jobs choose their batch."""

    def order(self, run: Run) -> float:
        """The place of a job in the queue, fixed while it waits: smaller is earlier."""

    def schedule(self, state: ClusterState) -> float | None:
        """Start, preempt and move jobs; give the time of the next look, or None for the next arrival or end."""


@dataclass(frozen=True)
class Result:
    """What became of a trace: one entry per job, in the trace's order, times in seconds.

    alone: seconds alone. segments: ``(job's row, GPUs, from, to)`` for every stretch that a job held GPUs.
    queue: ``(times, waiting jobs)``, a step function. events, seconds: what the simulator did and took.
    """

    policy: str
    cluster: Cluster
    jobs: list[Job]
    submit: NDArray
    start: NDArray
    finish: NDArray
    restarts: NDArray
    shared: NDArray
    gpus: NDArray
    alone: NDArray
    segments: list[tuple[int, tuple[int, ...], float, float]]
    queue: tuple[NDArray, NDArray]
    events: int
    seconds: float

    @property
    def jct(self) -> NDArray:
        """Completion times: from submission to end."""
        return self.finish - self.submit

    @property
    def queueing(self) -> NDArray:
        """From submission to first start."""
        return self.start - self.submit

    @property
    def makespan(self) -> float:
        """From the first submission to the last end."""
        return float(self.finish.max() - self.submit.min())

    def utilisation(self) -> float:
        """GPU-seconds with at least one job, over all GPU-seconds of the makespan."""
        return self._busy_gpu_seconds() / (self.cluster.gpus * self.makespan)

    def energy(self) -> float:
        """Joules of all GPUs over the makespan, at the cluster's idle and busy power."""
        busy, total = self._busy_gpu_seconds(), self.cluster.gpus * self.makespan
        return busy * self.cluster.busy_watts + (total - busy) * self.cluster.idle_watts

    def _busy_gpu_seconds(self) -> float:
        """The measure of the union of all stretches, GPU by GPU."""
        stretches: list[list[tuple[float, float]]] = [[] for _ in range(self.cluster.gpus)]
        for _, gpus, begin, end in self.segments:
            for gpu in gpus:
                stretches[gpu].append((begin, end))
        total = 0.0
        for stretch in stretches:
            covered = -math.inf
            for begin, end in sorted(stretch):
                total += max(0.0, end - max(begin, covered))
                covered = max(covered, end)
        return total

    def summary(self) -> dict[str, float | int | str]:
        """The usual figures: seconds, shares and counts.

        A large job has more than four GPUs, as in the paper of SJF-BSBF.
        """
        jct, large = self.jct, self.gpus > 4
        return {
            "policy": self.policy,
            "jobs": len(jct),
            "mean_jct": float(jct.mean()),
            "median_jct": float(np.median(jct)),
            "p99_jct": float(np.quantile(jct, 0.99)),
            "mean_jct_large": float(jct[large].mean()) if large.any() else 0.0,
            "mean_jct_small": float(jct[~large].mean()) if (~large).any() else 0.0,
            "mean_queueing": float(self.queueing.mean()),
            "makespan": self.makespan,
            "utilisation": self.utilisation(),
            "energy": self.energy(),
            "restarts": int(self.restarts.sum()),
            "shared": int(self.shared.sum()),
            "worst_unfairness": float((jct / self.alone).max()),
            "events": self.events,
            "seconds": self.seconds,
        }


def simulate(
    jobs: Iterable[Job],
    cluster: Cluster,
    policy: Policy,
    interference: Interference | None = None,
    restart_seconds: float = 30.0,
    start_seconds: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Replay ``jobs`` on ``cluster`` under ``policy``.

    interference: how much jobs on one GPU slow each other down; needed by policies that share.
    restart_seconds, start_seconds: what resuming a preempted or moved job costs, and what a first start costs; the
        job holds its GPUs meanwhile.
    progress: called as ``progress(finished jobs, all jobs)`` now and then.

    Raises:
        ValueError: a job is wrong (:func:`check_jobs`), a cost is negative, or the policy leaves jobs waiting for
            ever, or makes a move that the cluster does not allow.

    >>> from gossamer.cluster import FIFO
    >>> jobs = [Job("a", 0.0, 1, 10.0), Job("b", 1.0, 1, 2.0)]
    >>> simulate(jobs, Cluster(1, 1), FIFO()).jct.tolist()
    [10.0, 11.0]
    """
    for name, cost in (("restart_seconds", restart_seconds), ("start_seconds", start_seconds)):
        if not cost >= 0:
            raise ValueError(f"{name} must not be negative, got {cost}")
    replay = _Replay(check_jobs(jobs, cluster), cluster, policy, interference, restart_seconds, start_seconds, progress)
    return replay.run()


class _Replay:
    """The loop: arrivals one by one, ends, and a scheduling event where either calls for it."""

    def __init__(
        self,
        jobs: list[Job],
        cluster: Cluster,
        policy: Policy,
        interference: Interference | None,
        restart_seconds: float,
        start_seconds: float,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.simulation = Simulation()
        self.cluster, self.policy, self.progress = cluster, policy, progress
        self.runs = [Run(job, row, self._trainer(job)) for row, job in enumerate(jobs)]
        self.state = ClusterState(
            cluster, self.simulation, interference, restart_seconds, start_seconds, policy.order, self._finished
        )
        self.finished = 0
        self.queue: list[tuple[float, int]] = []
        self._round: Event | None = None

    def run(self) -> Result:
        begin = perf_counter()
        if self.runs:
            self.simulation.at(self.runs[0].job.submit, lambda: self._arrive(0))
            self.simulation.run()
        if self.finished < len(self.runs):
            waiting = next(run for run in self.runs if run.finished is None)
            raise ValueError(
                f"policy {self.policy.name} leaves {len(self.runs) - self.finished} jobs waiting for ever, "
                f"the first is {waiting.job.id!r} with {waiting.job.gpus} GPUs"
            )
        return self._result(perf_counter() - begin)

    def _trainer(self, job: Job) -> Trainer:
        if job.application is not None:
            return AdaptiveTrainer(job) if self.policy.adapts_batch else FixedBatchTrainer(job)
        return FixedTrainer(job, self.cluster.packed(job.gpus))

    def _arrive(self, row: int) -> None:
        now = self.simulation.now
        while row < len(self.runs) and self.runs[row].job.submit <= now:
            self.state.submit(self.runs[row])
            row += 1
        if row < len(self.runs):
            self.simulation.at(self.runs[row].job.submit, lambda: self._arrive(row))
        self._look(now)

    def _finished(self, run: Run) -> None:
        self.finished += 1
        if self.progress is not None and self.finished % 1024 == 0:
            self.progress(self.finished, len(self.runs))
        self._look(self.simulation.now)

    def _look(self, time: float) -> None:
        """Have the policy look at ``time``, or at the round after it, after everything else of that moment."""
        interval = self.policy.interval
        if interval is not None:
            time = interval * math.ceil(time / interval - 1e-9)
        if self._round is not None and self._round.pending:
            if self._round.time <= time:
                return
            self._round.cancel()
        self._round = self.simulation.at(max(time, self.simulation.now), self._schedule, priority=1)

    def _schedule(self) -> None:
        state, now = self.state, self.simulation.now
        if not (state.pending or state.running):
            return
        again = self.policy.schedule(state)
        self.queue.append((now, len(state.pending)))
        if again is not None:
            interval = self.policy.interval
            self._look(max(again, now + interval) if interval is not None else again)

    def _result(self, seconds: float) -> Result:
        runs = self.runs
        segments = [(run.number, gpus, begin, end) for run, gpus, begin, end in self.state.segments]
        times, waiting = zip(*self.queue, strict=True) if self.queue else ((), ())
        return Result(
            policy=self.policy.name,
            cluster=self.cluster,
            jobs=[run.job for run in runs],
            submit=np.array([run.job.submit for run in runs]),
            start=np.array([run.started for run in runs], dtype=float),
            finish=np.array([run.finished for run in runs], dtype=float),
            restarts=np.array([run.restarts for run in runs], dtype=int),
            shared=_shared(segments, self.cluster.gpus, len(runs)),
            gpus=np.array([run.job.gpus for run in runs], dtype=int),
            alone=np.array([run.job.duration for run in runs]),
            segments=segments,
            queue=(np.array(times), np.array(waiting)),
            events=self.simulation.done,
            seconds=seconds,
        )


def _shared(segments: list[tuple[int, tuple[int, ...], float, float]], gpus: int, jobs: int) -> NDArray:
    """Which jobs were on one GPU with another at some time."""
    shared = np.zeros(jobs, dtype=bool)
    last: list[tuple[float, int]] = [(-math.inf, -1)] * gpus
    for row, used, begin, end in sorted(segments, key=lambda segment: segment[2]):
        for gpu in used:
            busy_until, other = last[gpu]
            if begin < busy_until:
                shared[row] = shared[other] = True
            last[gpu] = max(last[gpu], (end, row))
    return shared
