"""Sparse low-rank fine-tuning: closed forms, bounds, gradients, and a base that never changes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_models import tiny_model, tiny_windows

from gossamer.compress import _salr
from gossamer.compress._adapters import AdapterBank
from gossamer.compress._blocks import iter_blocks, linears
from gossamer.compress._calibrate import calibrate
from gossamer.compress._salr import SALRConfig, SALRLinear, SparseBase, convert_, truncated_residual
from gossamer.compress._statistics import LinearStatistics


def lost_share(p: float) -> float:
    """Energy of a standard normal below the magnitude that a share ``p`` has."""
    t = stats.norm.ppf((1 + p) / 2)
    return p - 2 * t * stats.norm.pdf(t)


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7])
def test_pruning_the_base_alone_loses_least_and_as_much_as_the_closed_form_says(p: float) -> None:
    rng, sigma, tau = np.random.default_rng(0), 1.0, 0.4
    w, update = rng.normal(0, sigma, 2_000_000), rng.normal(0, tau, 2_000_000)
    both = w + update
    by_w, by_both = (np.abs(x) >= np.quantile(np.abs(x), p) for x in (w, both))
    base_only = ((w * by_w + update - both) ** 2).mean()
    mask_of_base = ((both * by_w - both) ** 2).mean()
    mask_of_both = ((both * by_both - both) ** 2).mean()
    m = lost_share(p)
    assert base_only == pytest.approx(sigma**2 * m, rel=0.01)
    assert mask_of_base == pytest.approx(sigma**2 * m + p * tau**2, rel=0.01)
    assert mask_of_both == pytest.approx((sigma**2 + tau**2) * m, rel=0.01)
    assert base_only < mask_of_both < mask_of_base


def test_a_layer_loses_what_the_closed_form_says() -> None:
    weight = torch.randn(400, 1000, generator=torch.Generator().manual_seed(0))
    layer = SALRLinear(weight, SALRConfig(residual_rank=0, selection="layer"))
    assert float((layer.base.decode() - weight).square().mean()) == pytest.approx(lost_share(0.5), rel=0.01)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(0, 12), seed=st.integers(0, 999))
def test_the_repair_is_the_best_of_its_rank_and_meets_the_bound(rows: int, columns: int, rank: int, seed: int) -> None:
    removed = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    second, first = truncated_residual(removed, rank)
    left = float((removed - second @ first).square().sum())
    values = np.linalg.svd(removed.numpy().astype(np.float64), compute_uv=False)
    assert left == pytest.approx(float((values[min(rank, len(values)) :] ** 2).sum()), rel=1e-3, abs=1e-4)
    assert left <= (1 - min(rank, rows, columns) / min(rows, columns)) * float(removed.square().sum()) + 1e-4


def test_a_repair_of_full_rank_restores_the_weight_and_rank_deficient_ones_do_no_harm() -> None:
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    layer = SALRLinear(weight, SALRConfig(residual_rank=24))
    torch.testing.assert_close(layer.merged(densify=True), weight, rtol=1e-4, atol=1e-4)
    second, first = truncated_residual(torch.ones(9, 5), 4)
    torch.testing.assert_close(second @ first, torch.ones(9, 5))
    assert not any(part.any() for part in truncated_residual(torch.zeros(6, 4), 2))


def test_a_repair_for_given_inputs_leaves_less_error_in_the_output() -> None:
    generator = torch.Generator().manual_seed(2)
    removed = torch.randn(32, 48, generator=generator)
    scales = torch.randn(48, generator=generator).exp()
    x = torch.randn(4000, 48, generator=generator) * scales
    errors = []
    for own in (None, scales):
        second, first = truncated_residual(removed, 8, own)
        errors.append(float((x @ (removed - second @ first).t()).square().sum()))
    assert errors[1] < 0.9 * errors[0]


def test_without_pruning_and_repair_it_is_plain_lora() -> None:
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    layer = SALRLinear(weight, SALRConfig(sparsity=0.0, residual_rank=0, rank=4, alpha=8.0))
    torch.nn.init.normal_(layer.lora_B)
    x = torch.randn(5, 20)
    expected = x @ weight.t() + 2.0 * (x @ layer.lora_A.t()) @ layer.lora_B.t()
    torch.testing.assert_close(layer(x), expected)
    assert torch.equal(layer.base.decode(), weight)


@pytest.mark.parametrize("selection", ["row", "layer", "2:4"])
def test_gradients_of_the_compressed_product_are_right(selection: str) -> None:
    layer = SALRLinear(torch.randn(6, 8), SALRConfig(selection=selection, rank=2, residual_rank=2)).double()
    torch.nn.init.normal_(layer.lora_B)
    layer.double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    names = ["lora_A", "lora_B", "residual_A", "residual_B"]

    def run(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *(getattr(layer, name) for name in names)))


@pytest.mark.parametrize("panel", [1 << 22, 300, 100])
def test_decoding_with_torch_equals_the_kernels(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_salr, "_PANEL", panel)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(7, 130).to(dtype) * (torch.rand(7, 130) > 0.5)
        base = SparseBase(weight)
        assert torch.equal(base.decode(), weight)
        values = base.arrays()["values"].view(dtype)
        starts = base.arrays()["row_offset"][:: _salr._panel_rows((7, 130))].tolist()
        decoded = _salr._decoded_by_torch(base.arrays()["bitmap"], values, (7, 130), starts)
        assert torch.equal(decoded, weight)


def test_no_dense_weight_is_kept_for_the_backward_pass() -> None:
    layer = SALRLinear(torch.randn(64, 96), SALRConfig(rank=2, residual_rank=2))
    x = torch.randn(3, 96, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    assert max(tensor.numel() for tensor in kept) < 64 * 96


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_training_changes_adapters_only_and_the_mask_never(family: str) -> None:
    model = tiny_model(family)
    inside = sum(len(linears(block)) for block in iter_blocks(model))
    layers = convert_(model, SALRConfig(rank=2, residual_rank=2))
    assert len(layers) == inside == sum(isinstance(module, SALRLinear) for module in model.modules())
    before = copy.deepcopy(model.state_dict())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    windows, losses = tiny_windows(4, 12), []
    for _ in range(4):
        loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) != any(part in name for part in ("lora_", "residual_")), name


def test_the_repair_begins_nearer_to_the_dense_model_than_pruning_alone() -> None:
    ids, dense = tiny_windows(4, 16), tiny_model("llama")
    wanted = dense(input_ids=ids).logits.detach()
    found = {name: step for step in calibrate(dense, ids, "dense") for name, step in _named(step).items()}
    errors = {}
    for case, rank, own in (("pruned", 0, None), ("repaired", 8, None), ("aware", 8, found)):
        model = tiny_model("llama")
        convert_(model, SALRConfig(residual_rank=rank, rank=2), own)
        errors[case] = float((model(input_ids=ids).logits.detach() - wanted).square().mean())
    assert errors["repaired"] < errors["pruned"]
    assert errors["aware"] < errors["pruned"]


def test_a_base_scored_by_wanda_keeps_what_the_formula_keeps_and_takes_statistics() -> None:
    weight, statistics = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)), LinearStatistics(40)
    statistics.update(torch.randn(50, 40, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 3.0, 40))
    layer = SALRLinear(weight, SALRConfig(score="wanda", rank=1), statistics=statistics)
    order = torch.argsort(weight.abs() * statistics.second_moment.sqrt().float(), dim=1)
    assert torch.equal(layer.base.decode(), weight.scatter(1, order[:, :20], 0.0))
    with pytest.raises(ValueError, match="needs statistics"):
        SALRLinear(weight, SALRConfig(score="wanda", rank=1))
    with pytest.raises(ValueError, match="score must be"):
        SALRConfig(score="ria")


def _named(step):
    return {f"{step.block.name}.{name}": statistics for name, statistics in step.statistics.items()}


def test_a_bank_is_the_sum_of_its_adapters_and_chooses_per_token() -> None:
    torch.manual_seed(0)
    adapters = [(torch.randn(r, 20), torch.randn(12, r), scale) for r, scale in ((2, 0.5), (5, 1.0), (3, 2.0))]
    bank, x = AdapterBank(adapters), torch.randn(2, 4, 20)
    each = [scale * (x @ a.t()) @ b.t() for a, b, scale in adapters]
    torch.testing.assert_close(bank(x), sum(each), rtol=1e-5, atol=1e-4)
    choice = torch.tensor([[0, 1, 2, -1], [2, 2, 0, 1]])
    expected = torch.stack([*each, torch.zeros_like(each[0])])
    picked = expected.permute(1, 2, 0, 3)[torch.arange(2)[:, None], torch.arange(4), choice % 4]
    torch.testing.assert_close(bank(x, choice), picked, rtol=1e-5, atol=1e-4)


def test_merging_must_be_asked_for_and_bad_settings_are_refused() -> None:
    layer = SALRLinear(torch.randn(4, 8), SALRConfig(rank=1, residual_rank=1))
    with pytest.raises(ValueError, match="densify=True"):
        layer.merged()
    for bad, message in (
        ({"sparsity": 1.0}, "sparsity"), ({"selection": "x"}, "selection"), ({"rank": 0}, "rank"),
        ({"dropout": 1.0}, "dropout"), ({"selection": "2:4", "sparsity": 0.4}, "exactly half"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            SALRConfig(**bad)
    with pytest.raises(ValueError, match="match no linear layer"):
        convert_(tiny_model("llama"), SALRConfig(targets=("nothing",)))
    with pytest.raises(ValueError, match="finite matrix"):
        truncated_residual(torch.full((2, 2), math.nan), 1)


def test_dropout_touches_the_task_adapter_only() -> None:
    torch.manual_seed(0)
    layer = SALRLinear(torch.randn(6, 10), SALRConfig(dropout=0.5, rank=3, residual_rank=3)).train()
    x = torch.randn(4, 10)
    assert torch.allclose(layer(x), layer.eval()(x), atol=1e-5)  # lora_B is zero: only its branch could differ
    torch.nn.init.normal_(layer.lora_B)
    assert not torch.allclose(layer.train()(x), layer.eval()(x))
