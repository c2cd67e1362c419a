"""Products on CPUs against float64, in every type, on every number of threads; planning; what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import error_bound, matrices, random_dense, random_matrix

from gossamer.core.measure import Bench
from gossamer.sparse import SparseMatrix, edge_softmax, sddmm, spmm, spmm_plan
from gossamer.sparse import _planner as planner
from gossamer.sparse._spmm_kernel import entry_shares, spmm_rows

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def assert_product(matrix, dense, product, threads=""):
    """The product is within rounding of float64 on the stored values, in whatever order it was summed."""
    sparse, other = matrix.to_dense().double().numpy(), dense.double().numpy()
    terms = (matrix.to_dense() != 0).sum(1, keepdim=True).numpy()
    bound = error_bound(np.abs(sparse) @ np.abs(other), terms, matrix.dtype)
    assert product.dtype == matrix.dtype and product.shape == (matrix.shape[0], dense.shape[1])
    assert np.all(np.abs(product.double().numpy() - sparse @ other) <= bound), threads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40)
@given(matrix=matrices(TYPES), n=st.sampled_from([0, 1, 3, 8, 13, 16, 31, 64, 100, 131]), seed=st.integers(0, 9))
def test_spmm_is_within_rounding_of_float64(matrix, n, seed):
    dense = random_dense((matrix.shape[1], n), 1.0, matrix.dtype, seed)
    assert_product(matrix, dense, spmm(matrix, dense, backend="rows"))


@settings(max_examples=40)
@given(matrix=matrices(TYPES), d=st.sampled_from([0, 1, 5, 8, 16, 23, 64]), seed=st.integers(0, 9))
def test_sddmm_is_within_rounding_of_float64(matrix, d, seed):
    x, y = (random_dense((size, d), 1.0, matrix.dtype, seed + i) for i, size in enumerate(matrix.shape))
    result = sddmm(matrix, x, y)
    places = matrix.rows.long(), matrix.indices.long()
    exact = (x.double() @ y.double().T)[places].numpy()
    bound = error_bound((x.double().abs() @ y.double().abs().T)[places].numpy(), d, matrix.dtype)
    assert result.dtype == matrix.dtype and result.indices is matrix.indices
    assert np.all(np.abs(result.values.double().numpy() - exact) <= bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_cut_long_rows_and_agree_with_one(threads, dtype):
    """A row that holds nearly everything is shared by all threads, between empty rows at either end."""
    dense = torch.zeros(9, 6000)
    dense[4] = 1
    dense[6, ::3] = -2
    matrix = SparseMatrix.from_dense(dense.to(dtype))
    other = random_dense((6000, 70), 1.0, dtype)
    x, y = random_dense((9, 40), 1.0, dtype), random_dense((6000, 40), 1.0, dtype)
    results = []
    for count in (1, 2, 5):
        threads(count)
        assert_product(matrix, other, spmm(matrix, other, backend="rows"), count)
        results.append(sddmm(matrix, x, y).values)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@given(degrees=st.lists(st.integers(0, 9), min_size=1, max_size=12), parts=st.integers(1, 20), n=st.integers(1, 3))
def test_every_cut_gives_the_same_product(degrees, parts, n):
    """Shares may start and end anywhere: inside rows, at their ends, in front of empty ones, or be empty."""
    indptr = np.cumsum([0, *degrees]).astype(np.int64)
    rows, places = entry_shares(indptr, parts)
    assert rows[0] == places[0] == 0 and rows[-1] == len(degrees) and places[-1] == indptr[-1]
    matrix = SparseMatrix.from_csr(
        indptr, np.concatenate([np.arange(d) for d in degrees] or [[]]), shape=(len(degrees), 9)
    )
    dense = np.arange(9 * n, dtype=np.float32).reshape(9, n)
    out = np.full((len(degrees) + parts, n), np.nan, np.float32)
    import gossamer.sparse._spmm_kernel as kernel

    before, kernel._LEAST = kernel._LEAST, 1
    try:
        spmm_rows(matrix.indptr.numpy(), matrix.indices.numpy(), matrix.values.numpy(), dense, out, parts)
    finally:
        kernel._LEAST = before
    assert np.array_equal(out[: len(degrees)], matrix.to_dense().numpy() @ dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_summed_in_float32(dtype):
    """A row of 4,096 ones, and one whose running sum in float16 would overflow before it comes back."""
    ones = SparseMatrix.from_dense(torch.ones(1, 4096, dtype=dtype))
    assert spmm(ones, torch.ones(4096, 3, dtype=dtype)).tolist() == [[4096.0] * 3]
    swing = torch.full((1, 4096), 64.0, dtype=dtype)
    swing[0, 2048:] = -64
    assert spmm(SparseMatrix.from_dense(swing), torch.full((4096, 1), 64.0, dtype=dtype)).tolist() == [[0.0]]
    half = SparseMatrix.from_dense(torch.full((1, 1 << 17), 0.5, dtype=dtype))
    assert spmm(half, torch.full((1 << 17, 1), 0.5, dtype=dtype)).tolist() == [[32768.0]]


@pytest.mark.parametrize("n", [1, 5, 8, 70])
def test_infinities_reach_only_the_rows_that_read_them(n):
    matrix = random_matrix((20, 30), 0.2)
    dense = torch.ones(30, n)
    dense[7] = float("inf")
    touched = (matrix.to_dense()[:, 7] != 0).numpy()
    product = spmm(matrix, dense, backend="rows").numpy()
    assert touched.any() and not touched.all()
    assert np.array_equal(np.isinf(product).all(1), touched) and not np.isnan(product).any()
    x = torch.ones(20, n)
    scores = sddmm(matrix, x, dense).values
    assert torch.equal(scores.isinf(), matrix.indices == 7)


def test_operands_may_be_strided_and_a_vector_gives_a_vector():
    matrix = random_matrix((9, 12), 0.4)
    dense = torch.randn(7, 12).T
    assert_product(matrix, dense, spmm(matrix, dense))
    assert torch.equal(spmm(matrix, dense[:, 0]), spmm(matrix, dense[:, :1])[:, 0])
    wide = torch.randn(12, 14)[:, ::2]
    assert_product(matrix, wide, spmm(matrix, wide, backend="rows"))


def test_sddmm_needs_memory_for_entries_only():
    """The dense product of these would take 400 GB."""
    matrix = SparseMatrix.from_coo([0, 319_999], [319_999, 5], shape=(320_000, 320_000))
    x = torch.ones(320_000, 1)
    assert sddmm(matrix, x, x).values.tolist() == [1, 1]


@given(matrix=matrices((torch.float16, torch.float32, torch.float64)))
def test_softmax_of_a_row_is_that_of_its_entries(matrix):
    scores = matrix.with_values(matrix.values * 30)
    shares = edge_softmax(scores)
    for row in range(matrix.shape[0]):
        begin, end = int(matrix.indptr[row]), int(matrix.indptr[row + 1])
        exact = torch.softmax(scores.values[begin:end].double(), 0)
        assert torch.allclose(
            shares.values[begin:end].double(), exact, atol=1e-3 if matrix.dtype.itemsize == 2 else 1e-6
        )


@given(matrix=matrices(sizes=(1, 8, 17)), n=st.sampled_from([1, 8, 20]))
def test_every_way_gives_the_same_product(matrix, n):
    dense = random_dense((matrix.shape[1], n), 1.0)
    for backend in ("rows", "torch", "scipy", "dense"):
        assert_product(matrix, dense, spmm(matrix, dense, backend=backend), backend)


def test_another_library_sees_changed_values():
    matrix = random_matrix((6, 6), 0.9)
    dense = torch.ones(6, 2)
    for backend in ("torch", "scipy", "dense"):
        spmm(matrix, dense, backend=backend)
        matrix.values.mul_(2)
        assert_product(matrix, dense, spmm(matrix, dense, backend=backend), backend)
        other = matrix.with_values(matrix.values + 1)
        assert_product(other, dense, spmm(other, dense, backend=backend), backend)


@pytest.fixture
def fresh_table(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "_table_path", lambda: tmp_path / "table.json")
    planner._table.cache_clear()
    yield tmp_path / "table.json"
    planner._table.cache_clear()


def test_a_clear_case_is_predicted_and_a_near_one_timed_once(fresh_table, monkeypatch):
    clear = SparseMatrix.from_coo(np.arange(50_000), np.arange(50_000))
    plan = spmm_plan(clear, 128, threads=1)
    assert plan.backend == "rows" and not plan.measured and "ahead" in plan.explain()
    near = random_matrix((40, 40), 0.9)
    plan = spmm_plan(near, 1, threads=1)
    assert plan.measured and plan.seconds[plan.backend] == min(plan.seconds[name] for name in plan.measured)
    assert spmm_plan(near, 1, threads=1) is plan and fresh_table.is_file()
    assert plan.explain().splitlines()[1].split()[0] == plan.backend
    planner._table.cache_clear()
    monkeypatch.setattr(Bench, "compare", None)
    again = spmm_plan(random_matrix((40, 40), 0.9, seed=0), 1, threads=1)
    assert again.backend == plan.backend


def test_a_plan_says_when_it_steps_aside(fresh_table):
    plan = spmm_plan(random_matrix((300, 300), 1.0), 1, threads=1)
    assert plan.backend == "rows" or f"steps aside for {plan.backend}" in plan.explain()


def test_half_types_are_left_to_those_that_can(fresh_table):
    matrix = random_matrix((9, 9), 0.5, torch.float16)
    assert set(spmm_plan(matrix, 4).seconds) == {"rows", "dense"}
    with pytest.raises(ValueError, match="'scipy' cannot multiply torch.float16; accepted are rows, dense"):
        spmm(matrix, torch.ones(9, 4, dtype=torch.float16), backend="scipy")


def test_bad_operands_are_refused():
    matrix = random_matrix((4, 6), 0.5)
    with pytest.raises(ValueError, match=r"dense must have 6 rows for a sparse matrix \(4, 6\), got \(4, 2\)"):
        spmm(matrix, torch.ones(4, 2))
    with pytest.raises(ValueError, match="dense must have 6 rows"):
        spmm(matrix, torch.ones(6, 2, 2))
    with pytest.raises(TypeError, match="dense must be torch.float32 like the other operand, got torch.float64"):
        spmm(matrix, torch.ones(6, 2, dtype=torch.float64))
    with pytest.raises(TypeError, match="dense must be a torch.Tensor, got ndarray"):
        spmm(matrix, np.ones((6, 2)))
    with pytest.raises(TypeError, match="dense must be dense"):
        spmm(matrix, torch.ones(6, 2).to_sparse())
    with pytest.raises(ValueError, match="dense must be on cpu .* got meta"):
        spmm(matrix, torch.ones(6, 2, device="meta"))
    with pytest.raises(ValueError, match="backend must be one of auto, rows, torch, scipy, dense, got 'cusparse'"):
        spmm(matrix, torch.ones(6, 2), backend="cusparse")
    with pytest.raises(ValueError, match="as many features, got 2 and 3"):
        sddmm(matrix, torch.ones(4, 2), torch.ones(6, 3))
    with pytest.raises(ValueError, match="y must have 6 rows"):
        sddmm(matrix, torch.ones(4, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="n must not be negative"):
        spmm_plan(matrix, -1)
