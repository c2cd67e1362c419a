"""Gandiva-like introspection (Xiao et al., OSDI 2018): time-slicing, and packing by trial and error.

Nothing is known beforehand. When no GPU is empty, a waiting job is packed beside a running one; after a round the
rates of both are looked at, and a pair that gains too little is parted and its kinds are remembered. Jobs that can
neither be placed nor packed take turns: a round-robin with suspension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState, load_of


@dataclass
class GandivaLike:
    """Packing by trial, and time slices.

    gain: a pair stays together while the rates of both, relative to alone, add up to at least this.
    slice_rounds: rounds that a job may hold its GPUs while others wait.
    """

    gain: float = 1.1
    slice_rounds: int = 10
    name: str = "gandiva"
    interval: float | None = 60.0
    adapts_batch: bool = False
    _bad: set[tuple[object, object]] = field(default_factory=set, repr=False)

    def order(self, run: Run) -> float:
        """By the time at which the job began to wait: preempted jobs go to the end."""
        return run.since if run.started is None else run.held + run.service

    def schedule(self, state: ClusterState) -> float | None:
        """Part bad pairs, place, pack, then take turns."""
        assert self.interval is not None
        self._part(state)
        for run in state.pending.first_of_classes():
            gpus = state.packed(run.job.gpus)
            if gpus is None:
                gpus = self._pack(state, run)
            if gpus is not None:
                state.start(run, gpus)
        if state.pending:
            self._take_turns(state)
        return state.now + self.interval if state.pending or any(run.partners for run in state.running) else None

    def _part(self, state: ClusterState) -> None:
        for run in list(state.running):
            for partner in list(run.partners):
                if run.number > partner.number and 1 / run.slowdown + 1 / partner.slowdown < self.gain:
                    self._bad |= {(load_of(run), load_of(partner)), (load_of(partner), load_of(run))}
                    if run.gpus:
                        state.preempt(run)

    def _pack(self, state: ClusterState, run: Run) -> tuple[int, ...] | None:
        """The first GPUs, empty or with one job, on which the gang fits and has not failed before."""
        if state.interference is None or state.empty + state.single < run.job.gpus:
            return None
        found = list(state.packed(state.empty) or ()) if state.empty else []
        for resident in state.running:
            if resident.alone and (load_of(run), load_of(resident)) not in self._bad and state.fits(run, resident):
                if state.interference.factors(load_of(run), load_of(resident)) is None:
                    continue
                found += resident.alone
            if len(found) >= run.job.gpus:
                return tuple(found[: run.job.gpus])
        return None

    def _take_turns(self, state: ClusterState) -> None:
        """Suspend jobs whose slice is over, oldest slice first, for the job that has waited longest."""
        assert self.interval is not None
        head = next(iter(state.pending))
        over = [run for run in state.running if state.now - run.held >= self.slice_rounds * self.interval]
        freed = state.empty + sum(len(run.alone) for run in over)
        if freed < head.job.gpus:
            return
        for run in sorted(over, key=lambda run: run.held):
            if state.empty >= head.job.gpus:
                break
            state.preempt(run)
        gpus = state.packed(head.job.gpus)
        if gpus is not None:
            state.start(head, gpus)
