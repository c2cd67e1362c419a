"""Selection and merging against sorting in NumPy, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.train import merge_topk, select_topk
from gossamer.train._select import _merge_by_sorting, _stable_topk

few_magnitudes = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-42, 3e38, float("inf")])
entries = st.lists(few_magnitudes | st.floats(width=32, allow_nan=False), min_size=1, max_size=80)


def by_sorting(x, k):
    order = np.lexsort((np.arange(len(x)), -np.abs(x)))
    return np.sort(order[:k])


def sparse(seed, size, k):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:k].sort().values.int()
    return torch.randint(-3, 4, (k,), generator=generator).float(), indices


@given(entries, st.integers(1, 80))
def test_the_largest_magnitudes_are_taken_and_the_lowest_positions_of_equal_ones(numbers, k):
    x = np.array(numbers, np.float32)
    k = min(k, len(x))
    values, indices = select_topk(torch.from_numpy(x), k)
    expected = by_sorting(x, k)
    assert indices.tolist() == expected.tolist()
    assert np.array_equal(values.numpy(), x[expected])
    assert _stable_topk(torch.from_numpy(x), k).tolist() == expected.tolist()


@pytest.mark.parametrize("k", [1, 1000, 99_999])
def test_a_million_heavy_tailed_entries_are_selected_right(k):
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)) ** 3
    assert select_topk(x, k)[1].tolist() == by_sorting(x.numpy(), k).tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("merge", [merge_topk, _merge_by_sorting])
def test_merging_adds_and_keeps_the_largest_and_loses_nothing(merge, seed):
    k = (1, 7, 50)[seed % 3]
    first, second = sparse(seed, 100, k), sparse(seed + 100, 100, k)
    values, indices, lost_values, lost_indices = merge(first, second, k)
    union = np.union1d(first[1], second[1])
    total = np.zeros(100, np.float32)
    for v, i in (first, second):
        total[i.numpy()] += v.numpy()
    kept = union[by_sorting(total[union], k)]
    assert indices.tolist() == kept.tolist() and values.tolist() == total[kept].tolist()
    rest = np.setdiff1d(union, kept)
    assert lost_indices.tolist() == rest.tolist() and lost_values.tolist() == total[rest].tolist()


def test_positions_beyond_2_to_the_24_are_exact():
    x = torch.zeros((1 << 24) + 8)
    x[(1 << 24) + 1], x[(1 << 24) + 3] = 1.0, -2.0
    assert select_topk(x, 2)[1].tolist() == [(1 << 24) + 1, (1 << 24) + 3]


def test_nan_is_selected_so_that_it_can_be_found():
    assert 1 in select_topk(torch.tensor([1.0, float("nan"), float("inf")]), 1)[1].tolist()


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="k must be between 1 and the 3 entries of x, got 4"):
        select_topk(torch.ones(3), 4)
    with pytest.raises(TypeError, match="x must be a float32 vector"):
        select_topk(torch.ones(3, dtype=torch.float64), 1)
