"""Gathering moves weights and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model, tiny_windows
from torch import nn

from gossamer.compress._pages import gather_weights
from gossamer.weights import BitmapWeight, CompressedLinear


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_gathered_model_computes_the_same(family: str) -> None:
    model = tiny_model(family)
    ids = tiny_windows(2)
    before, state = model(ids).logits, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gather_weights(model)
    assert torch.equal(model(ids).logits, before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_all_weights_lie_in_one_block_and_tied_ones_once() -> None:
    model = tiny_model("gpt2")
    gather_weights(model)
    tensors = [*model.parameters(), *model.buffers()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert model.lm_head.weight is model.transformer.wte.weight
    used = sum(-(-tensor.numel() * tensor.element_size() // 64) * 64 for tensor in tensors)
    assert tensors[0].untyped_storage().nbytes() <= used + 64


def test_compressed_layers_follow_their_buffers() -> None:
    weight = torch.randn(70, 130).bfloat16() * (torch.rand(70, 130) < 0.5)
    layer = CompressedLinear(BitmapWeight.from_dense(weight), torch.randn(70), backend="kernel")
    x = torch.randn(3, 130)
    before, bitmap = layer(x), layer.weight_format.bitmap.data_ptr()
    gather_weights(layer)
    assert layer.weight_format.bitmap.data_ptr() != bitmap
    assert torch.equal(layer(x), before)
    assert torch.equal(layer.weight_format.to_dense(), weight)


def test_models_loaded_in_inference_mode_and_empty_ones_are_gathered_too() -> None:
    with torch.inference_mode():
        layer = nn.Linear(5, 4)
        before = layer.weight.clone()
    gather_weights(layer)
    assert torch.equal(layer.weight, before)
    gather_weights(nn.ReLU())


def test_a_gathered_model_still_trains() -> None:
    layer = nn.Linear(5, 4)
    gather_weights(layer)
    layer(torch.ones(2, 5)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        layer.weight -= 0.1 * layer.weight.grad
