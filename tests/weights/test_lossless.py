"""LosslessWeight: every bit comes back, products stay within rounding, damaged arrays are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.weights._lossless import LAYOUTS, LosslessWeight

PORTABLE = frozenset()
SHAPES = [(1, 1), (1, 63), (63, 1), (64, 64), (65, 130), (126, 190), (5, 4095), (190, 576)]


def gaussian(shape, seed=0, scale=0.02):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16)


def from_bits(bits):
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def assert_bits_equal(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


def with_escapes(shape, seed=0):
    """Normal weights, of which one in fifty is far outside of any window."""
    weight = gaussian(shape, seed)
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.02
    return torch.where(chosen, weight * 2.0**40, weight)


def every_pattern_among_others(columns):
    """All 65,536 patterns at pseudo-random places of a matrix that is compressible all the same."""
    weight = gaussian((16 * 65536 // columns, columns))
    flat = weight.view(torch.int16).flatten()
    places = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(1))[:65536]
    flat[places] = torch.arange(-32768, 32768).to(torch.int16)
    return flat.reshape(weight.shape).view(torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [256, 1024])
def test_all_65536_patterns_come_back(layout, columns):
    weight = every_pattern_among_others(columns)
    compressed = LosslessWeight.from_dense(weight, layout)
    assert compressed.layout == layout
    assert_bits_equal(compressed.to_dense(), weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_65536_patterns_alone_are_kept_raw(layout):
    weight = from_bits(np.arange(65536).reshape(256, 256))
    compressed = LosslessWeight.from_dense(weight, layout)
    assert compressed.layout == "raw"
    assert_bits_equal(compressed.to_dense(), weight)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 200),
    spread=st.integers(0, 255),
    seed=st.integers(0, 2**32 - 1),
    layout=st.sampled_from(LAYOUTS),
)
def test_any_matrix_comes_back_and_never_grows(rows, columns, spread, seed, layout):
    random = np.random.default_rng(seed)
    exponent = (random.integers(0, 256) + random.integers(0, spread + 1, (rows, columns))) % 256
    bits = random.integers(0, 65536, (rows, columns)) & 0x807F | exponent << 7
    weight = from_bits(bits)
    compressed = LosslessWeight.from_dense(weight, layout)
    assert_bits_equal(compressed.to_dense(), weight)
    assert compressed.nbytes <= 2 * weight.numel()
    again = LosslessWeight.from_arrays(compressed.arrays(), compressed.shape, compressed.dtype, compressed.meta())
    assert_bits_equal(again.to_dense(), weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normal_weights_take_the_promised_bits(layout):
    compressed = LosslessWeight.from_dense(gaussian((1024, 4096)), layout)
    assert compressed.bits_per_weight <= {"nib12": 12.1, "tbe": 11.35}[layout]


def test_zeros_of_a_pruned_matrix_need_no_escapes_in_nib12():
    weight = gaussian((256, 1024))
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.5] = 0
    weight[0] = -0.0
    compressed = LosslessWeight.from_dense(weight)
    assert compressed.bits_per_weight <= 12.1
    assert_bits_equal(compressed.to_dense(), weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_alone_are_compressed(layout):
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    compressed = LosslessWeight.from_dense(weight, layout)
    assert compressed.layout == layout
    assert compressed.density == 0
    assert_bits_equal(compressed.to_dense(), weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_compressed_like_copies(layout):
    weight = gaussian((200, 300)).t()[::2]
    assert_bits_equal(LosslessWeight.from_dense(weight, layout).to_dense(), weight.contiguous())


@pytest.mark.parametrize(("threads", "features", "counts"), [(1, None, (7, 8)), (1, PORTABLE, (2,)), (2, None, (1,))])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_stay_within_rounding_of_exact_ones(shape, layout, threads, features, counts):
    weight = with_escapes(shape)
    compressed = LosslessWeight.from_dense(weight, layout)
    x = np.random.default_rng(0).standard_normal((8, shape[1])).astype(np.float32)
    exact = x.astype(np.float64) @ weight.double().numpy().T
    allowed = shape[1] * 2.0**-23 * (np.abs(x).astype(np.float64) @ weight.double().abs().numpy().T)
    out = np.full(shape[0], np.nan, np.float32)
    compressed.bind(threads, features)(x[0], out)
    assert (np.abs(out - exact[0]) <= allowed[0]).all()
    for count in counts:
        several = np.full((count, shape[0]), np.nan, np.float32)
        compressed.matmul_small(x[:count], several, threads, features)
        assert (np.abs(several - exact[:count]) <= allowed[:count]).all()


@pytest.mark.parametrize("features", [None, PORTABLE])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_infinity_go_through_products_as_in_dense_ones(layout, features):
    weight = gaussian((12, 200))
    weight[weight == 0] = 0.01
    for row, value in enumerate([float("inf"), -float("inf"), float("nan"), 2.0**120, 2.0**-126, 2.0**-120]):
        weight[2 * row, 7] = value
    compressed = LosslessWeight.from_dense(weight, layout)
    for special in (1.0, 0.0, float("inf"), -float("inf"), float("nan")):
        x = torch.ones(200)
        x[7] = special
        dense = (weight.float() * x).sum(1)
        out = np.empty(12, np.float32)
        compressed.bind(1, features)(x.numpy(), out)
        out = torch.from_numpy(out)
        assert torch.equal(out.isnan(), dense.isnan())
        infinite = dense.isinf()
        assert torch.equal(out[infinite], dense[infinite])
        assert torch.allclose(out[~infinite], dense[~infinite], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_equals_dense_linear(layout):
    weight, bias = gaussian((96, 192)), torch.randn(96, generator=torch.Generator().manual_seed(3))
    compressed = LosslessWeight.from_dense(weight, layout)
    for rows in (1, 5, 20):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
        expected = torch.nn.functional.linear(x, weight.float(), bias)
        assert torch.allclose(compressed.linear(x, bias), expected, atol=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "raw"])
def test_files_keep_every_bit(layout, tmp_path):
    weight = with_escapes((120, 190))
    if layout == "raw":
        weight = from_bits(np.random.default_rng(0).integers(0, 65536, (120, 190)))
    LosslessWeight.from_dense(weight, LAYOUTS[0] if layout == "raw" else layout).save(tmp_path / "w")
    loaded = LosslessWeight.load(tmp_path / "w")
    assert loaded.layout == layout
    assert_bits_equal(loaded.to_dense(), weight)


def test_only_bf16_is_accepted():
    with pytest.raises(TypeError, match=r"bfloat16, got torch\.float32; convert"):
        LosslessWeight.from_dense(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="layout must be one of nib12, tbe, got 'zip'"):
        LosslessWeight.from_dense(gaussian((2, 2)), "zip")
    with pytest.raises(ValueError, match="without empty dimensions"):
        LosslessWeight.from_dense(gaussian((0, 2)))


def test_less_than_one_thread_is_refused():
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        LosslessWeight.from_dense(gaussian((64, 64))).bind(0)


def test_decoding_into_a_wrong_matrix_is_refused():
    with pytest.raises(ValueError, match="out must be contiguous bfloat16"):
        LosslessWeight.from_dense(gaussian((4, 64))).to_dense(torch.empty(64, 4, dtype=torch.bfloat16))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_altered_arrays_are_refused_or_decode_safely(data, layout):
    """One altered entry, or one entry too few, of one array: an error, or a matrix whose product matches it."""
    compressed = LosslessWeight.from_dense(with_escapes((126, 190), seed=5), layout)
    arrays = compressed.arrays()
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = arrays[name].clone()
    if data.draw(st.booleans()):
        kind = torch.iinfo(array.dtype)
        place = data.draw(st.integers(0, array.numel() - 1))
        array[place] = data.draw(st.integers(kind.min, kind.max))
    else:
        array = array[:-1].clone()
    try:
        altered = LosslessWeight.from_arrays(
            arrays | {name: array}, compressed.shape, compressed.dtype, compressed.meta()
        )
    except ValueError:
        return
    dense = altered.to_dense().float()
    if dense.isfinite().all():
        x, out = np.ones(190, np.float32), np.empty(126, np.float32)
        altered.bind()(x, out)
        assert (
            np.abs(out - dense.double().sum(1).numpy()) <= 190 * 2.0**-23 * dense.double().abs().sum(1).numpy()
        ).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contradictions_are_refused(layout):
    compressed = LosslessWeight.from_dense(with_escapes((126, 190)), layout)
    arrays, shape, meta = compressed.arrays(), compressed.shape, compressed.meta()
    build = LosslessWeight.from_arrays
    first = sorted(arrays)[0]
    with pytest.raises(ValueError, match="missing"):
        build({name: array for name, array in arrays.items() if name != first}, shape, torch.bfloat16, meta)
    with pytest.raises(ValueError, match="no arrays named extra"):
        build(arrays | {"extra": arrays[first]}, shape, torch.bfloat16, meta)
    with pytest.raises(ValueError, match="must be"):
        build(arrays | {first: arrays[first].double()}, shape, torch.bfloat16, meta)
    with pytest.raises(ValueError, match="entries"):
        build(arrays, (shape[0] + 64, shape[1]), torch.bfloat16, meta)
    with pytest.raises(ValueError, match="base must be"):
        build(arrays, shape, torch.bfloat16, meta | {"base": 300})
    with pytest.raises(ValueError, match="layout must be one of"):
        build(arrays, shape, torch.bfloat16, meta | {"layout": "other"})
    with pytest.raises(ValueError, match="bfloat16"):
        build(arrays, shape, torch.float16, meta)
