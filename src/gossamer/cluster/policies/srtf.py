"""Shortest remaining time first: the preemptive form of SJF, which pays for its restarts."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class SRTF:
    """At every arrival and end the jobs with least remaining time hold the GPUs.

    weigh_gpus: compare remaining GPU-time instead, which is shortest remaining *service* first (SRSF).
    """

    weigh_gpus: bool = False
    name: str = "srtf"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By remaining time (or GPU-time)."""
        return run.remaining(run.since) * (run.job.gpus if self.weigh_gpus else 1)

    def schedule(self, state: ClusterState) -> None:
        """Choose who runs, shortest first; stop the others; start the chosen."""
        now = state.now
        weight = (lambda run: run.job.gpus) if self.weigh_gpus else (lambda run: 1)
        active = [(run.remaining(now) * weight(run), run) for run in (*state.running, *state.pending)]
        room, stay = state.cluster.gpus, []
        for _, run in sorted(active):
            if run.job.gpus <= room:
                room -= run.job.gpus
                stay.append(run)
        for run in set(state.running) - set(stay):
            state.preempt(run)
        for run in stay:
            if not run.gpus:
                gpus = state.packed(run.job.gpus)
                assert gpus is not None
                state.start(run, gpus)
