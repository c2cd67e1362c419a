"""Perplexity, divergence and agreement against float64 NumPy on the models' own logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, tiny_model, tiny_windows

from gossamer.compress import _evaluate
from gossamer.compress._evaluate import compare, perplexity


def log_probabilities(model: torch.nn.Module, window: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=window[None]).logits[0, :-1].double().numpy()
    peak = logits.max(-1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(-1, keepdims=True))


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(_evaluate, "_ROWS", 5)


def test_perplexity_is_the_mean_over_predicted_tokens() -> None:
    model, windows = tiny_model("llama"), tiny_windows(4, 24)
    losses = [-log_probabilities(model, window)[np.arange(23), window[1:].numpy()].mean() for window in windows]
    shown: list[tuple[int, int]] = []
    result = perplexity(model, windows.flatten(), 24, progress=lambda done, total: shown.append((done, total)))
    assert result == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert shown == [(1, 4), (2, 4), (3, 4), (4, 4)]
    two = perplexity(model, windows.flatten(), 24, windows=2)
    assert two == pytest.approx(math.exp(np.mean(losses[:2])), rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data.zero_()
    assert perplexity(model, tiny_windows().flatten(), 24) == pytest.approx(VOCABULARY, rel=1e-5)


def test_comparison_equals_its_definitions() -> None:
    dense, other, windows = tiny_model("llama"), tiny_model("llama"), tiny_windows(3, 24)
    for parameter in other.model.layers.parameters():
        parameter.data *= 0.9
    p = np.concatenate([log_probabilities(dense, window) for window in windows])
    q = np.concatenate([log_probabilities(other, window) for window in windows])
    quality = compare(dense, other, windows)
    assert quality.kl_divergence == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-4)
    assert quality.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert 0 < quality.top1_agreement < 1
    assert (quality.windows, quality.tokens) == (3, 69)
    assert quality.dense_perplexity == pytest.approx(perplexity(dense, windows.flatten(), 24))
    assert quality.compressed_perplexity == pytest.approx(perplexity(other, windows.flatten(), 24))


def test_a_model_agrees_with_itself() -> None:
    model = tiny_model("gpt2")
    quality = compare(model, model, tiny_windows())
    assert quality.kl_divergence == pytest.approx(0.0, abs=1e-6)
    assert quality.top1_agreement == 1.0
    assert quality.dense_perplexity == quality.compressed_perplexity


def test_bad_windows_are_named() -> None:
    model, ids = tiny_model("llama"), tiny_windows().flatten()
    with pytest.raises(ValueError, match="144 tokens are too few: 7 windows of 24 need 168"):
        perplexity(model, ids, 24, windows=7)
    with pytest.raises(ValueError, match="144 tokens are too few: 1 windows of 200 need 200"):
        perplexity(model, ids, 200)
    with pytest.raises(ValueError, match="got token_ids of shape"):
        perplexity(model, ids.view(2, -1), 24)
    with pytest.raises(ValueError, match="seqlen of at least 2"):
        perplexity(model, ids, 1)
    with pytest.raises(ValueError, match="windows must have shape"):
        compare(model, model, ids)
