"""Bitmap weights: the layouts against a slow encoder, round trips, products against float64, refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.core.hardware import cpu_features
from gossamer.weights import BitmapWeight
from gossamer.weights._bitmap_avx512 import FEATURES as AVX512
from gossamer.weights._bitmap_decode import decode_rows
from gossamer.weights._bitmap_expand import FEATURES as AVX2
from gossamer.weights._bitmap_tiles import TileOffsets, end_of, starts_of, tile_offsets

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
SIZES = (1, 63, 64, 65, 130)
PLAIN = frozenset[str]()

# AVX-512 code is plain LLVM: it runs, slowly, on every processor. AVX2 code needs one that has it.
VARIANTS = [PLAIN, frozenset(AVX512)] + ([frozenset(AVX2)] if cpu_features() >= AVX2 else [])


@pytest.fixture(autouse=True)
def half_conversions(request):
    """AVX-512 code for float16 on a processor without F16C asks for a library routine that no process has."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    needs_them = parameters.get("dtype") == torch.float16 and parameters.get("features", PLAIN) >= AVX512
    if needs_them and "f16c" not in cpu_features():
        pytest.skip("needs F16C")


def sparse_matrix(shape, density, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator).to(dtype)
    return dense.masked_fill(torch.rand(shape, generator=generator) >= density, 0)


def bits_of(dense):
    return dense.view(BITS[dense.dtype])


def assert_bits_equal(first, second):
    assert first.dtype == second.dtype and torch.equal(bits_of(first), bits_of(second))


# The slow encoders: the layout text, sentence by sentence.


def slow_rows(dense):
    rows, columns = dense.shape
    words = math.ceil(columns / 64)
    bits = bits_of(dense).numpy()
    bitmap, values, offsets = [], [], [0]
    for row in range(rows):
        for word in range(words):
            marks = 0
            for j in range(64):
                column = 64 * word + j
                if column < columns and dense[row, column] != 0:
                    marks |= 1 << j
                    values.append(bits[row, column])
            bitmap.append(marks)
        offsets.append(len(values))
    return {
        "bitmap": np.array(bitmap, np.uint64),
        "values": np.array(values + [0] * 32, bits.dtype),
        "row_offset": np.array(offsets, np.int64),
    }


def slow_tca(dense):
    rows, columns = (64 * math.ceil(size / 64) for size in dense.shape)
    bits = np.zeros((rows, columns), bits_of(dense).numpy().dtype)
    bits[: dense.shape[0], : dense.shape[1]] = bits_of(dense).numpy()
    kept = np.zeros((rows, columns), bool)
    kept[: dense.shape[0], : dense.shape[1]] = (dense != 0).numpy()
    bitmap, values, gtile, warp, largest = [], [], [], [], 0
    for group_row in range(0, rows, 64):
        for group_column in range(0, columns, 64):
            gtile.append(len(values))
            start = len(values)
            for warp_row in range(group_row, group_row + 64, 16):
                warp.append(len(values) - start)
                for tensor_column in range(group_column, group_column + 64, 16):
                    for left in (tensor_column, tensor_column + 8):
                        for top in (warp_row, warp_row + 8):
                            marks = 0
                            for i in range(8):
                                for j in range(8):
                                    if kept[top + i, left + j]:
                                        marks |= 1 << (8 * i + j)
                                        values.append(bits[top + i, left + j])
                            bitmap.append(marks)
            largest = max(largest, len(values) - start)
            while len(values) % 8:
                values.append(0)
    return {
        "bitmap": np.array(bitmap, np.uint64),
        "values": np.array(values + [0] * 32, bits.dtype),
        "gtile_offset": np.array(gtile + [len(values)] * 3, np.int32),
        "warp_offset": np.array(warp, np.int32),
        "panel_base": np.zeros(rows // 64, np.int64),
    }, 64 * math.ceil(largest / 64)


def assert_same_arrays(weight, expected):
    assert set(weight.arrays()) == set(expected)
    for name, array in weight.arrays().items():
        assert np.array_equal(array.numpy(), expected[name].view(array.numpy().dtype)), name


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (63, 65), (64, 64), (65, 63), (3, 4095), (130, 130)])
def test_rows_arrays_match_the_layout_text(shape, density):
    for dtype in DTYPES if shape[0] < 64 else DTYPES[:1]:
        dense = sparse_matrix(shape, density, dtype)
        assert_same_arrays(BitmapWeight.from_dense(dense, layout="rows"), slow_rows(dense))


@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (63, 65), (64, 64), (65, 63), (3, 4095), (130, 130)])
def test_tca_arrays_match_the_layout_text(shape, density):
    for dtype in DTYPES if shape[0] < 64 else DTYPES[:1]:
        dense = sparse_matrix(shape, density, dtype)
        weight = BitmapWeight.from_dense(dense, layout="tca")
        expected, max_nnz = slow_tca(dense)
        assert_same_arrays(weight, expected)
        assert weight.meta() == {"layout": "tca", "max_nnz": max_nnz}


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)),
    density=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["rows", "tca"]),
    seed=st.integers(0, 99),
)
def test_round_trip_is_exact_in_both_layouts_and_through_arrays(shape, density, dtype, layout, seed):
    dense = sparse_matrix(shape, density, dtype, seed)
    weight = BitmapWeight.from_dense(dense, layout=layout)
    assert_bits_equal(weight.to_dense(), dense)
    again = BitmapWeight.from_arrays(weight.arrays(), weight.shape, weight.dtype, weight.meta())
    assert_bits_equal(again.to_dense(torch.full_like(dense, 7)), dense)
    other = weight.to_layout("tca" if layout == "rows" else "rows")
    assert other.layout != layout
    assert_bits_equal(other.to_dense(), dense)
    assert weight.density == pytest.approx((dense != 0).double().mean().item())


@pytest.mark.parametrize("features", VARIANTS, ids=lambda features: "-".join(sorted(features)) or "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decoding_is_exact_on_every_kind_of_processor(features, dtype):
    for shape in [(5, 1), (5, 31), (5, 32), (5, 63), (5, 96), (5, 200), (70, 4095)]:
        dense = sparse_matrix(shape, 0.5, dtype)
        weight = BitmapWeight.from_dense(dense)
        unsigned = np.uint32 if dtype == torch.float32 else np.uint16
        out = np.full(shape, 7, unsigned)
        values = weight.values.numpy().view(unsigned)
        decode_rows(weight.bitmap.numpy().view(np.uint64), values, weight.offsets["row_offset"].numpy(), out, features)
        assert np.array_equal(out, bits_of(dense).numpy().view(unsigned))


@pytest.mark.parametrize("layout", ["rows", "tca"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_are_kept_and_negative_zero_only_on_request(dtype, layout):
    dense = torch.tensor([[0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0]]).to(dtype)
    plain = BitmapWeight.from_dense(dense, layout)
    assert_bits_equal(plain.to_dense(), torch.where(dense == 0, torch.zeros_like(dense), dense))
    signed = BitmapWeight.from_dense(dense, layout, preserve_signed_zero=True)
    assert_bits_equal(signed.to_dense(), dense)
    assert_bits_equal(signed.to_layout("rows").to_layout("tca").to_dense(), dense)
    assert [plain.density * 6, signed.density * 6] == pytest.approx([4, 5])


def error_bound(dense, x):
    """Rounding of float32 sums in any order: K units of the last place of the sum of magnitudes."""
    return dense.shape[1] * 2.0**-23 * (dense.double().abs().numpy() @ np.abs(x.astype(np.float64)).T)


@pytest.mark.parametrize("features", VARIANTS, ids=lambda features: "-".join(sorted(features)) or "plain")
@pytest.mark.parametrize("layout", ["rows", "tca"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_is_within_rounding_of_float64(dtype, layout, features):
    generator = np.random.default_rng(0)
    for shape in [(1, 1), (3, 65), (65, 63), (131, 200), (5, 4095)]:
        for density in (0.0, 0.5, 1.0):
            dense = sparse_matrix(shape, density, dtype)
            weight = BitmapWeight.from_dense(dense, layout)
            x = generator.standard_normal(shape[1]).astype(np.float32)
            for threads in (1, 2, 3):
                out = np.full(shape[0], np.nan, np.float32)
                weight.bind(threads, features)(x, out)
                assert np.all(np.abs(out - dense.double().numpy() @ x) <= error_bound(dense, x)), (shape, density)


@pytest.mark.parametrize("features", VARIANTS, ids=lambda features: "-".join(sorted(features)) or "plain")
@pytest.mark.parametrize("layout", ["rows", "tca"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_with_a_few_vectors_is_within_rounding_of_float64(dtype, layout, features):
    dense = sparse_matrix((67, 130), 0.4, dtype)
    weight = BitmapWeight.from_dense(dense, layout)
    for count in (1, 2, 4, 7, 8):
        x = np.random.default_rng(count).standard_normal((count, 130)).astype(np.float32)
        out = np.full((count, 67), np.nan, np.float32)
        weight.matmul_small(x, out, threads=2, features=features)
        assert np.all(np.abs(out - x @ dense.double().numpy().T) <= error_bound(dense, x).T)


def test_product_of_normal_and_subnormal_halves_is_right_without_conversion_instructions():
    dense = torch.arange(1, 0x7C00, 7, dtype=torch.int16).view(torch.float16).reshape(1, -1)
    one = np.zeros(dense.shape[1], np.float32)
    for column in range(0, dense.shape[1], 97):
        one[:], one[column] = 0, 1
        out = np.empty(1, np.float32)
        BitmapWeight.from_dense(dense).bind(1, PLAIN)(one, out)
        assert out[0] == dense[0, column].item()


def test_linear_takes_batches_and_bias():
    dense = sparse_matrix((20, 70), 0.5, torch.float32)
    weight = BitmapWeight.from_dense(dense)
    x, bias = torch.randn(2, 3, 70), torch.randn(20)
    assert torch.allclose(weight.linear(x, bias), torch.nn.functional.linear(x, dense, bias), atol=1e-4)


def test_memory_is_the_published_share_of_dense():
    weight = BitmapWeight.from_dense(sparse_matrix((1024, 1024), 0.5, torch.bfloat16))
    tiles = weight.to_layout("tca")
    assert weight.nbytes / weight.dense_nbytes == pytest.approx(0.5 + 1 / 16, abs=0.006)
    assert tiles.nbytes / tiles.dense_nbytes == pytest.approx(0.566, abs=0.006)


def test_offsets_beyond_32_bits_use_panel_bases():
    bitmap = np.full(64 * 6, 2**64 - 1, np.uint64)  # six full tiles, three panels of two
    small, large = tile_offsets(bitmap, 2), tile_offsets(bitmap, 2, limit=10_000)
    assert small.base.tolist() == [0, 0, 0] and large.base.tolist() == [0, 8192, 16384]
    assert large.gtile.tolist() == [0, 4096, 0, 4096, 0, 4096, 8192, 8192, 8192]
    assert starts_of(small).tolist() == starts_of(large).tolist() == [4096 * tile for tile in range(6)]
    assert end_of(small) == end_of(large) == 6 * 4096


def corrupted(weight, name, change):
    arrays = {key: array.clone() for key, array in weight.arrays().items()}
    arrays[name] = change(arrays[name])
    return arrays


def bumped(index, by=1):
    def change(array):
        array[index] += by
        return array

    return change


CORRUPTIONS = {
    "rows": [
        ("row_offset", bumped(0)),
        ("row_offset", bumped(3)),
        ("row_offset", bumped(-1, 10**9)),
        ("row_offset", bumped(2, -(10**6))),
        ("row_offset", lambda array: array[:-1]),
        ("bitmap", lambda array: array ^ 1),
        ("bitmap", lambda array: array[:-1]),
        ("bitmap", lambda array: array.to(torch.int32)),
        ("values", lambda array: array[:-1]),
        ("values", lambda array: array.view(1, -1)),
        ("values", lambda array: array.to(torch.int32)),
    ],
    "tca": [
        ("gtile_offset", bumped(1)),
        ("gtile_offset", bumped(-1, 8)),
        ("warp_offset", bumped(2, -5)),
        ("panel_base", bumped(0, 2**40)),
        ("bitmap", lambda array: array ^ 1),
        ("values", lambda array: array[1:]),
    ],
}


@pytest.mark.parametrize("layout", ["rows", "tca"])
def test_contradicting_arrays_are_refused(layout):
    weight = BitmapWeight.from_dense(sparse_matrix((70, 100), 0.5, torch.bfloat16), layout)
    for name, change in CORRUPTIONS[layout]:
        with pytest.raises(ValueError, match=r"must|fit|inconsistent"):
            BitmapWeight.from_arrays(corrupted(weight, name, change), weight.shape, weight.dtype, weight.meta())


@pytest.mark.parametrize("layout", ["rows", "tca"])
def test_a_bit_outside_the_matrix_is_refused(layout):
    wide = BitmapWeight.from_dense(torch.ones(64, 128, dtype=torch.bfloat16), layout)
    for shape in [(64, 127), (63, 128)] if layout == "tca" else [(64, 127)]:
        with pytest.raises(ValueError, match="outside|past"):
            BitmapWeight.from_arrays(wide.arrays(), shape, wide.dtype, wide.meta())


def test_wrong_names_layouts_and_inputs_are_refused():
    weight = BitmapWeight.from_dense(torch.eye(3))
    with pytest.raises(ValueError, match="layout must be"):
        BitmapWeight.from_arrays(weight.arrays(), weight.shape, weight.dtype, {})
    with pytest.raises(ValueError, match="row_offset"):
        BitmapWeight.from_arrays({"bitmap": weight.bitmap}, weight.shape, weight.dtype, weight.meta())
    with pytest.raises(ValueError, match="max_nnz"):
        tiles = weight.to_layout("tca")
        BitmapWeight.from_arrays(tiles.arrays(), tiles.shape, tiles.dtype, {"layout": "tca", "max_nnz": 640})
    with pytest.raises(ValueError, match="layout must be"):
        BitmapWeight.from_dense(torch.eye(3), layout="csr")
    with pytest.raises(TypeError, match="blocksize"):
        BitmapWeight.from_dense(torch.eye(3), blocksize=3)
    with pytest.raises(TypeError, match="float64"):
        BitmapWeight.from_dense(torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="empty"):
        BitmapWeight.from_dense(torch.empty(0, 3))
    with pytest.raises(ValueError, match="contiguous"):
        weight.to_dense(torch.empty(3, 3).t()[:, :2])


def test_tile_offsets_is_a_value_per_matrix():
    offsets = TileOffsets(np.zeros(4, np.int32), np.zeros(4, np.int32), np.zeros(1, np.int64), 0)
    assert end_of(offsets) == 0 and starts_of(offsets).tolist() == [0]


def test_non_contiguous_weights_are_encoded_as_they_read():
    dense = sparse_matrix((70, 90), 0.5, torch.float16)
    assert_bits_equal(BitmapWeight.from_dense(dense.t()).to_dense(), dense.t().contiguous())
