"""SJF-BSBF (arXiv 2407.13088): shortest job first, with the best sharing benefit first, and no preemption ever.

A job that does not find enough empty GPUs looks at every running job: would the two together, with the best sub-batch
of the newcomer, finish earlier in the mean than one after the other? Only then is it a partner, and the best partners
come first. Both questions have closed forms (``gossamer.cluster.plan_pair``). For partners of one class (same model,
sub-batch and present slow-down) the answer is yes exactly above one remaining time, and the benefit falls with the
remaining time, so a class sorted by expected end is read from one place on instead of being searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from gossamer.cluster._interference import Factors, Load
from gossamer.cluster._jobs import Profile
from gossamer.cluster._pair import SharingOption, best_option, break_even, sharing_options
from gossamer.cluster._queues import ending_after
from gossamer.cluster._run import Run
from gossamer.cluster._state import ClusterState


@dataclass(frozen=True)
class _Joining:
    """How jobs of one class may join partners of one class: the options, and the break-even per second of A."""

    options: list[SharingOption]
    break_even: float


@dataclass
class BestSharingBenefit:
    """Shortest job first; GPUs are shared where the pair theorem says that it pays.

    substrates: ways of sharing to choose from. scaling: whether sub-batches below the full batch are tried.
    ageing: as for :class:`SJF`.
    """

    substrates: tuple[str, ...] = ("time-slice",)
    scaling: bool = True
    ageing: float = 0.0
    name: str = "bsbf"
    interval: float | None = None
    adapts_batch: bool = False
    _short: dict[Run, int] = field(default_factory=dict, repr=False)
    _joining: dict[tuple[object, ...], _Joining] = field(default_factory=dict, repr=False)

    def order(self, run: Run) -> float:
        """By remaining time."""
        return run.remaining(run.since) + self.ageing * run.job.submit

    def schedule(self, state: ClusterState) -> float | None:
        """Start whatever fits or shares with benefit, in order."""
        changed = list(state.changed)
        state.changed.clear()
        for run in state.pending.first_of_classes():
            if not state.empty + state.single:
                self._short.clear()  # what has changed was not looked at on behalf of the rest
                break
            if run.job.gpus <= state.empty:
                gpus = state.packed(run.job.gpus)
                assert gpus is not None
                self._start(state, run, gpus)
            elif state.interference is not None and self._may_have_enough(state, run, changed):
                self._share(state, run)
        return None

    def _may_have_enough(self, state: ClusterState, run: Run, changed: list[Run]) -> bool:
        """Whether, since ``run`` was last short of GPUs, as many may have come up.

        A partner that was none stays none while nothing happens to it, for its remaining time only falls. So only
        those that changed are looked at, and a job that waits costs next to nothing.
        """
        if state.empty + state.single < run.job.gpus:
            self._short.pop(run, None)
            return False
        short = self._short.get(run)
        if short is None or state.empty:
            return True
        now, t_a = state.now, run.remaining(state.now)
        for partner in (*changed, *state.changed):
            if partner.alone:
                joining = self._how(state, run, partner.job.profile, partner.sub_batch, partner.slowdown, partner)
                if joining.options and partner.expected_end(now) > now + joining.break_even * t_a:
                    short -= len(partner.alone)
        self._short[run] = short
        return short <= 0

    def _share(self, state: ClusterState, run: Run) -> None:
        """Start ``run`` on all empty GPUs and those of its best partners, if together they are enough."""
        taken, chosen = self._choose(state, run)
        if len(taken) == run.job.gpus:
            smallest = min(chosen, key=lambda option: option.sub_batch)
            self._start(state, run, taken, smallest.sub_batch, smallest.substrate)
        else:
            self._short[run] = run.job.gpus - len(taken)

    def _choose(self, state: ClusterState, run: Run) -> tuple[Sequence[int], list[SharingOption]]:
        """All empty GPUs and those of the best partners until they are enough, and how each partner is joined."""
        taken = list(state.packed(state.empty) or ()) if state.empty else []
        chosen: list[SharingOption] = []
        for option, partner in self.partners(state, run):
            chosen.append(option)
            taken += list(partner.alone)[: run.job.gpus - len(taken)]
            if len(taken) == run.job.gpus:
                break
        return taken, chosen

    def factors(self, state: ClusterState, a: Load, b: Load, substrate: str) -> Factors | None:
        """The slow-downs that are counted with: here, those that the cluster has."""
        assert state.interference is not None
        return state.interference.factors(a, b, substrate)

    def _start(
        self, state: ClusterState, run: Run, gpus: Sequence[int], sub_batch: int = 0, substrate: str = "time-slice"
    ) -> None:
        self._short.pop(run, None)
        state.start(run, gpus, sub_batch, substrate)

    def partners(self, state: ClusterState, run: Run) -> Iterator[tuple[SharingOption, Run]]:
        """Running jobs with which ``run`` shares with benefit, the best first, and how."""
        now, t_a = state.now, run.remaining(state.now)
        heads: list[tuple[float, Run, SharingOption, int, list[tuple[float, Run]], list[SharingOption]]] = []

        def push(index: int, entries: list[tuple[float, Run]], options: list[SharingOption]) -> None:
            end, partner = entries[index]
            option, mean = best_option(options, t_a, end - now)
            assert option is not None
            heads.append((mean, partner, option, index, entries, options))

        for profile, sub_batch, slowdown, entries in state.partners.classes():
            joining = self._how(state, run, profile, sub_batch, slowdown, entries[0][1])
            earliest = now + joining.break_even * t_a
            if joining.options and entries[-1][0] > earliest:
                push(ending_after(entries, earliest), entries, joining.options)
        heapify(heads)
        while heads:
            _, partner, option, index, entries, options = heappop(heads)
            yield option, partner
            if index + 1 < len(entries):
                end, following = entries[index + 1]
                best, mean = best_option(options, t_a, end - now)
                assert best is not None
                heappush(heads, (mean, following, best, index + 1, entries, options))

    def _how(
        self, state: ClusterState, run: Run, profile: Profile | None, sub_batch: int, slowdown: float, example: Run
    ) -> _Joining:
        key = id(run.job.profile), run.job.gpus, id(profile), sub_batch, slowdown
        known = self._joining.get(key)
        if known is None:
            known = self._joining[key] = self._work_out(state, run, profile, sub_batch, slowdown, example)
        return known

    def _work_out(
        self, state: ClusterState, run: Run, profile: Profile | None, sub_batch: int, slowdown: float, example: Run
    ) -> _Joining:
        ours = run.job.profile
        packed = state.cluster.packed(run.job.gpus)
        theirs = profile.load(sub_batch) if profile is not None else ("", 1.0)
        tried = (0,) if ours is None else ours.sub_batches() if self.scaling else (ours.batch,)
        options: list[SharingOption] = []
        for substrate in self.substrates:

            def slowdowns(size: int, substrate: str = substrate) -> tuple[float, float] | None:
                load = ours.load(size) if ours is not None else ("", 1.0)
                factors = self.factors(state, load, theirs, substrate)
                # a partner that is slowed already is slowed further only by a worse newcomer
                return None if factors is None else (factors[0], max(slowdown, factors[1]) / slowdown)

            options += sharing_options(
                tried,
                stretch=lambda size: 1.0 if ours is None else ours.slowdown(size, packed, packed),
                fits=lambda size: state.fits(run, example, size),
                slowdowns=slowdowns,
                substrate=substrate,
            )
        thresholds = [break_even(1.0, option.xi_a, option.xi_b, option.stretch) for option in options]
        return _Joining(options, min(thresholds, default=0.0))
