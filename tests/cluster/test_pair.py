"""The pair theorem against a simulation of the pair, and against brute force over the moment of entry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.cluster import Cluster, InterferenceTable, Job, Profile, SharingOption, StepTime, plan_pair, simulate
from gossamer.cluster._pair import break_even, finish_entering, finish_in_turn, finish_together
from gossamer.cluster.policies.ffs import FirstFitSharing

lengths = st.floats(1.0, 1e4)
factors = st.floats(1.0, 5.0)


def by_small_steps_of_events(t_a, t_b, xi_a, xi_b, kappa):
    """Follow both jobs from event to event, with nothing but rates."""
    left, now, ends = {"b": t_b}, 0.0, {}
    entered = False
    while len(ends) < 2:
        together = len(left) == 2
        pace = {"a": 1 / xi_a if together else 1.0, "b": 1 / xi_b if together else 1.0}
        times = {name: todo / pace[name] for name, todo in left.items()}
        step = min(times.values(), default=np.inf)
        if not entered:
            step = min(step, kappa - now)
        now += step
        for name in list(left):
            left[name] -= pace[name] * step
            if times[name] == step:
                ends[name] = now
                del left[name]
        if not entered and now >= kappa:
            left["a"], entered = t_a, True
    return (ends["a"] + ends["b"]) / 2


@given(lengths, lengths, factors, factors, st.floats(0.0, 1.0))
def test_the_closed_form_is_what_happens(t_a, t_b, xi_a, xi_b, share):
    kappa = share * t_b
    expected = by_small_steps_of_events(t_a, t_b, xi_a, xi_b, kappa)
    assert finish_entering(t_a, t_b, xi_a, xi_b, kappa) == pytest.approx(expected, rel=1e-9)


def test_no_moment_of_entry_beats_both_ends():
    rng = np.random.default_rng(1)
    t_a, t_b = rng.lognormal(4, 1.5, (2, 10_000))
    xi_a, xi_b = 1 + rng.exponential(0.7, (2, 10_000))
    for index in range(10_000):
        case = t_a[index], t_b[index], xi_a[index], xi_b[index]
        ends = min(finish_together(*case), finish_in_turn(*case[:2]))
        inside = min(finish_entering(*case, kappa) for kappa in np.linspace(0, case[1], 22)[1:-1])
        assert inside >= ends * (1 - 1e-12)


@given(lengths, lengths, factors, factors)
def test_roles_may_be_swapped_when_both_start_now(t_a, t_b, xi_a, xi_b):
    assert finish_together(t_a, t_b, xi_a, xi_b) == pytest.approx(finish_together(t_b, t_a, xi_b, xi_a), rel=1e-12)


@given(lengths, factors, factors, st.floats(1.0, 3.0), st.floats(0.01, 100.0))
def test_sharing_pays_exactly_above_the_break_even(t_a, xi_a, xi_b, stretch, ratio):
    threshold = break_even(t_a, xi_a, xi_b, stretch)
    t_b = ratio * t_a
    gain = finish_in_turn(t_a, t_b) - finish_together(stretch * t_a, t_b, xi_a, xi_b)
    if abs(gain) > 1e-6 * (t_a + t_b):
        assert (gain > 0) == (t_b > threshold)


def test_a_partner_class_gets_worse_with_remaining_time():
    options = [SharingOption(8, 1.0, 1.8, 1.5), SharingOption(4, 1.2, 1.2, 1.1)]
    means = [min(finish_together(o.stretch * 50, t_b, o.xi_a, o.xi_b) for o in options) for t_b in range(1, 400)]
    assert means == sorted(means)


def test_the_best_sub_batch_is_chosen_and_waiting_keeps_the_full_one():
    options = [SharingOption(64, 1.0, 3.0, 3.0), SharingOption(32, 1.1, 1.3, 1.2), SharingOption(16, 1.5, 1.2, 1.2)]
    plan = plan_pair(options, 64, t_a=100.0, t_b=200.0)
    assert plan.share and plan.sub_batch == 32
    assert plan.mean_finish == pytest.approx(by_small_steps_of_events(110.0, 200.0, 1.3, 1.2, 0.0))
    waiting = plan_pair([SharingOption(64, 1.0, 3.0, 3.0)], 64, 100.0, 10.0)
    assert (waiting.share, waiting.sub_batch) == (False, 64)
    assert waiting.mean_finish == finish_in_turn(100.0, 10.0)
    assert not plan_pair([], 64, 1.0, 1.0).share


@pytest.mark.parametrize("seed", range(5))
def test_the_engine_runs_a_pair_as_the_theorem_says(seed):
    rng = np.random.default_rng(seed)
    t_a, t_b = rng.uniform(10, 100, 2)
    xi_a, xi_b = rng.uniform(1, 3, 2)
    a, b = (Profile(name, StepTime(0, 1), 1) for name in "ab")
    both = InterferenceTable({(("a", 1.0), ("b", 1.0)): (xi_a, xi_b)})
    enter = rng.uniform(0, 0.9) * t_b
    jobs = [Job("b", 0.0, 1, t_b, b), Job("a", enter, 1, t_a, a)]
    result = simulate(jobs, Cluster(1, 1), FirstFitSharing(), both)
    assert result.finish.mean() == pytest.approx(finish_entering(t_a, t_b, xi_a, xi_b, enter), rel=1e-9)
