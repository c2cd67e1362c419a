"""The walk through the blocks, against hooks on an ordinary forward pass of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import CONFIGS, tiny_model, tiny_windows

from gossamer.compress._blocks import Block, dense_weight, iter_blocks, linears, set_dense_weight
from gossamer.compress._calibrate import calibrate

families = pytest.mark.parametrize("family", sorted(CONFIGS))
propagations = pytest.mark.parametrize("propagate", ["sequential", "dense"])


def inputs_seen_by_hooks(model: torch.nn.Module, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs of every linear layer inside the blocks during plain forward passes, ``(tokens, in)`` float64."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for block in iter_blocks(model):
        for name, layer in linears(block).items():
            rows = seen.setdefault(f"{block.name}.{name}", [])
            keep = lambda _, args, rows=rows: rows.append(args[0].reshape(-1, args[0].shape[-1]).double())  # noqa: E731
            handles.append(layer.register_forward_pre_hook(keep))
    with torch.no_grad():
        for window in windows:
            model(input_ids=window[None])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def halve(block: Block) -> None:
    """A crude compression: every second weight becomes zero."""
    for layer in linears(block).values():
        weight = dense_weight(layer).clone()
        weight[:, ::2] = 0
        set_dense_weight(layer, weight)


@families
def test_blocks_are_the_decoder_layers_and_hold_all_their_linear_layers(family: str) -> None:
    blocks = iter_blocks(tiny_model(family))
    assert [block.name.rsplit(".", 1)[1] for block in blocks] == ["0", "1", "2"]
    weights = {name: tuple(dense_weight(layer).shape) for name, layer in linears(blocks[0]).items()}
    matrices = {name for name, parameter in blocks[0].module.named_parameters() if parameter.ndim == 2}
    assert {f"{name}.weight" for name in weights} == matrices
    if family == "gpt2":
        assert (weights["attn.c_attn"], weights["mlp.c_fc"]) == ((96, 32), (128, 32))


@families
@propagations
def test_statistics_of_an_untouched_model_are_those_of_a_plain_forward_pass(family: str, propagate: str) -> None:
    model, windows = tiny_model(family), tiny_windows()
    truth = inputs_seen_by_hooks(model, windows)
    for step in calibrate(model, windows, propagate, hessian=True):
        for name, statistics in step.statistics.items():
            x = truth[f"{step.block.name}.{name}"]
            assert statistics.tokens == len(x)
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(statistics.second_moment, x.square().mean(0), **close)
            torch.testing.assert_close(statistics.mean_magnitude, x.abs().mean(0), **close)
            torch.testing.assert_close(statistics.mean, x.mean(0), **close)
            torch.testing.assert_close(statistics.variance, x.var(0, correction=0), **close)
            assert statistics.hessian is not None
            torch.testing.assert_close(statistics.hessian.double(), 2 * x.t() @ x / len(x), rtol=1e-4, atol=1e-4)


@families
def test_sequential_statistics_are_those_of_the_model_compressed_so_far(family: str) -> None:
    model, windows = tiny_model(family), tiny_windows()
    for step in calibrate(model, windows, "sequential"):
        truth = inputs_seen_by_hooks(model, windows)
        for name, statistics in step.statistics.items():
            expected = truth[f"{step.block.name}.{name}"].square().mean(0)
            torch.testing.assert_close(statistics.second_moment, expected, rtol=1e-4, atol=1e-5)
        halve(step.block)


@families
def test_dense_statistics_ignore_what_the_caller_does_to_the_weights(family: str) -> None:
    windows = tiny_windows()
    truth = inputs_seen_by_hooks(tiny_model(family), windows)
    for step in calibrate(tiny_model(family), windows, "dense"):
        for name, statistics in step.statistics.items():
            expected = truth[f"{step.block.name}.{name}"].square().mean(0)
            torch.testing.assert_close(statistics.second_moment, expected, rtol=1e-4, atol=1e-5)
        halve(step.block)


@families
@propagations
def test_a_resumed_walk_gives_bit_equal_statistics(family: str, propagate: str) -> None:
    windows = tiny_windows()
    model, whole = tiny_model(family), []
    for step in calibrate(model, windows, propagate, hessian=True):
        whole.append(step.statistics)
        halve(step.block)
    resumed = tiny_model(family)
    for step, before in zip(calibrate(resumed, windows, propagate, hessian=True), whole, strict=True):
        if step.index == 2:
            for name, statistics in step.statistics.items():
                assert torch.equal(statistics.sum_of_squares, before[name].sum_of_squares)
                assert torch.equal(statistics.hessian, before[name].hessian)
        halve(step.block)
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), resumed.parameters(), strict=True))


def test_an_uneven_last_batch_is_counted_once() -> None:
    model, windows = tiny_model("llama"), tiny_windows(samples=5)
    whole, pieces = ([step.statistics for step in calibrate(model, windows, batch_size=size)] for size in (5, 2))
    for left, right in zip(whole, pieces, strict=True):
        for name in left:
            assert left[name].tokens == right[name].tokens == windows.numel()
            torch.testing.assert_close(left[name].sum_of_squares, right[name].sum_of_squares, rtol=1e-5, atol=1e-5)


def test_layers_that_read_the_same_tensor_share_their_statistics() -> None:
    statistics = next(iter(calibrate(tiny_model("llama"), tiny_windows()))).statistics
    assert statistics["self_attn.q_proj"] is statistics["self_attn.k_proj"] is statistics["self_attn.v_proj"]
    assert statistics["self_attn.q_proj"] is not statistics["self_attn.o_proj"]


def test_the_walk_leaves_no_trace_in_the_model() -> None:
    model, windows = tiny_model("llama"), tiny_windows()
    before = copy.deepcopy(model)
    for _ in calibrate(model, windows):
        pass
    assert all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=windows).logits, before(input_ids=windows).logits)


def test_statistics_asked_for_too_late_are_refused_and_early_ones_stay() -> None:
    walk = calibrate(tiny_model("llama"), tiny_windows())
    first, second = next(walk), next(walk)
    with pytest.raises(RuntimeError, match=r"the walk has left model.layers.0"):
        first.statistics  # noqa: B018
    assert second.statistics is second.statistics


def test_bad_arguments_are_named() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="propagate must be one of"):
        calibrate(model, tiny_windows(), "sideways")
    with pytest.raises(ValueError, match="windows must have shape"):
        calibrate(model, tiny_windows()[0])
    with pytest.raises(ValueError, match="no list of equal blocks"):
        iter_blocks(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="weight must have shape"):
        set_dense_weight(torch.nn.Linear(2, 3), torch.zeros(2, 3))
