"""The cost model against sums over single messages, and fits against lines that are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core import comm
from gossamer.core.comm import CommModel, LinearCost, fit_linear, fit_two_pieces

LINK = CommModel(alpha=1e-3, beta=2e-9, gamma=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_collectives_cost_the_sum_of_their_messages(ranks):
    n = 1e6
    steps = 2 * (ranks - 1)
    by_hand = sum(LINK.message(n / ranks) for _ in range(steps)) + (ranks - 1) * n / ranks * LINK.gamma
    assert LINK.all_reduce(n, ranks) == pytest.approx(by_hand)
    rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    assert LINK.broadcast(n, ranks) == pytest.approx(sum(LINK.message(n) for _ in range(rounds)))
    if ranks & (ranks - 1) == 0:
        doubling = sum(LINK.message(n * 2**step) for step in range(rounds))
        assert LINK.all_gather(n, ranks) == pytest.approx(doubling)
        assert LINK.gtopk_butterfly(1000, ranks) == pytest.approx(rounds * LINK.message(8000))
    assert LINK.gtopk_tree(1000, ranks) == pytest.approx(2 * rounds * LINK.message(8000))


def test_all_reduce_is_reduce_scatter_and_all_gather_of_the_parts():
    parts = LINK.reduce_scatter(8e6, 8) + 7 * LINK.message(1e6)
    assert LINK.all_reduce(8e6, 8) == pytest.approx(parts)


def test_the_published_crossover_between_tree_and_all_gather_is_met():
    """Derived from the formulas for 1GbE: the tree wins never at P = 4, from k = 18,167 at 8, from 3,460 at 16."""
    link = comm.preset("1gbe")
    assert link.gtopk_tree(10**8, 4) > link.topk_all_gather(10**8, 4)
    for ranks, k in ((8, 18_167), (16, 3_460), (32, 1_442)):
        assert link.gtopk_tree(k - 20, ranks) > link.topk_all_gather(k - 20, ranks)
        assert link.gtopk_tree(k + 20, ranks) < link.topk_all_gather(k + 20, ranks)


def test_congestion_multiplies_bytes_and_not_start_up():
    slow = CommModel(1e-3, 2e-9, congestion={8: 1.0, 32: 9.0})
    assert slow.congestion_at(16) == pytest.approx(3.0)
    assert slow.congestion_at(4) == 1.0 and slow.congestion_at(64) == pytest.approx(9.0)
    assert slow.all_gather(1e6, 16) == pytest.approx(4 * 1e-3 + 15 * 1e6 * 6e-9)


@given(a=st.floats(1e-6, 1e-2), b=st.floats(1e-11, 1e-7))
def test_a_line_is_found_again(a, b):
    sizes = [2.0**power for power in range(10, 27)]
    fit = fit_linear(sizes, [a + b * size for size in sizes])
    assert fit.a == pytest.approx(a, rel=1e-4) and fit.b == pytest.approx(b, rel=1e-4)
    assert fit.r2 == pytest.approx(1.0) and max(map(abs, fit.errors)) < 1e-4


def test_small_sizes_count_as_much_as_large_ones():
    """One large time that is 10 % off moves a plain fit's start-up far; the weighted one stays within 25 %."""
    sizes = [2.0**power for power in range(10, 27)]
    seconds = [1e-4 + 1e-9 * size for size in sizes]
    seconds[-1] *= 1.1
    assert fit_linear(sizes, seconds).a == pytest.approx(1e-4, rel=0.25)


def test_a_negative_start_up_is_refused_with_a_warning():
    with pytest.warns(UserWarning, match="negative"):
        fit = fit_linear([1e3, 1e4, 1e5], [1e-6, 2e-5, 2.1e-4])
    assert fit.a == 0 and fit.b > 0


def test_the_knee_is_where_the_slope_changes():
    sizes = [2.0**power for power in range(10, 27)]
    knee = 2.0**17
    fit = fit_two_pieces(sizes, [1e-5 + 1e-9 * s if s < knee else 1e-3 + 4e-9 * s for s in sizes])
    assert fit.knee == knee
    assert fit(2.0**12) == pytest.approx(1e-5 + 1e-9 * 2**12) and fit(2.0**24) == pytest.approx(1e-3 + 4e-9 * 2**24)


def test_costs_are_written_and_read(tmp_path):
    cost = fit_linear([1.0, 2.0, 4.0], [2.0, 3.0, 5.0], {"host": "here", "ranks": "4"})
    comm.save_cost(tmp_path / "cost.json", cost)
    assert comm.load_cost(tmp_path / "cost.json") == cost
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a communication cost"):
        comm.load_cost(tmp_path / "other.json")


def test_published_tables_are_read_by_name_and_ranks():
    assert comm.published_cost("1gbe-all-gather", 16) == LinearCost(
        1.1e-2, 1.7e-8, where={"source": "1gbe-all-gather", "ranks": "16"}
    )
    with pytest.raises(ValueError, match="ranks must be one of 2, 4, 8, 16"):
        comm.published_cost("1gbe-all-gather", 3)
    with pytest.raises(ValueError, match="name must be one of"):
        comm.preset("token ring")


@pytest.mark.parametrize(
    "bad", [{"alpha": -1.0}, {"beta": math.nan}, {"congestion": {0: 1.0}}, {"congestion": {2: 0.0}}]
)
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CommModel(**{"alpha": 0.0, "beta": 0.0, **bad})
