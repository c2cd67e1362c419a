"""Allocations: exact budgets, operations against NumPy and SciPy, and the rules that people published."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_models import tiny_model, tiny_windows

from gossamer.compress._allocation import (
    block_vector,
    half_cosine,
    line,
    owl,
    protected_ends,
    spread_out,
)
from gossamer.compress._allocation_genome import PRE, REDUCTIONS, TRANSFORMS, AllocationGenome, BlockValues
from gossamer.compress._allocation_search import AllocationBench, FunctionProblem, LevelProblem
from gossamer.compress._budget import integer_pattern, pruned_per_row, to_budget
from gossamer.compress._metric import SymbolicMetric
from gossamer.compress._metric_search import Texts
from gossamer.compress._ranks import RankedLayers
from gossamer.compress._workbench import Workbench

V = np.array([0.5, 0.0, 2.0, 0.25, 1.5, 3.0])
PRE_ORACLES = {
    "ABS": np.abs,
    "LOG": lambda x: np.log(np.where(x > 0, x, 1.0) + 1e-6),
    "ABSLOG": lambda x: np.log(np.abs(np.where(x == 0, 1.0, x))),
    "POW": np.square,
    "EXP": np.exp,
    "NORMALIZE": lambda x: stats.zscore(x, ddof=1),
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "TANH": np.tanh,
    "MMS": lambda x: (x - x.min()) / (x.max() - x.min() + 1e-9),
}
REDUCTION_ORACLES = {
    "MEAN": np.mean,
    "VAR": lambda x: np.var(x, ddof=1),
    "STD": lambda x: np.std(x, ddof=1),
    "L1_NORM": lambda x: np.abs(x).mean(),
    "FROBENIUS_NORM": np.linalg.norm,
    "GEOMETRIC_MEAN": lambda x: stats.gmean(np.maximum(np.abs(x), 1e-300)),
    "ENTROPY": lambda x: stats.entropy(np.abs(x)),
    "OUTLIERS": lambda x: 100 * (x > 5 * x.mean()).mean(),
}
TRANSFORM_ORACLES = {
    "SIN": np.sin, "COS": np.cos, "TAN": np.tan, "ATAN": np.arctan, "ABS": np.abs, "TANH": np.tanh,
    "ASIN": lambda x: np.arcsin(np.clip(x, -1, 1)),
    "ACOS": lambda x: np.arccos(np.clip(x, -1, 1)),
    "EXP": np.exp,
    "LOG": lambda x: np.log(np.abs(x) + 1e-6),
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "SOFTPLUS": lambda x: np.log1p(np.exp(x)),
}  # fmt: skip


def test_every_operation_equals_its_formula() -> None:
    assert PRE_ORACLES.keys() == PRE.keys()
    assert REDUCTION_ORACLES.keys() == REDUCTIONS.keys()
    assert TRANSFORM_ORACLES.keys() == TRANSFORMS.keys()
    x = torch.from_numpy(V)
    for name, oracle in PRE_ORACLES.items():
        np.testing.assert_allclose(PRE[name](x).numpy(), oracle(V), rtol=1e-9, atol=1e-12, err_msg=name)
    for name, reduce in REDUCTION_ORACLES.items():
        assert REDUCTIONS[name](x) == pytest.approx(float(reduce(V)), rel=1e-9), name
    for name, transform in TRANSFORM_ORACLES.items():
        for value in (-2.5, -0.3, 0.0, 0.7, 4.0):
            assert TRANSFORMS[name](value) == pytest.approx(float(transform(value)), rel=1e-9), name
    assert np.array_equal(x.numpy(), V)  # no operation writes to its operand


def test_the_geometric_mean_does_not_underflow() -> None:
    vector = torch.full((1_000_000,), 1e-3)
    assert REDUCTIONS["GEOMETRIC_MEAN"](vector) == pytest.approx(1e-3)


@settings(max_examples=300, deadline=None)
@given(
    densities=st.lists(st.floats(-3, 3), min_size=1, max_size=12),
    sparsity=st.floats(0.3, 0.9),
    seed=st.integers(0, 999),
)
def test_any_densities_meet_the_budget_inside_the_bounds(densities: list[float], sparsity: float, seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 100, len(densities)).tolist()
    found = to_budget(densities, sizes, sparsity)
    assert np.average(found, weights=sizes) == pytest.approx(1 - sparsity, abs=1e-6)
    assert min(found) >= 0.02
    assert max(found) <= 0.98
    for (wanted, got), (wanted_too, got_too) in itertools.pairwise(zip(densities, found, strict=True)):
        assert (wanted - wanted_too) * (got - got_too) >= 0  # order survives


@settings(max_examples=100, deadline=None)
@given(sparsity=st.floats(0.05, 0.95), seed=st.integers(0, 999))
def test_whole_numbers_of_zeros_add_up_to_the_total(sparsity: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(int(a), int(b)) for a, b in rng.integers(20, 200, (30, 2))]
    sparsities = np.clip(rng.normal(sparsity, 0.05, 30), 0.03, 0.97)
    counts = pruned_per_row(shapes, sparsities.tolist())
    wanted = sum(rows * columns * s for (rows, columns), s in zip(shapes, sparsities, strict=True))
    assert abs(sum(rows * k for (rows, _), k in zip(shapes, counts, strict=True)) - wanted) <= 100


@pytest.mark.parametrize("m", [4, 8])
def test_integer_patterns_keep_the_weighted_total(m: int) -> None:
    rng = np.random.default_rng(m)
    for _ in range(100):
        densities = rng.uniform(0.2, 0.8, 16).tolist()
        kept = integer_pattern(densities, [10] * 16, 0.5, m)
        assert sum(kept) == 16 * m // 2
        assert all(1 <= n <= m for n in kept)


def bed(family: str = "llama") -> Workbench:
    return Workbench(tiny_model(family), tiny_windows())


def test_owl_is_its_formula_written_out() -> None:
    own = bed()
    shares = []
    for block in range(3):
        scores = [
            (layer.weight.abs().double() * layer.statistics.second_moment.sqrt()).numpy().ravel()
            for layer in own.layers
            if layer.block == block
        ]
        flat = np.concatenate(scores)
        shares.append(100 * (flat > 5 * flat.mean()).mean())
    ratio = (np.array(shares) - min(shares)) / (max(shares) - min(shares)) * 0.16
    np.testing.assert_allclose(owl(own), ratio - ratio.mean(), atol=1e-6)


def test_the_published_genome_is_its_formula_and_undefined_values_are_clamped_or_refused() -> None:
    own = bed()
    values, genome = BlockValues(own), AllocationGenome.parse("W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)")
    for block in range(3):
        logs = np.log(block_vector(own, block, "wanda").double().numpy())
        expected = math.asin(min(math.atan(np.var(logs, ddof=1)), 1.0))
        assert values.values(genome)[block] == pytest.approx(expected, rel=1e-4)
    steep = AllocationGenome.parse("W:()-(FROBENIUS_NORM)-(ASIN)-(7)")
    assert values.values(steep) == [math.pi / 2] * 3
    assert values.values(steep, strict=True) is None


def test_a_thousand_genomes_survive_text_and_keep_the_budget() -> None:
    own = bed()
    ranked = RankedLayers(own, lambda layer: SymbolicMetric.parse("wanda")(layer.weight, layer.statistics))
    texts = Texts(tiny_windows(2, 16, 3), tiny_windows(2, 16, 4))
    rng = np.random.default_rng(1)
    problem = FunctionProblem(AllocationBench(ranked, texts, 0.6), BlockValues(own))
    previous = problem.seeds()[0]
    for count in range(1000):
        genome = problem.random(rng) if count % 3 else problem.cross(problem.mutate(previous, rng), previous, rng)
        assert AllocationGenome.parse(str(genome)) == genome
        offsets = problem.offsets(genome)
        if offsets is not None:
            achieved = problem.bench.sparsities(offsets)
            assert np.average(achieved, weights=problem.bench.sizes) == pytest.approx(0.6, abs=1e-4)
            previous = genome


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen3"])
def test_rank_masks_give_the_same_model_as_masks_made_anew(family: str) -> None:
    own, windows = bed(family), tiny_windows(2, 16, 3)
    metric = SymbolicMetric.parse("wanda")
    ranked = RankedLayers(own, lambda layer: metric(layer.weight, layer.statistics))
    bench = AllocationBench(ranked, Texts(windows, windows), 0.5)
    pruned = bench.pruned(line(3, 0.2))
    assert len(set(pruned)) > 1

    def sorted_masks(layer):
        count = pruned[[other.name for other in own.layers].index(layer.name)]
        order = torch.argsort(metric(layer.weight, layer.statistics), dim=1, stable=True)
        return torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, :count], False)

    assert ranked.perplexity(pruned, windows) == own.perplexity(
        ((layer, layer.weight * sorted_masks(layer)) for layer in own.layers), windows
    )
    for layer in own.layers:  # dense again
        assert torch.equal(layer.weight, layer.module.weight.t() if family == "gpt2" else layer.module.weight)


def test_the_sensitivity_rule_finds_the_best_of_all_allocations_on_a_grid() -> None:
    own = bed()
    ranked = RankedLayers(own, lambda layer: SymbolicMetric.parse("wanda")(layer.weight, layer.statistics))
    bench = AllocationBench(ranked, Texts(tiny_windows(2, 16, 3), tiny_windows(2, 16, 4)), 0.6)
    offsets = bench.sensitivity()
    grid = [value / 20 for value in range(-7, 8)]
    best = min(bench.screen([a, b, -a - b]) for a in grid for b in grid if -0.35 <= -a - b <= 0.35)
    assert bench.screen(offsets) <= 1.02 * best


def test_level_mutations_keep_reach_and_length() -> None:
    own = bed()
    ranked = RankedLayers(own, lambda layer: SymbolicMetric.parse("wanda")(layer.weight, layer.statistics))
    problem = LevelProblem(AllocationBench(ranked, Texts(tiny_windows(2, 16, 3), tiny_windows(2, 16, 4)), 0.6))
    rng, genome = np.random.default_rng(0), problem.seeds()[1]
    for _ in range(200):
        genome = problem.mutate(problem.cross(genome, problem.random(rng), rng), rng)
        assert len(genome) == 3
        assert max(map(abs, genome)) <= 30
        assert problem.decode(problem.encode(genome)) == genome


def test_hand_made_schedules_are_what_they_say() -> None:
    assert line(5, 0.1) == pytest.approx([0.1, 0.05, 0.0, -0.05, -0.1])
    assert spread_out([3.0, 3.0], 0.1) == [0.0, 0.0]
    assert spread_out([0.0, 1.0], 0.1, direction=-1) == pytest.approx([-0.1, 0.1])
    curve = half_cosine(11)
    assert max(curve) - min(curve) == pytest.approx(0.16)
    assert curve == sorted(curve, reverse=True)
    assert to_budget([0.4 + offset for offset in protected_ends(4, 0.6)], [1] * 4, 0.6) == pytest.approx(
        [0.6, 0.2, 0.2, 0.6]
    )


@pytest.mark.parametrize(
    "text", ["W:(ABSLOG)-(VAR)", "W:(FOO)-(VAR)-()-(7)", "W:(ABS,ABS,ABS)-(VAR)-()-(7)", "Z:()-(VAR)-()-(7)"]
)
def test_bad_genomes_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        AllocationGenome.parse(text)


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="sparsity must be in"):
        to_budget([0.5], [1], 0.99)
    with pytest.raises(ValueError, match="finite"):
        to_budget([math.nan], [1], 0.5)
