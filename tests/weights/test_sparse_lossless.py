"""Pruned bf16 weights, bit-exact: every pattern, the arrays by a slow encoder, products, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.weights import BitmapWeight, LosslessWeight, SparseLosslessWeight, WeightFormat

LAYOUTS = ("nib12", "tbe")


def pruned(shape, density=0.5, seed=0, scale=0.02):
    generator = torch.Generator().manual_seed(seed)
    weight = (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    return weight.masked_fill(torch.rand(shape, generator=generator) >= density, 0)


def from_bits(bits):
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def assert_bits_equal(one, other):
    assert one.dtype == other.dtype and torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_65536_patterns_come_back(layout):
    bits = pruned((2048, 1024)).view(torch.int16).flatten()
    places = torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(1))[:65536]
    bits[places] = torch.arange(-32768, 32768).to(torch.int16)
    weight = bits.reshape(2048, 1024).view(torch.bfloat16)
    compressed = SparseLosslessWeight.from_dense(weight, layout)
    assert compressed.layout == layout
    assert_bits_equal(compressed.to_dense(), weight)


@settings(max_examples=40)
@given(
    rows=st.integers(1, 90),
    columns=st.integers(1, 200),
    density=st.floats(0, 1),
    random_bits=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_matrix_comes_back_and_through_its_arrays(rows, columns, density, random_bits, seed, layout):
    random = np.random.default_rng(seed)
    bits = pruned((rows, columns), density, seed % 1000).view(torch.int16).numpy().view(np.uint16).copy()
    if random_bits:
        bits[:] = random.integers(0, 65536, bits.shape) * (random.random(bits.shape) < density)
    weight = from_bits(bits)
    compressed = SparseLosslessWeight.from_dense(weight, layout)
    assert_bits_equal(compressed.to_dense(), weight)
    again = SparseLosslessWeight.from_arrays(compressed.arrays(), weight.shape, weight.dtype, compressed.meta())
    assert_bits_equal(again.to_dense(torch.ones_like(weight)), weight)
    assert compressed.density == np.count_nonzero(bits) / bits.size
    whole_words = 8 * rows * -(-columns // 64)
    assert compressed.nbytes <= whole_words + 8 * (rows + 1) + 2 * np.count_nonzero(bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_are_a_bitmap_and_the_coded_lines_of_what_is_left(layout):
    weight = pruned((400, 1300))
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    marks, kept, offsets = [], [], [0]
    for row in bits:
        for start in range(0, 1300, 64):
            marks.append(sum(1 << i for i, entry in enumerate(row[start : start + 64]) if entry))
        kept += [entry for entry in row if entry]
        offsets.append(len(kept))
    lines = -(-len(kept) // 4096)
    filled = (kept + kept)[: 4096 * lines]
    coded = LosslessWeight.from_dense(from_bits(np.reshape(filled, (lines, 4096))), layout)
    arrays = SparseLosslessWeight.from_dense(weight, layout).arrays()
    assert arrays["bitmap"].numpy().view(np.uint64).tolist() == marks
    assert arrays["row_offset"].tolist() == offsets
    assert set(arrays) == {"bitmap", "row_offset", *coded.arrays()}
    for name, array in coded.arrays().items():
        assert torch.equal(arrays[name], array), name


def test_it_is_smaller_than_either_alone():
    weight = pruned((1024, 1024))
    joint = {layout: SparseLosslessWeight.from_dense(weight, layout).bits_per_weight for layout in LAYOUTS}
    assert joint["tbe"] < joint["nib12"] < 7.2
    assert 8 * BitmapWeight.from_dense(weight).nbytes / weight.numel() > 9
    assert LosslessWeight.from_dense(weight).bits_per_weight > 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (90, 1000), (600, 1024)])
def test_products_stay_within_rounding_of_exact_ones(shape, density, threads, layout):
    weight = pruned(shape, density)
    compressed = SparseLosslessWeight.from_dense(weight, layout)
    x = torch.randn(5, shape[1], generator=torch.Generator().manual_seed(2))
    exact = (x.double() @ weight.double().T).numpy()
    out = np.full((5, shape[0]), np.nan, np.float32)
    compressed.matmul_small(x.numpy(), out, threads)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)
    matvec = compressed.bind(threads)
    for row in range(2):  # a bound product can be used again
        matvec(x[row].numpy(), out[row])
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5)


def test_products_decode_several_panels():
    weight = pruned((3000, 700), seed=3)
    for layout in LAYOUTS:
        compressed = SparseLosslessWeight.from_dense(weight, layout)
        assert len(list(compressed._panels())) == {"nib12": 17, "tbe": 1}[layout]
        x = torch.randn(2, 700)
        torch.testing.assert_close(compressed.linear(x), x @ weight.float().T, rtol=1e-4, atol=1e-4)


def test_a_saved_weight_comes_back(tmp_path):
    weight = pruned((128, 130))
    SparseLosslessWeight.from_dense(weight).save(tmp_path / "w.safetensors")
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, SparseLosslessWeight)
    assert_bits_equal(loaded.to_dense(), weight)


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="bfloat16"):
        SparseLosslessWeight.from_dense(torch.ones(4, 4))
    with pytest.raises(ValueError, match="layout must be one of"):
        SparseLosslessWeight.from_dense(pruned((4, 4)), "zip")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: a.pop("bitmap"), "'bitmap' is missing"),
        (lambda a, m: a["bitmap"].add_(1), "inconsistent"),
        (lambda a, m: a["row_offset"].add_(1), "row_offset|inconsistent"),
        (lambda a, m: a["row_offset"].fill_(-1), "row_offset"),
        (lambda a, m: a["row_offset"].zero_(), "needs at least one"),
        (lambda a, m: a["starts"].add_(1), "starts"),
        (lambda a, m: a.update(extra=a["plane"]), "no arrays named extra"),
        (lambda a, m: m.update(layout="zip"), "layout must be"),
    ],
)
def test_contradicting_arrays_are_refused(change, message):
    weight = SparseLosslessWeight.from_dense(pruned((100, 130)))
    arrays, meta = {name: array.clone() for name, array in weight.arrays().items()}, dict(weight.meta())
    change(arrays, meta)
    with pytest.raises(ValueError, match=message):
        SparseLosslessWeight.from_arrays(arrays, weight.shape, weight.dtype, meta)
