"""Two jobs on the same GPUs: share now, or one after the other?

B runs with ``t_b`` seconds to go when alone, A needs ``t_a``. Together each of them is slowed by its own factor
(``xi_a``, ``xi_b``). If A enters after ``kappa`` seconds, the mean of the two finish times is piecewise linear in
``kappa`` and smallest at 0 or at ``t_b``, never in between (Theorem 1 of SJF-BSBF, arXiv 2407.13088). So there are
two candidates only, and closed forms for both.

>>> finish_together(60.0, 100.0, 1.3, 1.2) < finish_in_turn(60.0, 100.0)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


def finish_together(t_a: float, t_b: float, xi_a: float, xi_b: float) -> float:
    """Mean finish time, in seconds from now, where A starts beside B now."""
    a, b = xi_a * t_a, xi_b * t_b
    if a >= b:
        return t_a / 2 + (1 - 1 / (2 * xi_a)) * b
    return t_b / 2 + (1 - 1 / (2 * xi_b)) * a


def finish_in_turn(t_a: float, t_b: float) -> float:
    """Mean finish time where A starts when B has finished."""
    return t_b + t_a / 2


def finish_entering(t_a: float, t_b: float, xi_a: float, xi_b: float, kappa: float) -> float:
    """Mean finish time where A enters ``kappa`` seconds from now, ``0 <= kappa <= t_b``."""
    return kappa + finish_together(t_a, t_b - kappa, xi_a, xi_b)


def break_even(t_a: float, xi_a: float, xi_b: float, stretch: float = 1.0) -> float:
    """The remaining time of B from which on sharing pays: share if and only if ``t_b`` is above it.

    stretch: by how much a smaller sub-batch makes A longer; the alternative, waiting, keeps A's full batch.

    Waiting costs A the whole of ``t_b``, so the longer B runs, the better sharing looks; the gain, as a function of
    ``t_b``, changes its sign once at most. This is what lets a scheduler skip partners without looking at them.

    >>> break_even(60.0, 1.2, 1.1)  # always
    0.0
    >>> break_even(60.0, 2.0, 2.0)  # only beside a B of more than two minutes
    120.0
    """
    slope = (1 - 1 / (2 * xi_a)) * xi_b - 1  # of the gain's negative while A outlives B
    meets = xi_a * stretch * t_a / xi_b  # where both end at once
    if slope < 0:
        crossing = (stretch - 1) * t_a / (-2 * slope)
        if crossing <= meets:
            return crossing
    return t_a * ((2 - 1 / xi_b) * xi_a * stretch - 1)


@dataclass(frozen=True)
class PairPlan:
    """What to do with a pair: share (with which sub-batch of A) or wait; ``mean_finish`` in seconds from now."""

    share: bool
    sub_batch: int
    mean_finish: float


@dataclass(frozen=True)
class SharingOption:
    """One way for A to join B: A's sub-batch, how much longer that makes A alone, and both slow-downs.

    substrate: how the GPU is shared, ``"time-slice"`` or ``"mps"``.
    """

    sub_batch: int
    stretch: float
    xi_a: float
    xi_b: float
    substrate: str = "time-slice"


def sharing_options(
    sub_batches: Iterable[int],
    stretch: Callable[[int], float],
    fits: Callable[[int], bool],
    slowdowns: Callable[[int], tuple[float, float] | None],
    substrate: str = "time-slice",
) -> list[SharingOption]:
    """The sub-batches of A that fit in memory beside B, with what they cost (the loop of Algorithm 1).

    slowdowns: ``(xi_a, xi_b)`` of a sub-batch, None where the pair is known not to work.
    """
    found = []
    for sub_batch in sub_batches:
        factors = slowdowns(sub_batch) if fits(sub_batch) else None
        if factors is not None:
            found.append(SharingOption(sub_batch, stretch(sub_batch), *factors, substrate))
    return found


def best_option(options: Iterable[SharingOption], t_a: float, t_b: float) -> tuple[SharingOption | None, float]:
    """The option with the least mean finish time, and that time; ``(None, inf)`` where there is no option."""
    best, least = None, math.inf
    for option in options:
        mean = finish_together(option.stretch * t_a, t_b, option.xi_a, option.xi_b)
        if mean < least:
            best, least = option, mean
    return best, least


def plan_pair(options: Iterable[SharingOption], full_batch: int, t_a: float, t_b: float) -> PairPlan:
    """Share or wait (Algorithm 1 of SJF-BSBF): the best sub-batch together against full batches in turn.

    >>> options = [SharingOption(64, 1.0, 1.9, 1.8), SharingOption(32, 1.1, 1.2, 1.2)]
    >>> plan = plan_pair(options, 64, t_a=60.0, t_b=100.0)
    >>> plan.share, plan.sub_batch, round(plan.mean_finish, 1)
    (True, 32, 96.2)
    """
    best, together = best_option(options, t_a, t_b)
    in_turn = finish_in_turn(t_a, t_b)
    if best is not None and together < in_turn:
        return PairPlan(True, best.sub_batch, together)
    return PairPlan(False, full_batch, in_turn)
