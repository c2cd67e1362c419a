"""Masks and scores against formulas written out once more in NumPy, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS, tiny_model, tiny_windows

from gossamer.compress._blocks import dense_weight, linears
from gossamer.compress._calibrate import calibrate
from gossamer.compress._masks import keep_n_of_m, keep_per_layer, keep_per_row
from gossamer.compress._scores import SCORES, score_named
from gossamer.compress._statistics import LinearStatistics

sparsities = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.99, 1.0])


@st.composite
def tied_scores(draw: st.DrawFn, columns: int | None = None) -> torch.Tensor:
    """Scores with few distinct values, as quantised weights have."""
    rows = draw(st.integers(1, 9))
    width = columns or draw(st.integers(1, 70))
    seed, levels = draw(st.integers(0, 2**16)), draw(st.integers(1, 8))
    return torch.randint(0, levels, (rows, width), generator=torch.Generator().manual_seed(seed)).float()


def lowest_first(row: np.ndarray) -> list[int]:
    """Positions by rising value, equal ones by position: the tie rule, spelled out."""
    return sorted(range(len(row)), key=lambda position: (row[position], position))


@given(tied_scores(), sparsities)
def test_every_row_has_exactly_k_zeros_and_they_are_the_lowest(scores: torch.Tensor, sparsity: float) -> None:
    keep = keep_per_row(scores, sparsity)
    pruned = int(scores.shape[1] * sparsity)
    assert keep.dtype == torch.bool
    assert set((~keep).sum(1).tolist()) == {pruned}
    for row, kept in zip(scores.numpy(), keep.numpy(), strict=True):
        assert set(np.flatnonzero(~kept)) == set(lowest_first(row)[:pruned])


@given(tied_scores(), sparsities)
def test_per_layer_masks_prune_the_lowest_of_the_whole_matrix(scores: torch.Tensor, sparsity: float) -> None:
    keep = keep_per_layer(scores, sparsity)
    expected = lowest_first(scores.numpy().ravel())[: int(scores.numel() * sparsity)]
    assert set(np.flatnonzero(~keep.numpy().ravel())) == set(expected)


@given(tied_scores(columns=48), st.sampled_from([(1, 2), (2, 4), (1, 16), (3, 3), (7, 24)]))
def test_every_window_keeps_its_n_highest(scores: torch.Tensor, pattern: tuple[int, int]) -> None:
    n, m = pattern
    keep = keep_n_of_m(scores, n, m).numpy()
    for row, kept in zip(scores.numpy(), keep, strict=True):
        for start in range(0, 48, m):
            expected = lowest_first(row[start : start + m])[: m - n]
            assert set(np.flatnonzero(~kept[start : start + m])) == set(expected)


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("propagate", ["sequential", "dense"])
def test_wanda_masks_equal_an_independent_formula_in_every_layer(family: str, propagate: str) -> None:
    model = tiny_model(family)
    differing = layers = 0
    for step in calibrate(model, tiny_windows(), propagate):
        for name, layer in linears(step.block).items():
            weight, statistics = dense_weight(layer).clone(), step.statistics[name]
            keep = keep_per_row(score_named("wanda")(weight, statistics), 0.5)
            size = np.sqrt(statistics.sum_of_squares.numpy() / statistics.tokens).astype(np.float32)
            scores = np.abs(weight.numpy()) * size[None, :]
            expected = np.ones_like(scores, dtype=bool)
            for row, kept in zip(scores, expected, strict=True):
                kept[lowest_first(row)[: len(row) // 2]] = False
            differing += int((keep.numpy() != expected).sum())
            layers += 1
            layer.weight.data *= (keep.t() if family == "gpt2" else keep).float()
    assert layers >= 12
    assert differing == 0


def test_scores_equal_their_published_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(7, 12, generator=generator), torch.randn(50, 12, generator=generator) * torch.arange(12)
    statistics = LinearStatistics(12)
    statistics.update(x[:20])
    statistics.update(x[20:])
    w, size = np.abs(weight.numpy().astype(np.float64)), np.sqrt((x.numpy().astype(np.float64) ** 2).mean(0))
    expected = {"magnitude": w, "wanda": w * size, "ria": np.empty_like(w)}
    for i in range(7):
        for j in range(12):
            expected["ria"][i, j] = (w[i, j] / w[i, :].sum() + w[i, j] / w[:, j].sum()) * np.sqrt(size[j])
    assert set(SCORES) == set(expected)
    for name, score in SCORES.items():
        np.testing.assert_allclose(score(weight, statistics).numpy(), expected[name], rtol=1e-5)


def test_scores_of_dead_rows_columns_and_inputs_are_zero_and_finite() -> None:
    weight = torch.ones(4, 6)
    weight[1], weight[:, 2] = 0, 0
    statistics = LinearStatistics(6)
    statistics.update(torch.tensor([[1.0, 1, 1, 0, 1, 1]]))
    for name, score in SCORES.items():
        scores = score(weight, statistics)
        assert scores.isfinite().all(), name
        assert not scores[1].any()
        assert not scores[:, 2].any()


def test_bad_arguments_of_masks_and_scores_are_named() -> None:
    scores = torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"multiple of 4, got 6; choose M among 2, 3, 6"):
        keep_n_of_m(scores, 2, 4)
    with pytest.raises(ValueError, match="0 < N <= M, got 0:3"):
        keep_n_of_m(scores, 0, 3)
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\], got 1.5"):
        keep_per_row(scores, 1.5)
    with pytest.raises(ValueError, match="sparsity must be in"):
        keep_per_layer(scores, float("nan"))
    with pytest.raises(ValueError, match="scores must be 2-D"):
        keep_per_row(scores[0], 0.5)
    with pytest.raises(ValueError, match="score must be one of magnitude, wanda, ria, got 'x'"):
        score_named("x")
