import math
import time
from itertools import pairwise

import numba
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core import measure
from gossamer.core.measure import Bench, claim, copies_past_cache, geometric_mean, largest, median, worst

QUICK = Bench(samples=5, sample_seconds=1e-4)


def sleeper(seconds):
    return lambda: time.sleep(seconds)


def test_ratio_says_how_much_faster_ours_is():
    row = QUICK.compare((64, 32), ours=sleeper(0.002), peer=sleeper(0.006))
    assert row.case == "64x32"
    assert 2.0 < row.ratio < 4.0
    assert row.measured == row.ratio
    assert row.spread[0] <= row.ratio <= row.spread[1]
    assert 0.002 <= row.ours < row.peer
    assert row.samples == 5


def test_fastest_of_several_peers_is_the_peer():
    row = QUICK.compare("x", ours=sleeper(0.001), peer={"slow": sleeper(0.008), "fast": sleeper(0.003)})
    assert row.peer_name == "fast"
    assert set(row.others) == {"slow"}
    assert row.others["slow"] > row.peer


def test_contenders_take_turns_in_every_round():
    order = []
    bench = Bench(samples=4, sample_seconds=1e-9)
    bench.compare(
        "x", ours=lambda: order.append("o"), peer={"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    )
    assert "".join(order).endswith("oab" * 4)


def test_successive_calls_go_through_all_copies():
    seen = []
    copies = [lambda n=n: seen.append(n) for n in range(3)]
    Bench(samples=3, sample_seconds=1e-9).seconds(copies)
    assert all((after - before) % 3 == 1 for before, after in pairwise(seen[3:]))


def test_short_calls_are_repeated_to_fill_a_sample():
    calls = 0

    def call():
        nonlocal calls
        calls += 1

    Bench(samples=3, sample_seconds=1e-3).seconds(call)
    assert calls > 300  # three samples of a call that takes well under 10 microseconds


def test_slow_cases_get_fewer_rounds():
    row = Bench(samples=50, case_seconds=0.01).compare("x", ours=sleeper(0.002), peer=sleeper(0.002))
    assert row.samples == 5


def test_threads_are_set_inside_the_block_and_put_back():
    before = numba.get_num_threads(), torch.get_num_threads()
    with Bench().threads(1):
        assert (numba.get_num_threads(), torch.get_num_threads()) == (1, 1)
    assert (numba.get_num_threads(), torch.get_num_threads()) == before


def test_rows_say_on_how_many_threads_they_were_measured():
    with QUICK.threads(2):
        assert QUICK.compare("x", lambda: None, lambda: None).threads == 2
    assert QUICK.value("x", 1.0, "s").threads == 1


def test_value_of_a_list_is_its_median():
    row = Bench().value("case", [3.0, 1.0, 2.0], "MB/s", counted=False, note="in cache")
    assert (row.measured, row.unit, row.samples, row.counted, row.note) == (2.0, "MB/s", 3, False, "in cache")
    assert row.ratio is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Bench(samples=2), "samples"),
        (lambda: QUICK.compare("x", lambda: None, {}), "peer"),
        (lambda: QUICK.compare("x", [], lambda: None), "contender"),
        (lambda: QUICK.threads(0).__enter__(), "count"),
        (lambda: copies_past_cache(0), "nbytes"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_summaries_agree_with_their_definitions(values):
    assert geometric_mean(values) == pytest.approx(math.prod(values) ** (1 / len(values)))
    assert (worst(values), largest(values)) == (min(values), max(values))
    assert sum(v <= median(values) + 1e-12 for v in values) * 2 >= len(values)


@given(st.integers(1, 1 << 34))
def test_copies_exceed_twice_the_cache_or_reach_the_limit(nbytes):
    from gossamer.core.hardware import hardware

    copies = copies_past_cache(nbytes)
    assert copies >= 2
    beyond_limit = (copies + 1) * nbytes > 3 << 30
    assert copies * nbytes > 2 * hardware().llc_bytes or beyond_limit
    assert copies * nbytes <= 3 << 30 or copies == 2


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(measure, "_CLAIMS", {})


def test_claim_is_registered_with_its_bar(registry):
    @claim(
        "a-b", text="t", peer="p", unit="ratio", bar=1.3, better="higher", summary=geometric_mean, system=["SpInfer"]
    )
    def benchmark(bench):
        yield bench.value("x", 2.0, "ratio")

    found = measure.registered_claims()["a-b"]
    assert found.met(1.3)
    assert not found.met(1.29)
    assert found.system == ("SpInfer",)
    assert [row.measured for row in found.rows(QUICK)] == [2.0]


def test_lower_is_better_where_the_claim_says_so(registry):
    @claim("t", text="t", peer="none", unit="s", bar=600, better="lower", summary=median)
    def benchmark(bench):
        yield bench.value("x", 1.0, "s")

    assert measure.registered_claims()["t"].met(600)
    assert not measure.registered_claims()["t"].met(601)


def test_two_functions_cannot_measure_one_claim(registry):
    def register(function):
        return claim("same", text="t", peer="p", unit="s", bar=1, better="lower", summary=median)(function)

    def first(bench):
        yield bench.value("x", 1.0, "s")

    def second(bench):
        yield bench.value("x", 1.0, "s")

    register(first)
    register(first)
    with pytest.raises(ValueError, match="measured by first"):
        register(second)


def test_better_must_be_a_direction(registry):
    with pytest.raises(ValueError, match="'higher' or 'lower', got 'bigger'"):
        claim("x", text="t", peer="p", unit="s", bar=1, better="bigger", summary=median)


def test_numpys_products_keep_to_the_threads_of_a_block() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}

    before = threads()
    with Bench().threads(1):
        assert threads() == {1}
    assert threads() == before
