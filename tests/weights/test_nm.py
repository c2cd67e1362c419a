"""Vector-wise N:M weights: the layout against a slow encoder, products against float64, packing, refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.core.hardware import cpu_features
from gossamer.weights import NMPattern, NMWeight, WeightFormat, nm_mask, nm_prune

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
PLAIN = frozenset[str]()
PATTERNS = st.builds(
    lambda n, extra, vector: NMPattern(n, n + extra, vector),
    st.integers(1, 40),
    st.integers(0, 30),
    st.sampled_from([32, 64, 128]),
)
SIZES = st.sampled_from([1, 2, 31, 32, 33, 64, 65, 130])


def normal(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slow_nm(dense, pattern):
    """The layout text, sentence by sentence: values ``(kept, padded)`` and index ``(kept, groups)``."""
    rows, columns = dense.shape
    windows, groups = math.ceil(columns / pattern.m), math.ceil(rows / pattern.vector)
    values = np.zeros((windows * pattern.n, groups * pattern.vector))
    index = np.zeros((windows * pattern.n, groups), np.uint8)
    strength = np.abs(dense.double().numpy())
    for group in range(groups):
        outputs = range(group * pattern.vector, min((group + 1) * pattern.vector, rows))
        for window in range(windows):
            sums = []
            for position in range(pattern.m):
                column = window * pattern.m + position
                real = column < columns
                sums.append((sum(strength[j, column] for j in outputs) if real else -1.0, position))
            chosen = sorted(position for _, position in sorted(sums)[pattern.m - pattern.n :])
            for rank, position in enumerate(chosen):
                index[window * pattern.n + rank, group] = position
                for j in outputs:
                    if window * pattern.m + position < columns:
                        values[window * pattern.n + rank, j] = dense[j, window * pattern.m + position]
    return values, index


@settings(max_examples=25)
@given(rows=SIZES, columns=SIZES, pattern=PATTERNS, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_arrays_match_the_layout_text(rows, columns, pattern, dtype, seed):
    dense = normal((rows, columns), dtype, seed)
    weight = NMWeight.from_dense(dense, pattern)
    values, index = slow_nm(dense, pattern)
    assert np.array_equal(weight.index_matrix.numpy(), index)
    assert np.array_equal(weight.value_matrix.double().numpy(), values)
    assert all(array.ndim == 1 and not array.is_floating_point() for array in weight.arrays().values())


@settings(max_examples=40)
@given(rows=SIZES, columns=SIZES, pattern=PATTERNS, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_a_pruned_matrix_comes_back_bit_by_bit(rows, columns, pattern, dtype, seed):
    pruned = nm_prune(normal((rows, columns), dtype, seed), pattern)
    weight = NMWeight.from_dense(pruned, pattern)
    assert torch.equal(weight.to_dense().view(BITS[dtype]), pruned.view(BITS[dtype]))
    again = NMWeight.from_arrays(weight.arrays(), weight.shape, weight.dtype, weight.meta())
    assert torch.equal(again.to_dense(torch.ones_like(pruned)), pruned)
    assert weight.density == pytest.approx(float((pruned != 0).double().mean()))


@settings(max_examples=40)
@given(rows=SIZES, columns=SIZES, pattern=PATTERNS, seed=st.integers(0, 99))
def test_every_window_and_group_keeps_n_inputs_or_all_that_it_has(rows, columns, pattern, seed):
    mask = nm_mask(normal((rows, columns), seed=seed).abs(), pattern)
    for top in range(0, rows, pattern.vector):
        group = mask[top : top + pattern.vector]
        assert (group == group[0]).all()
        for left in range(0, columns, pattern.m):
            inputs = group[0, left : left + pattern.m]
            missing = pattern.m - len(inputs)
            assert max(pattern.n - missing, 0) <= int(inputs.sum()) <= pattern.n
            assert int(inputs.sum()) == min(pattern.n, len(inputs))


def test_n_equal_to_m_is_the_dense_matrix():
    dense = normal((70, 50))
    assert torch.equal(NMWeight.from_dense(dense, "7:7").to_dense(), dense)
    assert bool(nm_mask(dense.abs(), NMPattern(7, 7)).all())


def test_scores_decide_and_ties_prune_the_earlier_input():
    weight = torch.tensor([[5.0, 1.0, 1.0, 1.0]])
    assert NMWeight.from_dense(weight, "1:4", scores=torch.tensor([[0.0, 2.0, 1.0, 1.0]])).to_dense()[0, 1] == 1
    assert nm_mask(torch.ones(1, 4), NMPattern(2, 4)).tolist() == [[False, False, True, True]]


def test_non_finite_weights_are_kept_and_come_back():
    weight = torch.ones(32, 8)
    weight[3, 2], weight[4, 5] = float("nan"), float("-inf")
    back = NMWeight.from_dense(weight, "1:4").to_dense()
    assert torch.equal(back.view(torch.int32)[:, [2, 5]], weight.view(torch.int32)[:, [2, 5]])


@pytest.mark.parametrize("pattern", ["1:4", "3:7:64", "16:32", "5:32:128", "100:256", "4:4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [None, PLAIN])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_stay_within_rounding_of_exact_ones(pattern, dtype, features, threads):
    for shape in [(1, 1), (33, 65), (130, 257), (256, 512)]:
        weight = NMWeight.from_dense(normal(shape, dtype), pattern)
        x = normal((7, shape[1]), seed=1)
        exact = x.double() @ weight.to_dense().double().T
        allowed = 1e-5 * math.sqrt(shape[1]) * (x.double().abs() @ weight.to_dense().double().abs().T + 1e-30)
        for count in (1, 3, 7):
            out = np.full((count, shape[0]), np.nan, np.float32)
            weight.matmul_small(x[:count].numpy(), out, threads, features)
            assert (np.abs(out - exact[:count].numpy()) <= allowed[:count].numpy()).all()
        out = np.full(shape[0], np.nan, np.float32)
        weight.bind(threads, features)(x[0].numpy(), out)
        assert (np.abs(out - exact[0].numpy()) <= allowed[0].numpy()).all()


def test_kernels_exist_for_this_processor():
    assert NMWeight.from_dense(normal((32, 32), torch.float16), "1:2")._wide(None) == bool(
        cpu_features() & {"f16c", "neon"}
    )


def test_a_saved_weight_comes_back(tmp_path):
    weight = NMWeight.from_dense(normal((40, 70), torch.bfloat16), "3:8")
    weight.save(tmp_path / "w.safetensors")
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, NMWeight) and loaded.pattern == weight.pattern
    assert torch.equal(loaded.to_dense(), weight.to_dense())


def test_what_is_stored_is_what_the_pattern_says():
    weight = NMWeight.from_dense(normal((64, 128), torch.bfloat16), "8:32")
    assert weight.nbytes == 64 * 32 * 2 + 32 * 2
    assert weight.dense_nbytes / weight.nbytes > 3.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "1 <= N <= M"),
        ((5, 4), "1 <= N <= M"),
        ((1, 257), "1 <= N <= M"),
        ((1, 4, 16), "vector must be one of"),
    ],
)
def test_bad_patterns_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        NMPattern(*arguments)


@pytest.mark.parametrize("text", ["", "4", "2:", "a:b", "1:2:3:4", "-1:4"])
def test_bad_pattern_texts_are_named(text):
    with pytest.raises(ValueError, match="pattern must be N:M"):
        NMPattern.parse(text)


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="weight must be one of"):
        NMWeight.from_dense(torch.ones(4, 4, dtype=torch.int32), "1:2")
    with pytest.raises(ValueError, match="must be a matrix"):
        NMWeight.from_dense(torch.ones(4), "1:2")
    with pytest.raises(ValueError, match="scores must have the shape"):
        NMWeight.from_dense(torch.ones(4, 4), "1:2", scores=torch.ones(4, 3))
    with pytest.raises(ValueError, match="finite"):
        nm_mask(torch.tensor([[float("nan"), 1.0]]), NMPattern(1, 2))
    with pytest.raises(ValueError, match="out must be"):
        NMWeight.from_dense(torch.ones(4, 4), "1:2").to_dense(torch.ones(4, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: a.pop("index"), "has values and index"),
        (lambda a, m: a.update(extra=a["index"]), "has values and index"),
        (lambda a, m: a.update(values=a["values"][:-1]), "values must be contiguous"),
        (lambda a, m: a.update(index=a["index"].to(torch.int8)), "index must be contiguous"),
        (lambda a, m: a["index"].fill_(1), "ascend in every window"),
        (lambda a, m: a["index"].fill_(200), "ascend in every window"),
        (lambda a, m: m.update(n=0), "1 <= N <= M"),
        (lambda a, m: m.update(vector=7), "vector must be"),
        (lambda a, m: a["values"].fill_(1), "must be zero outside"),
    ],
)
def test_contradicting_arrays_are_refused(change, message):
    weight = NMWeight.from_dense(normal((33, 10)), "2:4")
    arrays, meta = {name: array.clone() for name, array in weight.arrays().items()}, dict(weight.meta())
    change(arrays, meta)
    with pytest.raises(ValueError, match=message):
        NMWeight.from_arrays(arrays, weight.shape, weight.dtype, meta)
