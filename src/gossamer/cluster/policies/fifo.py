"""First in, first out: what a plain queue does, gangs and head-of-line blocking included."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class FIFO:
    """Jobs start in the order of their submission; one that does not fit holds up all behind it."""

    name: str = "fifo"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By submission."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> None:
        """Start from the head of the queue while it fits."""
        for run in state.pending.first_of_classes():
            gpus = state.packed(run.job.gpus)
            if gpus is None:
                return
            state.start(run, gpus)
