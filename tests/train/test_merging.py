"""Merge plans against all partitions, and the greedy rule against a line-by-line replay."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest

from gossamer.core.comm import published_cost
from gossamer.train import Layers, plan_buckets, plan_merge


def random_layers(seed, count, ranks=8, dense=False):
    rng = random.Random(seed)
    cost = published_cost("1gbe-all-gather", ranks)
    sizes = tuple(int(10 ** rng.uniform(2, 6.3)) for _ in range(count))
    backward = tuple(rng.uniform(0.2e-3, 10e-3) for _ in range(count))
    if dense:
        return Layers(sizes, backward, lambda n: 1e-3 + 4e-9 * n)
    return Layers(
        sizes, backward, lambda n: 2 * (cost.a + cost.b * 0.001 * n * ranks * 4), lambda n: 2.19e-10 * n * math.log2(n)
    )


def finish(layers, groups):
    """When the last message arrives, by the recursion in the paper's form."""
    compute = sent = 0.0
    for first, behind in groups:
        entries = sum(layers.sizes[first:behind])
        compute += sum(layers.backward[first:behind]) + layers.select(entries)
        sent = max(sent, compute) + layers.send(entries)
    return sent


def partitions(count):
    for cuts in range(count):
        for chosen in combinations(range(1, count), cuts):
            edges = (0, *chosen, count)
            yield tuple(pairwise(edges))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("dense", [False, True])
def test_the_exact_plan_is_the_best_of_all_partitions(ranks, dense):
    for seed in range(15):
        layers = random_layers(1000 * ranks + seed, 8, ranks, dense)
        plan = plan_merge(layers)
        assert plan.seconds == pytest.approx(min(finish(layers, groups) for groups in partitions(8)), rel=1e-12)
        assert plan.seconds == pytest.approx(finish(layers, plan.groups), rel=1e-12)


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_the_exact_plan_never_loses_and_greedy_is_within_a_quarter(ranks):
    for seed in range(20):
        layers = random_layers(seed, 12 + 2 * seed, ranks)
        exact = plan_merge(layers).seconds
        for other in ("greedy", "layers", "single"):
            assert exact <= plan_merge(layers, other).seconds * (1 + 1e-12)
        assert exact <= plan_buckets(layers).seconds * (1 + 1e-12)
        assert plan_merge(layers, "greedy").seconds <= 1.25 * exact


def published_greedy(layers):
    """Arrays t_b, p and the times tau recomputed after every merge, layer L down to 1, as the rule is stated."""
    p, t_b = list(layers.sizes), list(layers.backward)

    def t_s(n):
        return layers.select(n) if n else 0.0

    def t_c(n):
        return layers.send(n) if n else 0.0

    def times():
        tau_s, tau_c, compute, sent = [], [], 0.0, 0.0
        for size, backward in zip(p, t_b, strict=True):
            tau_s.append(compute + backward)
            compute += backward + t_s(size)
            tau_c.append(max(sent, compute))
            sent = tau_c[-1] + t_c(size)
        return tau_s, tau_c

    groups, first = [], 0
    for layer in range(len(p) - 1):
        tau_s, tau_c = times()
        following = layer + 1
        queue = tau_c[layer] - (tau_s[layer] + t_s(p[layer]))
        t_w = t_b[following] + t_s(p[layer] + p[following]) - t_s(p[layer]) - t_s(p[following]) - queue
        t_save = t_c(p[layer]) + t_c(p[following]) - t_c(p[layer] + p[following])
        if t_w < t_save:
            p[following] += p[layer]
            t_b[following] += t_b[layer]
            p[layer] = t_b[layer] = 0
        else:
            groups.append((first, following))
            first = following
    return (*groups, (first, len(p)))


def test_greedy_decides_as_the_rule_replayed_line_by_line():
    for seed in range(60):
        layers = random_layers(seed, 5 + seed % 20, (2, 4, 8, 16)[seed % 4])
        assert plan_merge(layers, "greedy").groups == published_greedy(layers)


def test_without_start_up_layers_stay_apart_and_without_bandwidth_cost_all_merge():
    sizes, backward = (1000,) * 6, (2e-3,) * 6
    free = Layers(sizes, backward, lambda n: 1e-6 * n)
    assert plan_merge(free).seconds == pytest.approx(plan_merge(free, "layers").seconds)
    assert len(plan_merge(free, "greedy").groups) == 6
    assert len(plan_merge(Layers(sizes, backward, lambda n: 1.0)).groups) == 1


def test_bad_layers_and_methods_are_refused():
    with pytest.raises(ValueError, match="equally long"):
        Layers((1,), (1.0, 2.0), float)
    with pytest.raises(ValueError, match="at least 1"):
        Layers((0,), (1.0,), float)
    with pytest.raises(ValueError, match="method must be"):
        plan_merge(Layers((1,), (1.0,), float), "best")
