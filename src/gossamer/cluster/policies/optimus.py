"""Optimus (Peng et al., EuroSys 2018): GPUs go one by one to the job whose remaining time falls most.

This is the oracle form that Pollux (OSDI 2021) compares with: the steps that remain and the step time at every number of
GPUs are known. Jobs are elastic and keep the batch size that their owner chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class Optimus:
    """Greedy marginal gain over elastic jobs.

    single: applications that do not scale and get one GPU.
    """

    single: frozenset[str] = frozenset({"ncf"})
    name: str = "optimus"
    interval: float | None = 60.0
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By submission."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> float | None:
        """Work out everybody's number of GPUs; those whose number changes are moved."""
        active = sorted([*state.running, *state.pending], key=lambda run: run.number)
        wanted = self._numbers(state, active)
        for run in list(state.running):
            if len(run.gpus) != wanted[run]:
                state.preempt(run)
        for run in sorted(active, key=lambda run: (wanted[run], run.number)):
            if wanted[run] and not run.gpus:
                gpus = state.spread(wanted[run])
                assert gpus is not None
                state.start(run, gpus)
        assert self.interval is not None
        return state.now + self.interval

    def _numbers(self, state: ClusterState, active: list[Run]) -> dict[Run, int]:
        wanted, room = dict.fromkeys(active, 0), state.cluster.gpus
        gains: list[tuple[float, Run]] = []
        for run in active:
            if room:
                wanted[run], room = 1, room - 1
                gains.append((-self._gain(state, run, 1), run))
        heapify(gains)
        while room and gains and gains[0][0] < 0:
            _, run = heappop(gains)
            wanted[run], room = wanted[run] + 1, room - 1
            heappush(gains, (-self._gain(state, run, wanted[run]), run))
        return wanted

    def _gain(self, state: ClusterState, run: Run, gpus: int) -> float:
        """Seconds saved by one GPU more than ``gpus``."""
        app, batch = run.job.application, run.job.batch
        if app is None:
            raise ValueError(f"optimus schedules elastic jobs only; job {run.job.id!r} has no application")
        if app.name in self.single or gpus + 1 > batch // app.smallest_local:
            return 0.0
        packed = state.cluster.packed
        steps_left = run.trainer.work - run.work_done(state.now)
        return (app.seconds(batch, packed(gpus)) - app.seconds(batch, packed(gpus + 1))) * steps_left
