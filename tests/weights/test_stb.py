"""Binarised N:8 weights: the quantiser's promises, the planes by a slow reader, products, refusals."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.core.hardware import cpu_features
from gossamer.weights import STBWeight, WeightFormat, stb_quantize
from gossamer.weights._stb_loops import FEATURES
from gossamer.weights._stb_planes import from_groups, padded_shape, pattern_bits, patterns, to_groups

CODES = ("faithful", "lean", "code4")
VARIANTS = [frozenset[str]()] + ([None] if cpu_features() >= FEATURES else [])


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@lru_cache
def quantised(shape, n, symmetric, seed):
    return stb_quantize(normal(shape, seed), n=n, symmetric=symmetric, thresholds=3)


def levels_of(shape, n=4, code="faithful", seed=0):
    return quantised(shape, n, code == "lean", seed)


def places_of_groups(shape):
    """Row and first column of every group, by the layout text."""
    rows, columns = padded_shape(shape)
    for top, left in itertools.product(range(0, rows, 64), range(0, columns, 64)):
        for warp in range(4):
            for across16 in range(4):
                for across8, down8 in itertools.product(range(2), range(2)):
                    for row in range(8):
                        yield top + 16 * warp + 8 * down8 + row, left + 16 * across16 + 8 * across8


def bits(stream, start, count):
    return sum(int(stream[i // 8] >> (i % 8) & 1) << (i - start) for i in range(start, start + count))


def slow_dense(weight):
    """Every weight from the stored arrays, sentence by sentence."""
    rows, columns = padded_shape(weight.shape)
    stored = {name: tensor.numpy() for name, tensor in weight.stored.items()}
    n, blocks = weight.n, columns // 128
    half = {
        name: array.view(np.float16).astype(np.float32) for name, array in stored.items() if array.dtype == np.int16
    }
    ordered = [mask for mask in range(256) if bin(mask).count("1") == n]
    size = max(1, (len(ordered) - 1).bit_length())
    dense = np.zeros((rows, columns), np.float32)
    for number, (row, left) in enumerate(places_of_groups(weight.shape)):
        cell = (row // 64, left // 128, row % 64)
        if weight.code == "code4":
            for j in range(8):
                level = int(stored["index"][number].view(np.uint32)) >> (4 * j) & 15
                dense[row, left + j] = half["table"].reshape(rows // 64, blocks, 64, 11)[cell][level]
            continue
        if weight.code == "lean":
            scale = stored["scales"].reshape(rows // 64, blocks, 64, 5)[cell] * half["supers"][row]
            mean = np.zeros(5, np.float32)
        else:
            mean, scale = np.split(half["scales"].reshape(rows // 64, blocks, 64, 10)[cell], 2)
        mask, rank = ordered[bits(stored["pattern"], number * size, size)], 0
        for j in range(8):
            if mask >> j & 1:
                sign, low, high = (bits(stored[name], number * n + rank, 1) for name in ("signs", "low", "high"))
                rank += 1
                if stored["salient"][(left + j) // 8] >> ((left + j) % 8) & 1:
                    first, second = (mean[k] + (scale[k] if plus else -scale[k]) for k, plus in ((3, sign), (4, low)))
                    dense[row, left + j] = first + second
                else:
                    region = low + 2 * high
                    dense[row, left + j] = mean[region] + (scale[region] if sign else -scale[region])
    return dense[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("shape", "n"), [((3, 8), 4), ((70, 130), 5), ((64, 256), 6), ((9, 100), 1), ((5, 128), 7)])
def test_arrays_match_the_layout_text(shape, n, code):
    weight = STBWeight.from_levels(levels_of(shape, n, code), code)
    np.testing.assert_allclose(weight.to_dense().numpy(), slow_dense(weight), rtol=1e-6, atol=1e-7)


@settings(max_examples=12)
@given(rows=st.integers(1, 70), columns=st.integers(1, 200), n=st.integers(1, 7), seed=st.integers(0, 9))
def test_faithful_gives_back_what_the_quantiser_found_exactly(rows, columns, n, seed):
    levels = levels_of((rows, columns), n, seed=seed)
    weight = STBWeight.from_levels(levels)
    assert torch.equal(weight.to_dense(), levels.to_dense())
    again = STBWeight.from_arrays(weight.arrays(), weight.shape, weight.dtype, weight.meta())
    assert torch.equal(again.to_dense(), levels.to_dense())
    code4 = STBWeight.from_levels(levels, "code4").to_dense()
    assert torch.equal(code4, levels.to_dense().half().float())


def test_lean_rounds_scales_by_half_a_unit_of_their_row():
    levels = levels_of((40, 300), code="lean")
    lean = STBWeight.from_levels(levels, "lean")
    unit = levels.scale.float().flatten(1).amax(1, keepdim=True) / 255
    assert ((lean.to_dense() - levels.to_dense()).abs() <= 2 * 0.51 * unit).all()  # two scales where salient
    with pytest.raises(ValueError, match="stores no means"):
        STBWeight.from_levels(levels_of((8, 8)), "lean")


@pytest.mark.parametrize("n", [1, 4, 5, 6, 7])
@pytest.mark.parametrize("columns", [8, 100, 128, 300])
def test_every_group_keeps_exactly_n(n, columns):
    levels = levels_of((20, columns), n)
    kept = (levels.level.view(20, -1, 8) != 0).sum(2)
    assert (kept == n).all()
    values = levels.to_dense()[:, : columns // 8 * 8].reshape(20, -1, 8)
    assert ((values != 0).sum(2) <= n).all()


def test_bits_are_told_as_they_are():
    for code, expected in (("faithful", 3.63), ("lean", 2.69), ("code4", 5.375)):
        weight = STBWeight.from_levels(levels_of((64, 1024), code=code), code)
        assert weight.stored_bits == pytest.approx(expected, abs=0.04)
        assert weight.stored_bits == 8 * weight.nbytes / (64 * 1024)
        assert 0.5 <= weight.nominal_bits < 0.7
        assert weight.density == 0.5


def test_file_bytes_are_the_stored_bits(tmp_path):
    weight = STBWeight.from_levels(levels_of((64, 256)))
    weight.save(tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").stat().st_size == pytest.approx(weight.nbytes, abs=2000)
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, STBWeight) and torch.equal(loaded.to_dense(), weight.to_dense())


def test_errors_on_normal_weights_are_those_of_trisection():
    """4:8 loses 0.103 of a normal matrix's energy; the regions and salient columns lose little more."""
    weight = normal((128, 256))
    error = {
        n: float((stb_quantize(weight, n=n, thresholds=12).to_dense() - weight).square().mean()) for n in (4, 5, 6)
    }
    assert 0.10 < error[4] < 0.17
    assert error[6] < error[5] < error[4]


def test_choosing_by_importance_beats_choosing_at_random():
    weight, scores = normal((64, 256)), normal((64, 256), 1)
    chosen = stb_quantize(weight)
    shuffled = weight.view(64, -1, 8).gather(2, scores.view(64, -1, 8).argsort(2)).view(64, 256)
    random_mask = (torch.arange(256) % 8 < 4).expand(64, 256)
    kept_at_random = stb_quantize(torch.where(random_mask, shuffled, 0))
    own = float((chosen.to_dense() - weight).square().sum())
    assert own < float((kept_at_random.to_dense() - shuffled).square().sum())


def test_scaling_the_matrix_scales_the_result_and_rows_may_be_exchanged():
    weight = normal((32, 256))
    plain = stb_quantize(weight, thresholds=4).to_dense()
    scaled = stb_quantize(4 * weight, thresholds=4).to_dense()
    torch.testing.assert_close(scaled, 4 * plain, rtol=1e-3, atol=1e-5)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(stb_quantize(weight[order], thresholds=4).to_dense(), plain[order], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("features", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("n", [1, 4, 6, 7])
def test_products_are_those_of_the_values(n, code, threads, features):
    for shape in [(1, 8), (65, 130), (130, 400)]:
        weight = STBWeight.from_levels(levels_of(shape, n, code), code)
        x = normal((shape[1],), 3)
        out = np.full(shape[0], np.nan, np.float32)
        weight.bind(threads, features)(x.numpy(), out)
        exact = (weight.to_dense().double() @ x.double()).numpy()
        allowed = 1e-5 * (weight.to_dense().double().abs() @ x.double().abs()).numpy() + 1e-6
        assert (np.abs(out - exact) <= allowed).all()


def test_groups_are_in_the_order_of_the_text():
    shape = (64, 128)
    matrix = np.arange(64 * 128).reshape(shape)
    expected = [matrix[row, left : left + 8] for row, left in places_of_groups(shape)]
    assert np.array_equal(to_groups(matrix), expected)
    assert np.array_equal(from_groups(to_groups(matrix), shape), matrix)
    assert [len(patterns(n)) for n in (4, 5, 6)] == [70, 56, 28]
    assert [pattern_bits(n) for n in range(1, 8)] == [3, 5, 6, 7, 6, 5, 3]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="code must be one of"):
        STBWeight.from_dense(normal((8, 8)), "dense")
    with pytest.raises(ValueError, match="n must be in 1..7"):
        stb_quantize(normal((8, 8)), n=8)
    with pytest.raises(ValueError, match="norms must have shape"):
        stb_quantize(normal((8, 8)), norms=torch.ones(7))
    with pytest.raises(ValueError, match="finite matrix"):
        stb_quantize(torch.full((8, 8), float("nan")))
    with pytest.raises(TypeError, match="weight must be one of"):
        STBWeight.from_dense(torch.ones(8, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("code", "change", "message"),
    [
        ("faithful", lambda a, m: a.pop("high"), "has pattern"),
        ("faithful", lambda a, m: a["pattern"].fill_(255), "ranks beyond"),
        ("faithful", lambda a, m: (a["low"].fill_(255), a["high"].fill_(255)), "region that does not exist"),
        ("faithful", lambda a, m: a.update(signs=a["signs"][:-1]), "signs"),
        ("code4", lambda a, m: a["index"].fill_(-1), "must keep 4"),
        ("code4", lambda a, m: m.update(n=9), "n must be"),
        ("lean", lambda a, m: m.update(code="x"), "code must be"),
    ],
)
def test_contradicting_arrays_are_refused(code, change, message):
    weight = STBWeight.from_levels(levels_of((64, 128), code=code), code)
    arrays, meta = {name: array.clone() for name, array in weight.arrays().items()}, dict(weight.meta())
    change(arrays, meta)
    with pytest.raises(ValueError, match=message):
        STBWeight.from_arrays(arrays, weight.shape, weight.dtype, meta)
