"""Grouped coordinates: order and counters against the layout text, conversion bit for bit, deterministic products."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import entries, error_bound, matrices, random_dense, random_matrix

from gossamer.sparse import GCOO, gcoo_spmm, spdm

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def slow_groups(matrix, p):
    """Groups of (column, row, value), sorted, by the layout text."""
    groups = [[] for _ in range(-(-matrix.shape[0] // p))]
    for row, column, value in entries(matrix):
        groups[row // p].append((column, row, value))
    return [sorted(group) for group in groups]


@given(matrix=matrices(TYPES), p=st.integers(1, 16))
def test_arrays_match_the_layout_text_from_dense_and_from_rows(matrix, p):
    groups = slow_groups(matrix, p)
    flat = [entry for group in groups for entry in group]
    starts = np.concatenate([[0], np.cumsum([len(group) for group in groups])]).astype(int).tolist()
    for built in (GCOO.from_matrix(matrix, p), GCOO.from_dense(matrix.to_dense(), p)):
        columns, rows, values = built.columns.tolist(), built.rows.tolist(), built.values.tolist()
        assert list(zip(columns, rows, values, strict=True)) == flat
        assert built.starts.tolist() == starts and built.counts.tolist() == [len(group) for group in groups]
        assert built.dense_rows_read == sum(len({column for column, _, _ in group}) for group in groups)
        assert built.nbytes == (8 + matrix.dtype.itemsize) * matrix.nnz + 8 * len(groups) + 4
        assert entries(built.to_matrix()) == entries(matrix)
        assert torch.equal(built.to_dense(), matrix.to_dense())


def test_nan_and_infinity_are_kept_negative_zero_is_dropped_small_ones_on_request():
    dense = torch.tensor([[float("nan"), -0.0, 0.0], [float("-inf"), 0.25, -0.5]])
    built = GCOO.from_dense(dense)
    expected = torch.where(dense == 0, torch.zeros_like(dense), dense)
    assert torch.equal(built.to_dense().view(torch.int32), expected.view(torch.int32))
    assert built.nnz == 4 and GCOO.from_dense(dense, threshold=0.25).nnz == 3


@given(matrix=matrices(TYPES), p=st.sampled_from([1, 3, 4, 16]), n=st.sampled_from([1, 7, 16]))
def test_products_are_within_rounding_of_float64_and_repeat_bit_for_bit(matrix, p, n):
    dense = random_dense((matrix.shape[1], n), 1.0, matrix.dtype, seed=1)
    built = GCOO.from_matrix(matrix, p)
    product = gcoo_spmm(built, dense)
    sparse, other = matrix.to_dense().double().numpy(), dense.double().numpy()
    bound = error_bound(np.abs(sparse) @ np.abs(other), matrix.shape[1], matrix.dtype)
    assert np.all(np.abs(product.double().numpy() - sparse @ other) <= bound)
    assert torch.equal(product, gcoo_spmm(built, dense))
    assert torch.equal(product, spdm(matrix.to_dense(), dense, p=p))


def test_a_group_with_nearly_all_entries_is_like_any_other():
    dense = torch.zeros(9, 700)
    dense[4] = torch.arange(1.0, 701)
    built = GCOO.from_dense(dense)
    assert built.counts.tolist() == [0, 700, 0]
    assert torch.equal(gcoo_spmm(built, torch.eye(700)), dense)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="p must be from 1 to 16, got 0"):
        GCOO.from_dense(torch.eye(3), p=0)
    with pytest.raises(ValueError, match="p must be from 1 to 16, got 17"):
        GCOO.from_matrix(random_matrix((3, 3), 0.5), p=17)
    with pytest.raises(ValueError, match="threshold must not be negative, got -1"):
        GCOO.from_dense(torch.eye(3), threshold=-1)
    with pytest.raises(TypeError, match="dense must be a tensor of floating point"):
        GCOO.from_dense(torch.eye(3).int())
    with pytest.raises(ValueError, match="dense must be a matrix on the CPU"):
        GCOO.from_dense(torch.ones(3))
    built = GCOO.from_dense(torch.eye(3))
    with pytest.raises(ValueError, match="dense must be a matrix of 3 rows"):
        gcoo_spmm(built, torch.ones(4, 2))
    with pytest.raises(TypeError, match="dense must be torch.float32"):
        gcoo_spmm(built, torch.ones(3, 2).double())
