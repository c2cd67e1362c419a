"""Shortest job first, without preemption."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class SJF:
    """The shortest waiting job that fits starts first.

    ageing: seconds of length forgiven per second of waiting; above 0 no job starves.
    """

    ageing: float = 0.0
    name: str = "sjf"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By remaining time; waiting is a constant shift of all, so ageing counts the submission."""
        return run.remaining(run.since) + self.ageing * run.job.submit

    def schedule(self, state: ClusterState) -> None:
        """Start whatever fits, in order."""
        for run in state.pending.first_of_classes():
            if not state.empty:
                return
            if run.job.gpus <= state.empty:
                gpus = state.packed(run.job.gpus)
                assert gpus is not None
                state.start(run, gpus)
