"""EASY backfilling (Lifka, JSSPP 1995): what Slurm and most production clusters do.

The head of the queue gets a reservation at the earliest time at which enough GPUs will be free; jobs behind it may start
at once where they end before that time, or leave its GPUs alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class EasyBackfill:
    """First in, first out, with small jobs filling the holes that do not delay the head of the queue."""

    name: str = "easy"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By submission."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> None:
        """Start the head while it fits; then fill."""
        waiting = iter(state.pending)
        for head in waiting:
            gpus = state.packed(head.job.gpus)
            if gpus is None:
                break
            state.start(head, gpus)
        else:
            return
        reserved_at, spare = _reservation(state, head.job.gpus)
        for run in waiting:
            if not state.empty:
                return
            gpus = state.packed(run.job.gpus)
            if gpus is None:
                continue
            if state.now + run.remaining(state.now) <= reserved_at:
                state.start(run, gpus)
            elif run.job.gpus <= spare:
                spare -= run.job.gpus
                state.start(run, gpus)


def _reservation(state: ClusterState, gpus: int) -> tuple[float, int]:
    """When ``gpus`` will be free, and how many more are free then."""
    free = state.empty
    for end, run in sorted((run.expected_end(state.now), run) for run in state.running):
        free += len(run.gpus)
        if free >= gpus:
            return end, free - gpus
    raise ValueError(f"a gang of {gpus} GPUs can never start on this cluster")
