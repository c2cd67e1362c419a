"""Dense weights: exact storage, products against float64, refusals."""

import numpy as np
import pytest
import torch

from gossamer.core.hardware import cpu_features
from gossamer.weights import DenseWeight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("features", [frozenset(), cpu_features()], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_is_within_rounding_of_float64(dtype, features):
    generator = np.random.default_rng(0)
    for shape in [(1, 1), (3, 65), (11, 64), (64, 4095), (130, 100)]:
        dense = torch.randn(shape).to(dtype)
        x = generator.standard_normal(shape[1]).astype(np.float32)
        bound = shape[1] * 2.0**-23 * (dense.double().abs().numpy() @ np.abs(x.astype(np.float64)))
        for threads in (1, 2, 5):
            out = np.full(shape[0], np.nan, np.float32)
            DenseWeight.from_dense(dense).bind(threads, features)(x, out)
            assert np.all(np.abs(out - dense.double().numpy() @ x) <= bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_survive_and_the_weight_owns_its_memory(dtype):
    dense = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-7, -2.0]]).to(dtype)
    weight = DenseWeight.from_dense(dense)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    before = dense.view(bits).clone()
    dense.zero_()
    assert torch.equal(weight.to_dense().view(bits), before)
    again = DenseWeight.from_arrays(weight.arrays(), weight.shape, weight.dtype, weight.meta())
    assert torch.equal(again.to_dense(torch.empty_like(dense)).view(bits), before)
    assert weight.nbytes == weight.dense_nbytes


def test_bad_arrays_and_options_are_refused():
    weight = DenseWeight.from_dense(torch.eye(3))
    for arrays in ({}, {"values": weight.values[:-1]}, {"values": weight.values.to(torch.int16)}):
        with pytest.raises(ValueError, match="values"):
            DenseWeight.from_arrays(arrays, weight.shape, weight.dtype, {})
    with pytest.raises(TypeError, match="layout"):
        DenseWeight.from_dense(torch.eye(3), layout="rows")
    with pytest.raises(ValueError, match="matrix"):
        DenseWeight.from_dense(torch.ones(3))
