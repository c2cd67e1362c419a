"""Pollux (Qiao et al., OSDI 2021): GPUs and batch sizes together, for goodput that is shared fairly.

Every round a genetic search goes over whole allocations, a matrix of jobs by nodes. An allocation is as good as the power
mean (exponent -1, which favours those who have least) of the jobs' speed-ups over a fair share; a job that would be
moved counts less the more often it has been moved. No two jobs that span nodes share a node.

The search here keeps the best of parents and children (the published one sorts by a second objective too, the use of
the cluster, and takes the best in the first).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.cluster._applications import AdaptiveTrainer
from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOOR = 1e-3
_RESTART = 30.0


@dataclass
class Pollux:
    """Co-adaptive scheduling of elastic jobs.

    population, generations: of the genetic search in every round. single: applications that get one GPU and the batch
    that their owner chose. seed: of the search.
    """

    population: int = 100
    generations: int = 100
    single: frozenset[str] = frozenset({"ncf"})
    seed: int = 0
    largest_gang: int = 64
    name: str = "pollux"
    interval: float | None = 60.0
    adapts_batch: bool = True
    _states: NDArray | None = field(default=None, repr=False)
    _jobs: list[Run] = field(default_factory=list, repr=False)
    _speedups: dict[Run, tuple[Any, NDArray]] = field(default_factory=dict, repr=False)
    _rounds: int = 0

    def order(self, run: Run) -> float:
        """By submission."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> float | None:
        """Search for an allocation, starting from the last round's population, and carry it out."""
        from gossamer.cluster.policies._pollux_search import search

        now = state.now
        runs = sorted([*state.running, *state.pending], key=lambda run: (run.gpu_seconds(now), run.number))
        nodes, per_node = state.cluster.nodes, state.cluster.gpus_per_node
        base = np.zeros((len(runs), nodes), dtype=np.int64)
        for row, run in enumerate(runs):
            for gpu in run.gpus:
                base[row, state.cluster.node(gpu)] += 1
        limits = np.array([self._most_gpus(run) for run in runs])
        fair = -(-state.cluster.gpus // len(runs))
        table = np.stack([self._speedup(run, nodes, per_node, fair) for run in runs])
        age = np.array([now - run.job.submit for run in runs])
        moved = np.array([run.restarts for run in runs])
        keep = np.maximum(age - moved * _RESTART, 0.0) / (age + _RESTART)
        share = nodes / state.cluster.gpus
        seeds = self._carried_over(runs, nodes, base)
        self._rounds += 1
        ranked = search(
            base, seeds, table * share, keep, limits, per_node, self.population, self.generations,
            self.seed * 1_000_003 + self._rounds,
        )  # fmt: skip
        self._states, self._jobs = ranked, runs
        self._carry_out(state, runs, base, ranked[0])
        assert self.interval is not None
        return now + self.interval

    def _most_gpus(self, run: Run) -> int:
        """At most twice as many GPUs as the job has been seen on: it has to be explored step by step."""
        trainer = _trainer(run)
        if trainer.app.name in self.single:
            return 1
        seen = max((gpus for _, gpus, _ in trainer.seen), default=0)
        return min(max(2 * seen, 1), self.largest_gang, trainer.app.largest_batch // trainer.app.smallest_local)

    def _speedup(self, run: Run, nodes: int, per_node: int, fair: int) -> NDArray:
        """Speed-up over the fair share, ``(nodes + 1, largest gang + 1)``; zero where there is no GPU."""
        trainer = _trainer(run)
        key = (trainer.fitted, trainer.noise)
        known = self._speedups.get(run)
        if known is None or known[0] != key:
            known = self._speedups[run] = key, self._goodputs(trainer, nodes, per_node)
        goodputs = known[1]
        return goodputs / max(goodputs[1, min(fair, self.largest_gang)], 1e-12)

    def _goodputs(self, trainer: AdaptiveTrainer, nodes: int, per_node: int) -> NDArray:
        table = np.zeros((nodes + 1, self.largest_gang + 1))
        on, gpus = np.meshgrid(np.arange(1, nodes + 1), np.arange(1, self.largest_gang + 1), indexing="ij")
        possible = (gpus >= on) & ((gpus <= per_node * on) | (on == 1))  # a fair share is thought of as on one node
        if trainer.fitted is None:
            table[on[possible], gpus[possible]] = gpus[possible]
        else:
            table[on[possible], gpus[possible]] = trainer.goodput().best(on[possible], gpus[possible])
        return table

    def _carried_over(self, runs: list[Run], nodes: int, base: NDArray) -> NDArray:
        """The last population for the jobs that are still there; others begin with nothing."""
        if self._states is None:
            return base[None]
        seeds = np.zeros((len(self._states), len(runs), nodes), dtype=np.int64)
        rows = {run: row for row, run in enumerate(self._jobs)}
        for row, run in enumerate(runs):
            if run in rows:
                seeds[:, row] = self._states[:, rows[run]]
        for run in [run for run in self._speedups if run.finished is not None]:
            del self._speedups[run]
        return np.concatenate([base[None], seeds])

    def _carry_out(self, state: ClusterState, runs: list[Run], base: NDArray, wanted: NDArray) -> None:
        changed = [row for row in range(len(runs)) if (wanted[row] != base[row]).any()]
        for row in changed:
            if runs[row].gpus:
                state.preempt(runs[row])
        for row in changed:
            if wanted[row].any():
                state.start(runs[row], state.on_nodes(wanted[row].tolist()))


def _trainer(run: Run) -> AdaptiveTrainer:
    if not isinstance(run.trainer, AdaptiveTrainer):
        raise ValueError(f"pollux schedules elastic jobs only; job {run.job.id!r} has no application")
    return run.trainer
