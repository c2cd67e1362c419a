"""Tiresias (Gu et al., NSDI 2019): least attained service in two queues, without knowing how long jobs are.

A job sinks to the second queue when its GPUs times its executed time pass a threshold. Both queues are first in, first
out; the first goes before the second; whoever does not fit is preempted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass
class Tiresias:
    """Discretised two-dimensional least attained service with two queues.

    threshold: GPU-seconds after which a job sinks (16 GPU-hours in the comparison of Pollux, OSDI 2021).
    promote: a sunk job rises again when it has waited ``promote`` times as long as it has run; 0 never.
    """

    threshold: float = 57_600.0
    promote: float = 0.0
    name: str = "tiresias"
    interval: float | None = 60.0
    adapts_batch: bool = False
    _sunk: dict[Run, None] = field(default_factory=dict, repr=False)
    _base: dict[Run, float] = field(default_factory=dict, repr=False)
    _waiting_since: dict[Run, float] = field(default_factory=dict, repr=False)

    def order(self, run: Run) -> float:
        """By submission; the queues are kept here."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> float | None:
        """Sink and raise jobs, choose who runs, preempt the others; look again when the next job would sink."""
        now = state.now
        self._sunk = {run: None for run in self._sunk if run.finished is None}
        active = sorted([*state.running, *state.pending])
        for run in sorted(state.running):
            if run not in self._sunk and self._attained(run, now) >= self.threshold:
                self._sunk[run] = None
        self._raise(state)
        room, stay = state.cluster.gpus, []
        upper = [run for run in active if run not in self._sunk]
        for run in (*upper, *self._sunk):
            if run.job.gpus <= room:
                room -= run.job.gpus
                stay.append(run)
            elif run.gpus:
                state.preempt(run)
                self._waiting_since[run] = now
        for run in stay:
            if not run.gpus:
                gpus = state.spread(run.job.gpus)
                assert gpus is not None
                state.start(run, gpus)
                self._waiting_since.pop(run, None)
        sinks = [
            now + (self.threshold - self._attained(run, now)) / run.job.gpus
            for run in state.running
            if run not in self._sunk
        ]
        rises = [self._rises_at(run, now) for run in self._sunk if not run.gpus] if self.promote else []
        again = min([*sinks, *rises], default=math.inf)
        return again if again < math.inf else None

    def _attained(self, run: Run, now: float) -> float:
        return run.gpu_seconds(now) - self._base.get(run, 0.0)

    def _rises_at(self, run: Run, now: float) -> float:
        executed = self._attained(run, now) / run.job.gpus
        return self._waiting_since.get(run, now) + self.promote * executed

    def _raise(self, state: ClusterState) -> None:
        if not self.promote:
            return
        now = state.now
        for run in list(self._sunk):
            if not run.gpus and now >= self._rises_at(run, now):
                del self._sunk[run]
                self._base[run] = run.gpu_seconds(now)
