"""SJF-BSBF's decisions against exhaustive search, and its short cuts against looking at everything."""

from itertools import product

import numpy as np
import pytest
from clusters import random_jobs, table

from gossamer.cluster import (
    SJF,
    BestSharingBenefit,
    Cluster,
    FirstFitSharing,
    InterferenceTable,
    Job,
    Profile,
    StepTime,
    simulate,
)


class LooksAtEverything(BestSharingBenefit):
    def _may_have_enough(self, state, run, changed):
        return state.empty + state.single >= run.job.gpus


@pytest.mark.parametrize("seed", range(4))
def test_the_short_cut_for_waiting_jobs_changes_no_decision(seed):
    jobs, cluster = random_jobs(150, seed, span=1500, gangs=(1, 1, 2, 4, 8)), Cluster(3, 4)
    quick = simulate(jobs, cluster, BestSharingBenefit(), table(seed, highest=4.0))
    slow = simulate(jobs, cluster, LooksAtEverything(), table(seed, highest=4.0))
    assert quick.finish.tolist() == slow.finish.tolist()
    assert quick.segments == slow.segments


def best_possible(jobs, gpus, factors):
    """Least mean finish time of single-GPU jobs that are all there at 0, over all schedules without preemption.

    At every moment at which something ends, any waiting jobs may start on any GPUs with fewer than two jobs.
    """

    def pace(name, on):
        others = [other for other in on if other != name]
        return 1 / factors[name, others[0]] if others else 1.0

    def explore(waiting, places, left, now, total):
        nonlocal best
        if total + sum(now + left[name] for name in left) >= best:
            return
        if not left:
            best = total
            return
        choices = [()]
        for _ in waiting:
            choices = [(*chosen, where) for chosen in choices for where in (None, *range(gpus))]
        for chosen in choices:
            put = [list(on) for on in places]
            for name, where in zip(waiting, chosen, strict=True):
                if where is not None:
                    put[where].append(name)
            if any(len(on) > 2 for on in put) or not any(put):
                continue
            ends = {name: left[name] / pace(name, on) for on in put for name in on}
            step = min(ends.values())
            after = {
                name: todo - step * next((pace(name, on) for on in put if name in on), 0.0)
                for name, todo in left.items()
            }
            done = [name for name, end in ends.items() if end == step]
            explore(
                [name for name, where in zip(waiting, chosen, strict=True) if where is None],
                [[name for name in on if name not in done] for on in put],
                {name: todo for name, todo in after.items() if name not in done},
                now + step,
                total + len(done) * (now + step),
            )

    best = np.inf
    names = [job.id for job in jobs]
    explore(names, [[] for _ in range(gpus)], {job.id: job.duration for job in jobs}, 0.0, 0.0)
    return best / len(jobs)


def instance(seed, count=4):
    rng = np.random.default_rng(seed)
    profiles = [Profile(f"m{index}", StepTime(0, 1), 1) for index in range(count)]
    jobs = [Job(f"m{index}", 0.0, 1, float(rng.lognormal(3, 1)), profiles[index]) for index in range(count)]
    entries = {
        ((a.model, 1.0), (b.model, 1.0)): tuple(1 + rng.exponential(0.4, 2))
        for a, b in product(profiles, profiles)
        if a.model < b.model
    }
    return jobs, InterferenceTable(entries)


def test_small_instances_are_near_the_best_possible_schedule():
    ratios = []
    for seed in range(150):
        jobs, factors = instance(seed)
        pairs = {
            (a.id, b.id): factors.factors((a.id, 1.0), (b.id, 1.0))[0] for a, b in product(jobs, jobs) if a is not b
        }
        found = simulate(jobs, Cluster(1, 2), BestSharingBenefit(), factors).jct.mean()
        best = best_possible(jobs, 2, pairs)
        assert found >= best * (1 - 1e-9)
        ratios.append(found / best)
    assert np.mean(np.array(ratios) <= 1.15) >= 0.95


def test_over_many_seeds_it_is_no_worse_than_both_of_its_ingredients():
    mean = {"bsbf": 0.0, "sjf": 0.0, "ffs": 0.0}
    for seed in range(60):
        jobs, factors = random_jobs(40, seed, span=400), table(seed, highest=3.0)
        for policy in (BestSharingBenefit(), SJF(), FirstFitSharing()):
            mean[policy.name] += simulate(jobs, Cluster(2, 4), policy, factors).jct.mean()
    assert mean["bsbf"] <= 1.01 * min(mean["sjf"], mean["ffs"])


def test_a_pair_that_does_not_pay_waits_and_one_that_pays_shares():
    a, b = Profile("a", StepTime(0, 1), 1), Profile("b", StepTime(0, 1), 1)
    jobs = [Job("b", 0, 1, 100, b), Job("a", 0, 1, 90, a)]
    for factor, shares in ((1.2, True), (2.5, False)):
        both = InterferenceTable({(("a", 1.0), ("b", 1.0)): (factor, factor)})
        result = simulate(jobs, Cluster(1, 1), BestSharingBenefit(), both)
        assert result.shared.tolist() == [shares, shares]


def test_a_smaller_sub_batch_is_taken_where_only_it_fits():
    big = Profile("big", StepTime(0.001, 0.001), 64, memory_fixed=1000, memory_per_sample=100)
    both = InterferenceTable({(("big", 64.0), ("big", 64.0)): (1.1, 1.1)})
    jobs = [Job("b", 0, 1, 100, big), Job("a", 0, 1, 100, big)]
    result = simulate(jobs, Cluster(1, 1, gpu_memory=10_000), BestSharingBenefit(), both)
    assert result.shared.all()
    assert not simulate(jobs, Cluster(1, 1, gpu_memory=10_000), BestSharingBenefit(scaling=False), both).shared.any()


def test_profiles_divide_their_batch_exactly():
    for batch in (1, 7, 24, 54, 64):
        sub_batches = Profile("m", StepTime(0, 1), batch).sub_batches()
        assert sub_batches[0] == batch and sub_batches[-1] == 1
        assert all(batch % size == 0 for size in sub_batches)
