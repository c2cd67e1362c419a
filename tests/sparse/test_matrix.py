"""The container: canonical whatever it comes from, exact on the way out, and clear about what it refuses."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import entries, matrices, random_dense, random_matrix

from gossamer.sparse import SparseMatrix


@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    count=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_coordinates_in_any_order_are_sorted_and_equal_ones_added(shape, count, seed):
    generator = np.random.default_rng(seed)
    rows, columns = generator.integers(0, shape[0], count), generator.integers(0, shape[1], count)
    values = generator.integers(-4, 5, count).astype(np.float32)
    matrix = SparseMatrix.from_coo(rows, columns, values, shape)
    model = {}
    for row, column, value in zip(rows, columns, values, strict=True):
        model[int(row), int(column)] = model.get((int(row), int(column)), 0.0) + float(value)
    assert entries(matrix) == [(row, column, value) for (row, column), value in sorted(model.items())]


@given(matrix=matrices(dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_every_way_out_and_in_again_is_exact(matrix):
    dense = matrix.to_dense()
    for again in (
        SparseMatrix.from_dense(dense),
        SparseMatrix.from_torch(matrix.to_torch()),
        SparseMatrix.from_torch(matrix.to_torch(torch.sparse_coo)),
        SparseMatrix.from_torch(matrix.to_torch(torch.sparse_csr).to_sparse_csc()) if matrix.nnz else matrix,
        SparseMatrix.from_csr(matrix.indptr, matrix.indices, matrix.values, matrix.shape),
        SparseMatrix.from_edge_index(*matrix.to_edge_index(), matrix.shape),
    ):
        assert again.shape == matrix.shape and again.dtype == matrix.dtype
        assert entries(again) == entries(matrix)
    wide = matrix.to(dtype=torch.float64)
    assert entries(SparseMatrix.from_scipy(wide.to_scipy())) == entries(wide)
    assert np.array_equal(wide.to_scipy().toarray(), dense.double().numpy())
    assert matrix.rows.tolist() == [row for row, _, _ in entries(matrix)]


@given(matrix=matrices())
def test_the_transpose_is_the_transpose_and_remembered(matrix):
    transposed = matrix.transposed()
    assert torch.equal(transposed.to_dense(), matrix.to_dense().T)
    assert matrix.with_values(matrix.values * 2).transposed().indices is transposed.indices
    assert entries(transposed.transposed()) == entries(matrix)


def test_saving_keeps_every_bit(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        matrix = random_matrix((13, 9), 0.3, dtype, index=torch.int64)
        matrix.save(tmp_path / "a.safetensors")
        again = SparseMatrix.load(tmp_path / "a.safetensors")
        assert again.shape == matrix.shape and again.indices.dtype == torch.int64
        assert torch.equal(again.indptr, matrix.indptr) and torch.equal(again.indices, matrix.indices)
        assert torch.equal(again.values, matrix.values)


def test_a_damaged_or_foreign_or_newer_file_is_refused(tmp_path):
    from gossamer.core.files import save_arrays

    path = tmp_path / "a.safetensors"
    matrix = random_matrix((5, 5), 0.5)
    matrix.save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        SparseMatrix.load(path)
    save_arrays(path, {"x": torch.ones(1)}, {})
    with pytest.raises(ValueError, match="no sparse matrix"):
        SparseMatrix.load(path)
    save_arrays(path, {}, {"gossamer_sparse": "9", "rows": "0", "columns": "0"})
    with pytest.raises(ValueError, match="version 9"):
        SparseMatrix.load(path)


def test_numbers_of_other_types_become_the_floats_that_hold_them():
    boolean = sp.csr_array(np.eye(3, dtype=bool))
    assert SparseMatrix.from_scipy(boolean).dtype == torch.float32
    assert SparseMatrix.from_scipy(boolean.astype(np.int64) * (2**30 + 1)).values.tolist() == [2**30 + 1] * 3
    with pytest.raises(TypeError, match="real numbers, got complex128"):
        SparseMatrix.from_scipy(boolean.astype(complex))


def test_unsorted_repeated_scipy_rows_are_put_in_order():
    rough = sp.csr_array((np.array([1.0, 2.0, 4.0]), np.array([2, 0, 2]), np.array([0, 3, 3])), shape=(2, 3))
    assert entries(SparseMatrix.from_scipy(rough)) == [(0, 0, 2.0), (0, 2, 5.0)]


def test_edge_index_sums_over_incoming_edges():
    matrix = SparseMatrix.from_edge_index(torch.tensor([[0, 1], [2, 2]]), torch.tensor([3.0, 5.0]))
    assert matrix.to_dense()[2].tolist() == [3, 5, 0]


def test_nan_is_an_entry_and_negative_zero_none():
    matrix = SparseMatrix.from_dense(torch.tensor([[float("nan"), -0.0, 0.0, float("inf")]]))
    assert matrix.indices.tolist() == [0, 3]
    stored = SparseMatrix.from_coo([0], [1], [0.0], (1, 2))
    assert stored.nnz == 1


BAD = [
    ({"indptr": torch.tensor([0, 1])}, ValueError, "indptr must have 3 entries for 2 rows, got 2"),
    ({"indptr": torch.tensor([0, 2, 3])}, ValueError, "indptr must run from 0 to 2, got 0 to 3"),
    ({"indptr": torch.tensor([0, 3, 2])}, ValueError, "indptr must not decrease"),
    ({"indices": torch.tensor([0, 3])}, ValueError, r"indices must lie in \[0, 3\), but row 1"),
    ({"indices": torch.tensor([-1, 0])}, ValueError, r"indices must lie in \[0, 3\), but row 0"),
    ({"indptr": torch.tensor([0, 2, 2]), "indices": torch.tensor([1, 0])}, ValueError, "ascend strictly in every row"),
    ({"indptr": torch.tensor([0, 2, 2]), "indices": torch.tensor([1, 1])}, ValueError, "ascend strictly in every row"),
    ({"indices": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "one type, got torch.int64 and torch.int32"),
    ({"indices": torch.tensor([0.0, 1.0])}, TypeError, "indices must be int32 or int64, got torch.float32"),
    ({"indices": [0, 1]}, TypeError, "indices must be a torch.Tensor, got list"),
    ({"values": torch.ones(3)}, ValueError, "equally long, got 2 and 3"),
    ({"values": torch.ones(2, dtype=torch.int32)}, TypeError, "values must be one of float16, .* got torch.int32"),
    ({"values": torch.ones(2, 1)}, ValueError, "values must have one dimension"),
    ({"shape": (2, -3)}, ValueError, "shape must not be negative"),
    ({"shape": 4}, ValueError, "shape must be two numbers"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=[message for _, _, message in BAD])
def test_arrays_that_contradict_each_other_are_refused(change, kind, message):
    sound = {
        "indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 1]), "values": torch.ones(2), "shape": (2, 3),
    }  # fmt: skip
    SparseMatrix(**sound)
    with pytest.raises(kind, match=message):
        SparseMatrix(**(sound | change))


def test_bad_coordinates_are_refused():
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 2\), got 0 to 5"):
        SparseMatrix.from_coo([0, 5], [0, 0], shape=(2, 2))
    with pytest.raises(ValueError, match=r"columns must lie in \[0, 2\), got -1 to 0"):
        SparseMatrix.from_coo([0, 1], [0, -1], shape=(2, 2))
    with pytest.raises(TypeError, match="rows must be integers, got float64"):
        SparseMatrix.from_coo([0.5], [0])
    with pytest.raises(ValueError, match="values must be of shape"):
        SparseMatrix.from_coo([0], [0], [1.0, 2.0])
    with pytest.raises(ValueError, match="edge_index must be of shape"):
        SparseMatrix.from_edge_index(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="SciPy sparse matrix, got ndarray"):
        SparseMatrix.from_scipy(np.eye(3))
    matrix = random_matrix((4, 4), 0.9)
    with pytest.raises(ValueError, match="one per entry"):
        matrix.with_values(torch.ones(matrix.nnz + 1))
    with pytest.raises(ValueError, match="layout must be"):
        matrix.to_torch(torch.sparse_bsr)


def test_int32_is_taken_where_it_fits_and_refused_where_not():
    assert SparseMatrix.from_coo([0], [5]).indices.dtype == torch.int32
    large = SparseMatrix.from_coo([0], [2**31])
    assert large.indices.dtype == torch.int64 and large.shape == (1, 2**31 + 1)
    with pytest.raises(ValueError, match="index_dtype int32 cannot hold"):
        SparseMatrix.from_coo([0], [2**31], index_dtype=torch.int32)


def test_density_and_bytes_are_those_of_the_arrays():
    matrix = SparseMatrix.from_dense(random_dense((8, 8), 1.0))
    assert matrix.density == matrix.nnz / 64
    assert matrix.nbytes == 9 * 4 + matrix.nnz * 8
