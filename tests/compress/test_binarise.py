"""Binarisation on a structure: known figures for normal weights, exact zeros, and what compensation is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import tiny_model, tiny_windows

from gossamer.compress._binarise import binarise, flip_signs, keep_n_of_8, sign_times_scale
from gossamer.compress._blocks import dense_weight, linears
from gossamer.compress._calibrate import calibrate
from gossamer.compress._statistics import LinearStatistics
from gossamer.weights import STBWeight, stb_quantize
from gossamer.weights._stb_search import salient_errors, split_gains


def correlated(seed: int = 0, rows: int = 48, columns: int = 256) -> tuple[torch.Tensor, LinearStatistics]:
    """Weights, and statistics of inputs of a few latent directions as those of real layers are."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(2000, max(columns // 8, 4), generator=generator)
    x = latent @ torch.randn(latent.shape[1], columns, generator=generator) / latent.shape[1] ** 0.5
    x = x + 0.3 * torch.randn(2000, columns, generator=generator)
    statistics = LinearStatistics(columns, hessian=True)
    statistics.update(x * (0.5 * torch.randn(columns, generator=generator)).exp())
    return torch.randn(rows, columns, generator=generator) * 0.05, statistics


def lost(weight: torch.Tensor, values: torch.Tensor, statistics: LinearStatistics) -> float:
    assert statistics.hessian is not None
    delta = (weight - values).double()
    return float((delta @ statistics.hessian.double() * delta).sum())


NORMAL = torch.randn(256, 128 * 8, generator=torch.Generator().manual_seed(0))


def binary(values: np.ndarray) -> np.ndarray:
    return values.mean() + np.abs(values - values.mean()).mean() * np.where(values >= values.mean(), 1, -1)


def test_a_normal_sample_has_the_known_errors_of_every_kind_of_binarisation() -> None:
    w = NORMAL.numpy().ravel().astype(np.float64)
    assert ((w - binary(w)) ** 2).mean() == pytest.approx(1 - 2 / np.pi, rel=0.01)
    twice = binary(w) + binary(w - binary(w))
    assert ((w - twice) ** 2).mean() == pytest.approx(0.1307, rel=0.01)
    everything = np.ones((1, w.size), bool)
    for ratio, expected in ((np.inf, 0.1179), (2.0, 0.0591), (2.2, 0.0582)):
        gains = np.empty((1, 200))
        thresholds = np.linspace(0.4, 1.4, 200).astype(np.float32)
        split_gains(w.astype(np.float32)[None], everything, thresholds, ratio, False, gains)
        assert ((w**2).sum() - gains.max()) / w.size == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("n", "energy", "total"), [(4, 0.1032, 0.2486), (5, 0.0491, 0.2405), (6, 0.0189, 0.2617)])
def test_pruned_energy_and_one_bit_of_the_rest_are_the_known_figures(n: int, energy: float, total: float) -> None:
    keep = keep_n_of_8(NORMAL.abs(), n)
    assert float((NORMAL * ~keep).square().mean()) == pytest.approx(energy, rel=0.01)
    kept = NORMAL[keep]
    one_bit = float((kept.abs() - kept.abs().mean()).square().sum()) / NORMAL.numel()
    assert energy + one_bit == pytest.approx(total, rel=0.01)


def test_the_searched_errors_equal_the_errors_of_splits_that_are_made() -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(5, 128)).astype(np.float32)
    keep, place = rng.random((5, 128)) < 0.6, rng.permutation(128)
    for symmetric in (False, True):
        errors = np.empty((5, 51))
        salient_errors(weight, keep, place, 0.7, 2.0, symmetric, errors)
        for row, k in ((0, 0), (1, 3), (4, 50)):
            w = weight[row].astype(np.float64)

            def one(values: np.ndarray, symmetric: bool = symmetric) -> np.ndarray:
                mean = 0.0 if symmetric else values.mean()
                return mean + np.abs(values - mean).mean() * np.where(values >= mean, 1, -1)

            salient = w[keep[row] & (place < k)]
            expected = 0.0
            if salient.size:
                remainder = salient - one(salient)
                expected += ((remainder - one(remainder)) ** 2).sum()
            rest = w[keep[row] & (place >= k)]
            for low, high in ((0, 0.7), (0.7, 1.4), (1.4, np.inf)):
                part = rest[(np.abs(rest) >= low) & (np.abs(rest) < high)]
                expected += ((part - one(part)) ** 2).sum() if part.size else 0.0
            assert errors[row, k] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("columns", [256, 200, 93])
@pytest.mark.parametrize("n", [2, 4, 7])
def test_zeros_survive_binarisation_and_the_container_decodes_to_the_quantisers_matrix(columns: int, n: int) -> None:
    weight, statistics = correlated(columns=columns, rows=20)
    levels = binarise(weight, statistics, n)
    whole = columns // 8 * 8
    assert (((levels.to_dense()[:, :whole] != 0).view(20, -1, 8).sum(2)) == n).all()
    assert torch.equal(STBWeight.from_levels(levels).to_dense(), levels.to_dense())


@pytest.mark.parametrize("n", [4, 6])
def test_compensation_leaves_at_most_85_per_cent_of_the_error(n: int) -> None:
    for seed in range(3):
        weight, statistics = correlated(seed, columns=512)
        with_it, without = (
            lost(weight, binarise(weight, statistics, n, compensate=own).to_dense(), statistics)
            for own in (True, False)
        )
        assert with_it <= 0.85 * without


def test_more_kept_weights_and_more_regions_leave_less_error() -> None:
    weight, statistics = correlated()
    errors = [lost(weight, binarise(weight, statistics, n).to_dense(), statistics) for n in (4, 5, 6)]
    assert errors == sorted(errors, reverse=True)
    bisected = lost(weight, binarise(weight, statistics, 6, regions=2).to_dense(), statistics)
    assert errors[2] < bisected
    assert errors[0] < lost(weight, sign_times_scale(weight, 4), statistics)


def test_without_zeros_and_with_one_threshold_it_binarises_everything() -> None:
    weight, statistics = correlated(rows=12)
    levels = binarise(weight, statistics, 8, regions=2)
    assert (levels.level > 0).all()
    regions = (levels.level[levels.level < 7].int() - 1) // 2
    assert int(regions.max()) <= 1


def test_scaling_the_matrix_scales_the_result_and_rows_may_be_exchanged() -> None:
    weight, statistics = correlated(rows=16)
    plain = binarise(weight, statistics).to_dense()
    torch.testing.assert_close(binarise(4 * weight, statistics).to_dense(), 4 * plain, rtol=2e-3, atol=1e-4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(binarise(weight[order], statistics).to_dense(), plain[order], rtol=2e-2, atol=5e-3)


def test_inputs_that_never_fire_and_rows_of_zeros_do_no_harm() -> None:
    weight, statistics = correlated(rows=4, columns=64)
    assert statistics.hessian is not None
    statistics.hessian[5], statistics.hessian[:, 5] = 0, 0
    weight[2] = 0
    values = binarise(weight, statistics).to_dense()
    assert values.isfinite().all()
    assert not values[2].any()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_layer_of_a_model_is_binarised(family: str) -> None:
    step = next(iter(calibrate(tiny_model(family), tiny_windows(), hessian=True)))
    for name, layer in linears(step.block).items():
        values = binarise(dense_weight(layer), step.statistics[name]).to_dense()
        assert values.shape == dense_weight(layer).shape
        assert ((values != 0).view(len(values), -1, 8).sum(2) == 4).all()


def test_flipping_unimportant_signs_harms_less_than_flipping_any() -> None:
    weight, statistics = correlated()
    scores = weight.abs() * statistics.second_moment.sqrt().float()
    for share in (0.05, 0.2, 0.5):
        least, random = flip_signs(weight, share, scores), flip_signs(weight, share, seed=1)
        assert int((least != weight).sum()) == int((random != weight).sum()) == int(weight.numel() * share)
        assert lost(weight, least, statistics) < 0.5 * lost(weight, random, statistics)


def test_bad_arguments_are_named() -> None:
    weight, statistics = correlated(rows=2, columns=16)
    with pytest.raises(ValueError, match=r"n must be in 1\.\.8, got 9"):
        binarise(weight, statistics, 9)
    with pytest.raises(ValueError, match="needs statistics with a Hessian"):
        binarise(weight, LinearStatistics(16))
    with pytest.raises(ValueError, match="regions must be 2 or 3"):
        stb_quantize(weight, regions=4)
    with pytest.raises(ValueError, match="factor must have shape"):
        stb_quantize(weight, factor=torch.eye(3))
    with pytest.raises(ValueError, match="keep must hold 4 of every 8"):
        stb_quantize(weight, keep=torch.ones(2, 16, dtype=torch.bool))
