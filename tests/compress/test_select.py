"""Exact-k selection against a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.compress._masks import keep_per_row
from gossamer.compress._ranks import row_ranks
from gossamer.compress._select import keep_highest


def by_sorting(scores: torch.Tensor, pruned: int) -> torch.Tensor:
    keep = torch.ones(scores.shape, dtype=torch.bool)
    return keep.scatter_(1, torch.argsort(scores, dim=1, stable=True)[:, :pruned], False)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    levels=st.sampled_from([0, 2, 7]),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_selection_is_what_a_stable_sort_gives(
    rows: int, columns: int, levels: int, seed: int, data: st.DataObject
) -> None:
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if levels:
        scores = (scores * levels).round() / levels  # ties, and zeros of both signs
    pruned = data.draw(st.integers(0, columns))
    assert torch.equal(keep_highest(scores, pruned), by_sorting(scores, pruned))


@pytest.mark.parametrize("columns", [6, 40])
def test_special_values_are_ordered_as_a_sort_orders_them(columns: int) -> None:
    scores = torch.zeros(1, columns)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    scores[0, :5] = special
    for pruned in range(columns + 1):
        assert torch.equal(keep_highest(scores, pruned), by_sorting(scores, pruned))


def test_masks_are_nested_and_ranks_hold_them_all() -> None:
    scores = (torch.randn(7, 60, generator=torch.Generator().manual_seed(0)) * 4).round()
    ranks = row_ranks(scores)
    for pruned in range(60):
        assert torch.equal(ranks >= pruned, keep_per_row(scores, pruned / 60 + 1e-9))
