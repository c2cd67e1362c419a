"""Gradient statistics against torch's own gradients, token by token."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model, tiny_windows
from torch.nn import functional as F

from gossamer.compress._blocks import iter_blocks, linears
from gossamer.compress._gradients import GRADIENT_SCALE, gradient_statistics


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_statistics_equal_gradients_computed_one_by_one(family: str) -> None:
    model, windows = tiny_model(family), tiny_windows(3, 10)
    found = gradient_statistics(model, windows)
    layers = {f"{block.name}.{name}": layer for block in iter_blocks(model) for name, layer in linears(block).items()}
    assert found.keys() == layers.keys()
    name, layer = list(layers.items())[-1]
    per_sequence, energy, outputs = [], 0.0, 0.0
    for window in windows:
        model.zero_grad()
        kept: list[torch.Tensor] = []
        handle = layer.register_forward_hook(lambda module, args, output, kept=kept: kept.extend((args[0], output)))
        logits = model(input_ids=window[None]).logits[0, :-1]
        handle.remove()
        loss = F.cross_entropy(logits, window[1:], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, kept[1], retain_graph=True)
        loss.backward()
        weight_gradient = layer.weight.grad.t() if family == "gpt2" else layer.weight.grad
        per_sequence.append(weight_gradient / (len(window) - 1) * GRADIENT_SCALE)
        for x, dy in zip(kept[0][0], gradient[0], strict=True):  # a weight's gradient at one token is dy ⊗ x
            energy = energy + torch.outer(dy, x).square()
            outputs = outputs + dy.square()
    stacked = torch.stack(per_sequence)
    own = found[name]
    torch.testing.assert_close(own.magnitude, stacked.abs().sum(0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(own.l2, stacked.square().sum(0).sqrt(), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(own.fisher, (energy / windows.numel()).detach(), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(own.weighted_moment, (energy.sum(0) / outputs.sum()).detach(), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(own.output_fisher, (outputs / windows.numel()).detach(), rtol=1e-3, atol=1e-9)


def test_parameters_are_left_as_they_were() -> None:
    model = tiny_model("llama")
    frozen = next(model.parameters()).requires_grad_(False)
    gradient_statistics(model, tiny_windows(1, 8))
    assert not frozen.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(list(model.parameters())) - 1


def test_layers_without_gradients_are_named() -> None:
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.model.layers[1].mlp.down_proj.weight)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.(gate|up)_proj are all zero"):
        gradient_statistics(model, tiny_windows(1, 8))
    with pytest.raises(ValueError, match="seqlen >= 2"):
        gradient_statistics(model, torch.zeros(3, 1, dtype=torch.int64))
