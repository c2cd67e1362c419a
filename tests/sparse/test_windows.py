"""Vectors of windows and the statistics made of them, against counting entry by entry."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import entries, matrices

from gossamer.sparse import SparseMatrix, read_matrix, statistics
from gossamer.sparse._windows import find_windows


def slow_vectors(matrix, height):
    """{(window, column): entries}, counted one by one."""
    vectors = {}
    for row, column, _ in entries(matrix):
        vectors[row // height, column] = vectors.get((row // height, column), 0) + 1
    return dict(sorted(vectors.items()))


@given(matrix=matrices(), height=st.sampled_from([1, 3, 8, 16]))
def test_vectors_are_those_of_counting(matrix, height):
    windows = find_windows(matrix, height)
    vectors = slow_vectors(matrix, height)
    assert list(zip(windows.window_of_vector.tolist(), windows.column.tolist(), strict=True)) == list(vectors)
    assert windows.count.tolist() == list(vectors.values())
    places = {key: number for number, key in enumerate(vectors)}
    assert windows.vector.tolist() == [places[row // height, column] for row, column, _ in entries(matrix)]
    assert windows.row.tolist() == [row % height for row, _, _ in entries(matrix)]


@given(matrix=matrices())
def test_statistics_are_those_of_counting(matrix):
    found = statistics(matrix)
    vectors = slow_vectors(matrix, 8)
    degrees = [0] * matrix.shape[0]
    for row, _, _ in entries(matrix):
        degrees[row] += 1
    assert found.vectors8 == len(vectors) and found.vectors16 == len(slow_vectors(matrix, 16))
    assert list(found.histogram8) == [list(vectors.values()).count(n) for n in range(9)]
    assert found.degree_largest == max(degrees, default=0) and found.empty_rows == degrees.count(0)
    assert found.share_in_vectors(1) == (1 if matrix.nnz else 0)
    assert statistics(matrix) is found


@pytest.mark.data
def test_figures_of_public_graphs_are_those_published(data_file):
    """Non-zeros per vector as measured for the dossier: bcsstk13 3.44; pubmed 1.01."""
    fem = statistics(read_matrix(data_file("sparse/lagraph_matrices/bcsstk13.mtx.gz")))
    assert fem.nnz_per_vector8 == pytest.approx(3.44, abs=0.005)
    pubmed = statistics(read_matrix(data_file("sparse/citation_mtx/pubmed.mtx.gz")))
    assert pubmed.nnz_per_vector8 == pytest.approx(1.01, abs=0.005)


def test_a_height_that_no_window_has_is_refused():
    with pytest.raises(ValueError, match="height must be from 1 to 32, got 0"):
        find_windows(SparseMatrix.from_dense(torch.eye(3)), 0)
