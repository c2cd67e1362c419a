"""SJF-FFS: shortest job first, and first-fit sharing without asking whether it pays.

The baseline of SJF-BSBF (arXiv 2407.13088): whenever a job does not find enough empty GPUs, it joins the first GPUs with
one job that have the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState, load_of


@dataclass(frozen=True)
class FirstFitSharing:
    """Shortest job first on empty GPUs, else on the first that are not full."""

    name: str = "ffs"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By remaining time."""
        return run.remaining(run.since)

    def schedule(self, state: ClusterState) -> None:
        """Start whatever fits, alone or shared, in order."""
        for run in state.pending.first_of_classes():
            if not state.empty + state.single:
                return
            gpus = state.packed(run.job.gpus)
            if gpus is not None:
                state.start(run, gpus)
                continue
            found = self._first_fit(state, run)
            if found is not None:
                state.start(run, *found)

    def _first_fit(self, state: ClusterState, run: Run) -> tuple[tuple[int, ...], int] | None:
        """GPUs and the largest sub-batch with which the gang fits on them."""
        need = run.job.gpus
        if state.empty + state.single < need:
            return None
        profile = run.job.profile
        for sub_batch in profile.sub_batches() if profile is not None else (0,):
            taken = list(state.packed(state.empty) or ()) if state.empty else []
            for gpu, residents in enumerate(state.residents):
                if len(residents) == 1 and _works(state, run, residents[0], sub_batch):
                    taken.append(gpu)
                    if len(taken) >= need:
                        return tuple(taken[:need]), sub_batch
        return None


def _works(state: ClusterState, run: Run, resident: Run, sub_batch: int) -> bool:
    if not state.fits(run, resident, sub_batch):
        return False
    profile = run.job.profile
    load = profile.load(sub_batch) if profile is not None else load_of(run)
    return state.interference is None or state.interference.factors(load, load_of(resident)) is not None
