"""SparseGPT against an optimal-brain-surgeon solver that inverts the remaining Hessian anew for every column."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gossamer.compress._masks import keep_per_row
from gossamer.compress._scores import wanda
from gossamer.compress._sparsegpt import DAMPING, inverse_factor, sparsegpt
from gossamer.compress._statistics import LinearStatistics


def layer(rows: int, columns: int, seed: int, tokens: int = 256) -> tuple[torch.Tensor, LinearStatistics]:
    """A random weight and the statistics of correlated inputs, a few of them much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator) @ (
        torch.eye(columns) + 0.5 * torch.randn(columns, columns, generator=generator) / columns**0.5
    )
    x[:, ::7] *= 8.0
    statistics = LinearStatistics(columns, hessian=True)
    statistics.update(x)
    return torch.randn(rows, columns, generator=generator), statistics


def damped(hessian: torch.Tensor) -> np.ndarray:
    exact = hessian.double().numpy().copy()
    exact[np.diag_indices_from(exact)] += DAMPING * np.diag(exact).mean()
    return exact


def slow_surgeon(weight, hessian, block, sparsity=None, n_of_m=None):
    """Column by column, float64, with the exact inverse of the Hessian of the columns that are left."""
    w, h = weight.double().numpy().copy(), damped(hessian)
    rows, columns = w.shape
    saliency = lambda j: w[:, j] ** 2 / np.linalg.inv(h[j:, j:])[0, 0]  # noqa: E731
    keep = np.ones_like(w, dtype=bool)
    for j in range(columns):
        if n_of_m is None and j % block == 0:
            span = range(j, min(j + block, columns))
            scores = np.stack([saliency(c) for c in span], 1).ravel()
            order = np.argsort(scores, kind="stable")[: int(rows * len(span) * sparsity)]
            keep[order // len(span), j + order % len(span)] = False
        if n_of_m is not None and j % n_of_m[1] == 0:
            n, m = n_of_m
            scores = np.stack([saliency(c) for c in range(j, j + m)], 1)
            order = np.argsort(scores, axis=1, kind="stable")[:, : m - n]
            np.put_along_axis(keep[:, j : j + m], order, False, axis=1)
        inverse = np.linalg.inv(h[j:, j:])
        removed = np.where(keep[:, j], 0.0, w[:, j])
        w[:, j:] -= removed[:, None] / inverse[0, 0] * inverse[0][None, :]
        w[~keep[:, j], j] = 0.0
    return w


def output_error(weight: torch.Tensor, other: torch.Tensor, hessian: torch.Tensor) -> float:
    difference = (weight - other).double()
    return float((difference @ hessian.double() * difference).sum())


@hypothesis_settings(max_examples=25)
@given(st.integers(1, 6), st.integers(2, 21), st.sampled_from([4, 8, 128]), st.sampled_from([0.25, 0.5, 0.8]))
def test_unstructured_pruning_equals_the_slow_surgeon(rows: int, columns: int, block: int, sparsity: float) -> None:
    weight, statistics = layer(rows, columns, seed=rows * columns)
    assert statistics.hessian is not None
    expected = slow_surgeon(weight, statistics.hessian, block, sparsity=sparsity)
    result = sparsegpt(weight, statistics.hessian, sparsity, block=block)
    assert torch.equal(result != 0, torch.from_numpy(expected != 0))
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-3, atol=2e-4)


@hypothesis_settings(max_examples=15)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 3)]), st.integers(0, 99))
def test_n_of_m_pruning_equals_the_slow_surgeon(rows: int, windows: int, pattern: tuple[int, int], seed: int) -> None:
    weight, statistics = layer(rows, windows * pattern[1], seed)
    assert statistics.hessian is not None
    expected = slow_surgeon(weight, statistics.hessian, 8, n_of_m=pattern)
    result = sparsegpt(weight, statistics.hessian, n_of_m=pattern, block=8)
    assert set((result != 0).view(rows, -1, pattern[1]).sum(2).unique().tolist()) == {pattern[0]}
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
def test_sparsegpt_leaves_less_output_error_than_wanda(seed: int, sparsity: float) -> None:
    weight, statistics = layer(96, 320, seed, tokens=1024)
    assert statistics.hessian is not None
    kept = weight * keep_per_row(wanda(weight, statistics), sparsity)
    result = sparsegpt(weight, statistics.hessian, sparsity)
    assert int((result == 0).sum()) == sum(int(96 * width * sparsity) for width in (128, 128, 64))
    assert output_error(weight, result, statistics.hessian) < 0.9 * output_error(weight, kept, statistics.hessian)


def test_inputs_that_never_fire_get_zero_weights() -> None:
    weight, statistics = layer(4, 16, 0)
    hessian = statistics.hessian
    assert hessian is not None
    hessian[3], hessian[:, 3] = 0, 0
    result = sparsegpt(weight, hessian, 0.25)
    assert result.isfinite().all()
    assert not result[:, 3].any()
    assert int((result == 0).sum()) == 16


def test_nothing_changes_at_sparsity_zero_and_the_input_is_left_alone() -> None:
    weight, statistics = layer(4, 16, 0)
    assert statistics.hessian is not None
    before = weight.clone(), statistics.hessian.clone()
    assert torch.equal(sparsegpt(weight, statistics.hessian, 0.0), weight)
    sparsegpt(weight, statistics.hessian, 0.5)
    assert torch.equal(weight, before[0])
    assert torch.equal(statistics.hessian, before[1])


def test_a_singular_hessian_is_damped_until_it_factorises() -> None:
    direction = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    hessian = direction.t() @ direction
    factor = inverse_factor(hessian, damping=0.0)
    assert factor.isfinite().all()
    assert torch.equal(factor, factor.triu())
    assert sparsegpt(torch.ones(2, 40), hessian, damping=0.0).isfinite().all()


def test_the_factor_squares_to_the_inverse() -> None:
    _, statistics = layer(1, 24, 5)
    assert statistics.hessian is not None
    factor = inverse_factor(statistics.hessian).double().numpy()
    np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(damped(statistics.hessian)), rtol=1e-3, atol=1e-5)


def test_bad_arguments_of_sparsegpt_are_named() -> None:
    weight, hessian = torch.ones(2, 6), torch.eye(6)
    with pytest.raises(ValueError, match=r"got \(2, 6\) and \(5, 5\)"):
        sparsegpt(weight, torch.eye(5))
    with pytest.raises(ValueError, match="sparsity must be in"):
        sparsegpt(weight, hessian, -0.1)
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        sparsegpt(weight, hessian, n_of_m=(2, 4))
    with pytest.raises(ValueError, match="block must be at least 1"):
        sparsegpt(weight, hessian, block=0)
    with pytest.raises(ValueError, match="not finite"):
        sparsegpt(weight, hessian * float("inf"))
    with pytest.raises(ValueError, match="not positive semi-definite"):
        sparsegpt(weight, torch.diag(torch.tensor([1.0, 1, 1, 1, 1, -1e4])))


def test_a_given_mask_is_kept_and_the_rest_corrected_by_the_slow_surgeon() -> None:
    weight, statistics = layer(5, 24, 3)
    assert statistics.hessian is not None
    own = sparsegpt(weight, statistics.hessian, n_of_m=(2, 4), block=8)
    given = sparsegpt(weight, statistics.hessian, block=8, keep=own != 0)
    torch.testing.assert_close(given, own)
    keep = keep_per_row(wanda(weight, statistics), 0.5)
    corrected = sparsegpt(weight, statistics.hessian, keep=keep)
    assert not corrected[~keep].any()
    lost = [output_error(weight, values, statistics.hessian) for values in (corrected, weight * keep)]
    assert lost[0] < 0.95 * lost[1]
    with pytest.raises(ValueError, match="keep must be bool"):
        sparsegpt(weight, statistics.hessian, keep=weight)
