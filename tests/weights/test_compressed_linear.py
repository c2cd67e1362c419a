"""A compressed layer stands in for a dense one."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.weights import (
    BitmapWeight,
    CompressedLinear,
    DenseWeight,
    FragmentBitmapWeight,
    FragmentLosslessWeight,
    LosslessWeight,
    NMWeight,
    SparseLosslessWeight,
    WeightFormat,
    describe,
)


def half_sparse(out: int, into: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weight = torch.randn(out, into, generator=torch.Generator().manual_seed(out + into))
    return (weight * (torch.rand(out, into, generator=torch.Generator().manual_seed(1)) < 0.5)).to(dtype)


@pytest.fixture(params=[BitmapWeight, LosslessWeight, DenseWeight, NMWeight, SparseLosslessWeight])
def weight(request: pytest.FixtureRequest) -> WeightFormat:
    return request.param.from_dense(half_sparse(37, 83))


@pytest.mark.parametrize("backend", ["auto", "kernel", "panel"])
@pytest.mark.parametrize("rows", [1, 3, 8, 20])
def test_it_computes_what_a_dense_layer_computes(weight: WeightFormat, backend: str, rows: int) -> None:
    bias = torch.randn(37)
    layer = CompressedLinear(weight, bias, backend)
    x = torch.randn(2, rows, 83)
    expected = (x.double() @ weight.to_dense().double().T + bias.double()).float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_the_result_has_the_dtype_of_the_input(weight: WeightFormat) -> None:
    assert CompressedLinear(weight)(torch.ones(1, 83, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_gradients_reach_the_input(weight: WeightFormat) -> None:
    x = torch.randn(2, 83, requires_grad=True)
    CompressedLinear(weight)(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.to_dense().float().sum(0).expand(2, 83), rtol=1e-3, atol=1e-3)


def test_state_dict_carries_the_weight_and_no_dense_copy(weight: WeightFormat) -> None:
    layer = CompressedLinear(weight)
    other = CompressedLinear.unfilled(
        describe(weight),
        {name: (array.numel(), str(array.dtype).removeprefix("torch.")) for name, array in weight.arrays().items()},
        None,
    )
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight_format.to_dense(), weight.to_dense())
    stored = {name: tensor.nbytes for name, tensor in layer.state_dict().items()}
    assert stored.pop("_extra_state") < 300
    assert sum(stored.values()) == weight.nbytes


def test_it_survives_copying_and_casting(weight: WeightFormat) -> None:
    layer = copy.deepcopy(CompressedLinear(weight, torch.randn(37))).to(torch.bfloat16)
    x = torch.randn(1, 83).bfloat16()
    expected = nn.functional.linear(x, weight.to_dense(), layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=3e-2, atol=3e-1)


def test_a_weight_comes_back_from_its_file(weight: WeightFormat, tmp_path: Path) -> None:
    weight.save(tmp_path / "w.safetensors")
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert type(loaded) is type(weight)
    assert torch.equal(loaded.to_dense(), weight.to_dense())
    other = BitmapWeight if not isinstance(weight, BitmapWeight) else DenseWeight
    with pytest.raises(ValueError, match="holds a"):
        other.load(tmp_path / "w.safetensors")


def test_bad_arguments_are_named(weight: WeightFormat) -> None:
    with pytest.raises(ValueError, match="backend must be one of"):
        CompressedLinear(weight, backend="fast")
    with pytest.raises(ValueError, match=r"bias must have shape \(37,\)"):
        CompressedLinear(weight, torch.ones(5))
    with pytest.raises(ValueError, match="83 features"):
        CompressedLinear(weight)(torch.ones(2, 84))
    with pytest.raises(TypeError, match="floating point"):
        CompressedLinear(weight, backend="kernel")(torch.ones(2, 83, dtype=torch.int64))


@pytest.mark.parametrize("layout", ["nib12", "tbe"])
def test_a_loaded_state_brings_what_its_arrays_mean(layout: str) -> None:
    """Two weights of equal array sizes whose exponents begin elsewhere."""
    small = torch.rand(128, 128, generator=torch.Generator().manual_seed(0)).add(1).bfloat16()
    large = (small.float() * 2**20).bfloat16()
    layer, other = (CompressedLinear(LosslessWeight.from_dense(weight, layout=layout)) for weight in (small, large))
    assert torch.equal(layer.weight, small)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight, large)
    fragments = CompressedLinear(FragmentLosslessWeight.from_dense(large))
    with pytest.raises((RuntimeError, ValueError)):
        layer.load_state_dict(fragments.state_dict())


def test_what_is_no_matrix_activation_or_bias_is_refused_by_name() -> None:
    weight = torch.randn(8, 16)
    for format_type in (BitmapWeight, DenseWeight):
        stored = format_type.from_dense(weight)
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got NoneType"):
            stored.linear(None)
        with pytest.raises(ValueError, match=r"bias must be a tensor of shape \(8,\), got \(7,\)"):
            stored.linear(torch.ones(2, 16), torch.ones(7))
        with pytest.raises(TypeError, match=r"weight must be a dense tensor, got layout torch\.sparse_coo"):
            format_type.from_dense(weight.to_sparse())
        with pytest.raises(ValueError, match="meta device"):
            format_type.from_dense(weight.to("meta"))
        with pytest.raises(ValueError, match=r"out must be .*torch\.float32.* of shape \(8, 16\)"):
            stored.to_dense(torch.empty(8, 15))
    with pytest.raises(TypeError, match="dense tensor"):
        FragmentBitmapWeight.from_dense(weight.half().to_sparse())
