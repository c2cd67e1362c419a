"""Whole models pruned block by block with every score, pattern and way of propagating."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, tiny_model, tiny_windows

from gossamer.compress._blocks import dense_weight, linears, set_dense_weight
from gossamer.compress._calibrate import calibrate
from gossamer.compress._prune import prune, relative_output_error
from gossamer.compress._settings import Settings
from gossamer.compress._statistics import LinearStatistics

EVERY = [
    Settings(score=score, pattern=pattern, propagate=propagate)
    for score, pattern, propagate in (
        ("magnitude", None, "dense"),
        ("wanda", None, "sequential"),
        ("wanda", "2:4", "dense"),
        ("ria", "2:4", "sequential"),
        ("sparsegpt", None, "sequential"),
        ("sparsegpt", "2:4", "dense"),
    )
]
EVERY += [
    Settings(score=score, pattern=pattern, update=True)
    for score, pattern in (("wanda", None), ("mul(W, sqrt(V))", "2:4"))
]


def prune_model(model: torch.nn.Module, settings: Settings, resume: dict[int, dict[str, torch.Tensor]]) -> None:
    """Prune ``model``; blocks in ``resume`` get the weights found there, all others are added to it."""
    for step in calibrate(model, tiny_windows(), settings.propagate, hessian=settings.needs_hessian):
        layers = linears(step.block)
        if step.index not in resume:
            resume[step.index] = {
                name: prune(dense_weight(layer).clone(), step.statistics[name], settings)
                for name, layer in layers.items()
            }
        for name, layer in layers.items():
            set_dense_weight(layer, resume[step.index][name])


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_is_pruned_to_the_exact_share_and_resumes_bit_equal(family: str) -> None:
    for settings in EVERY:
        model, blocks = tiny_model(family), {}
        prune_model(model, settings, blocks)
        for weights in blocks.values():
            for weight in weights.values():
                assert int((weight == 0).sum()) == weight.numel() // 2
                if settings.pattern:
                    assert bool(((weight != 0).view(-1, 4).sum(1) == 2).all())
                elif settings.score != "sparsegpt":
                    assert bool(((weight == 0).sum(1) == weight.shape[1] // 2).all())
        resumed = tiny_model(family)
        prune_model(resumed, settings, {index: blocks[index] for index in (0, 1)})
        assert all(map(torch.equal, model.parameters(), resumed.parameters())), settings
        assert model(input_ids=tiny_windows()).logits.isfinite().all()


def test_the_relative_output_error_is_that_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    weight = torch.randn(5, 12, generator=generator)
    other = weight * (torch.rand(5, 12, generator=generator) > 0.5)
    exact, rough = LinearStatistics(12, hessian=True), LinearStatistics(12)
    exact.update(x)
    rough.update(x)
    truth = float((x @ (weight - other).t()).norm() / (x @ weight.t()).norm())
    assert relative_output_error(weight, other, exact) == pytest.approx(truth, rel=1e-4)
    assert relative_output_error(weight, weight, rough) == 0.0
    uncorrelated = LinearStatistics(12)
    uncorrelated.update(torch.eye(12))
    truth = float((weight - other).norm() / weight.norm())
    assert relative_output_error(weight, other, uncorrelated) == pytest.approx(truth, rel=1e-5)


def test_sparsegpt_without_a_hessian_is_refused() -> None:
    with pytest.raises(ValueError, match=r"calibrate\(..., hessian=True\)"):
        prune(torch.ones(2, 4), LinearStatistics(4), Settings(score="sparsegpt"))


def test_format_nm_prunes_alike_for_32_outputs():
    from gossamer.compress._pipeline import choose_format

    settings = Settings(pattern="2:8", format="nm", score="magnitude")
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    pruned = prune(weight, None, settings)
    stored = choose_format(pruned.bfloat16(), settings)
    assert stored.name == "nm" and str(stored.pattern) == "2:8:32"
    assert torch.equal(stored.to_dense(), pruned.bfloat16())
    assert float((pruned != 0).float().mean()) == 0.25


@pytest.mark.parametrize(
    ("change", "message"), [({"pattern": None}, "needs a pattern"), ({"score": "sparsegpt"}, "sparsegpt")]
)
def test_format_nm_needs_a_pattern_and_a_plain_score(change, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"pattern": "2:8", "format": "nm", **change})
