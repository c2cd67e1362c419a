"""Castor: SJF-BSBF as a system, with ways of sharing to choose from, gangs kept together, and factors learned on line.

What it adds to :class:`BestSharingBenefit`, from which it takes the pair theorem and the order of the queue:

- two substrates, time-slicing and MPS, each with its own slow-downs; the pair picks the better;
- consolidated sharing: a gang that fits into one node, empty GPUs and partners together, is put there, even where
  better partners are scattered over nodes;
- slow-downs are a belief, not known: a prediction that is corrected by what running pairs show, and pairs that turn out
  much worse are not made again (nothing is ever preempted);
- deferred starts: a job that would end earlier by waiting for GPUs that come up soon waits for them.

The journal text was not to be had: learning and deferral are worked out here from its abstract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.cluster._interference import Factors, Interference, Load
from gossamer.cluster._pair import SharingOption
from gossamer.cluster._predict import PredictedInterference
from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState, load_of
from gossamer.cluster.policies.bsbf import BestSharingBenefit


@dataclass(frozen=True)
class TwoSubstrates:
    """Slow-downs by substrate: one table for time-slicing, one for MPS."""

    time_slice: Interference
    mps: Interference

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        """The factors of a pair on a substrate."""
        return (self.mps if substrate == "mps" else self.time_slice).factors(a, b, substrate)


@dataclass
class Castor(BestSharingBenefit):
    """Consolidated, learning, non-preemptive sharing.

    belief: what is thought about slow-downs; None knows them as the cluster has them. consolidate: prefer one node.
    defer: wait where enough GPUs come up so soon that starting then ends earlier than sharing now.
    """

    substrates: tuple[str, ...] = ("time-slice", "mps")
    belief: PredictedInterference | None = None
    consolidate: bool = True
    defer: bool = True
    name: str = "castor"

    def schedule(self, state: ClusterState) -> float | None:
        """Learn from the pairs that run; then as :class:`BestSharingBenefit`."""
        if self.belief is not None:
            self._learn(state)
        return super().schedule(state)

    def factors(self, state: ClusterState, a: Load, b: Load, substrate: str) -> Factors | None:
        """What is believed; that a pair does not fit in memory is known."""
        assert state.interference is not None
        truth = state.interference.factors(a, b, substrate)
        if truth is None or self.belief is None:
            return truth
        return self.belief.factors(a, b, substrate)

    def _learn(self, state: ClusterState) -> None:
        """Observe the step time of every job that has one partner and has changed since the last look."""
        assert self.belief is not None
        for run in state.changed:
            for one in (run, *run.partners):
                if len(one.partners) == 1:
                    partner = next(iter(one.partners))
                    later = one if one.turn > partner.turn else partner
                    self.belief.observe(load_of(one), load_of(partner), one.slowdown, later.substrate)
        self._joining.clear()  # beliefs have changed, and with them what pays
        self._short.clear()

    def _choose(self, state: ClusterState, run: Run) -> tuple[Sequence[int], list[SharingOption]]:
        """One node for the whole gang where there is one, else the best partners anywhere."""
        need, per_node = run.job.gpus, state.cluster.gpus_per_node
        if self.consolidate and 1 < need <= per_node:
            found = self._one_node(state, run)
            if found is not None:
                return found
        if self.defer and self._better_soon(state, run):
            return (), []
        return super()._choose(state, run)

    def _one_node(self, state: ClusterState, run: Run) -> tuple[Sequence[int], list[SharingOption]] | None:
        """The node whose empty GPUs and best partners, in their order, are enough first."""
        need, per_node = run.job.gpus, state.cluster.gpus_per_node
        have: dict[int, list[int]] = {}
        options: dict[int, list[SharingOption]] = {}
        for option, partner in self.partners(state, run):
            for gpu in partner.alone:
                node = gpu // per_node
                if node not in have:
                    have[node], options[node] = list(state.empty_on(node))[:need], []
                have[node].append(gpu)
                options[node].append(option)
                if len(have[node]) == need:
                    return have[node], options[node]
        return None

    def _better_soon(self, state: ClusterState, run: Run) -> bool:
        """Whether enough GPUs come up so soon that starting then ends earlier than sharing now."""
        now, t_a = state.now, run.remaining(state.now)
        best = next(iter(self.partners(state, run)), None)
        if best is None:
            return False
        together = best[0].xi_a * best[0].stretch * t_a
        free = state.empty
        for end, other in sorted((other.expected_end(now), other) for other in state.running):
            free += len(other.alone)
            if free >= run.job.gpus:
                return end - now + t_a < together
        return False
