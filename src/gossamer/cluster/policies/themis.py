"""Themis (Mahajan et al., NSDI 2020): finish-time fairness.

A job's unfairness rho is the time it takes in the shared cluster over the time it would take on its own share of it.
Leases run out at every round; GPUs are offered to the jobs with the worst rho first.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class Themis:
    """GPUs without a lease are offered to the worst-off fraction of jobs first, then to the others.

    fraction: that part of the jobs, by rho (``1 - f`` of the paper with f = 0.8). lease: seconds for which a job keeps
    its GPUs whatever happens.

    The auction's bids are replaced by the true rho of every job, as every bidder tells the truth in the paper.
    """

    fraction: float = 0.2
    lease: float = 600.0
    name: str = "themis"
    interval: float | None = None
    adapts_batch: bool = False

    def order(self, run: Run) -> float:
        """By submission; rho is worked out in every round."""
        return run.job.submit

    def schedule(self, state: ClusterState) -> float | None:
        """Offer what has no lease: the worst-off first, then those that run, then the rest."""
        if not state.pending:
            return None
        now = state.now
        leased = [run for run in state.running if now - run.held < self.lease]
        room = state.cluster.gpus - sum(len(run.gpus) for run in leased)
        offered = [run for run in (*state.running, *state.pending) if now - run.held >= self.lease or not run.gpus]
        share = state.cluster.gpus / (len(offered) + len(leased))
        ranked = sorted(offered, key=lambda run: (-rho(run, now, share), run.number))
        count = max(1, round(self.fraction * len(ranked)))
        rest = sorted(ranked[count:], key=lambda run: not run.gpus)
        stay = []
        for run in (*ranked[:count], *rest):
            if run.job.gpus <= room:
                room -= run.job.gpus
                stay.append(run)
        kept = set(stay)
        for run in offered:
            if run.gpus and run not in kept:
                state.preempt(run)
        for run in stay:
            if not run.gpus:
                gpus = state.packed(run.job.gpus)
                assert gpus is not None
                state.start(run, gpus)
        ends = [run.held + self.lease for run in state.running if run.held + self.lease > now]
        return min(ends, default=None) if state.pending else None


def rho(run: Run, now: float, share: float) -> float:
    """Finish-time unfairness, were the job to run from now on: its time shared over its time on ``share`` GPUs."""
    together = (now - run.job.submit) + run.remaining(now)
    on_its_own = run.job.expected * max(1.0, run.job.gpus / share)
    return together / on_its_own
