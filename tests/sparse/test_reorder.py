"""Orders are permutations, products come back exactly, and the orders do what they are for."""

import importlib.util

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import matrices, random_matrix

from gossamer.sparse import SparseMatrix, read_edges, reorder, spmm, statistics

HAS_METIS = importlib.util.find_spec("pymetis") is not None
METHODS = ("rcm", "degree", "lsh", *(["metis"] if HAS_METIS else []))


@given(matrix=matrices(), method=st.sampled_from(METHODS), symmetric=st.sampled_from([None, False, True]))
def test_products_of_the_reordered_matrix_come_back_bit_for_bit(matrix, method, symmetric):
    rows, columns = matrix.shape
    if rows != columns and (symmetric or method in ("rcm", "metis")):
        with pytest.raises(ValueError, match="matrix must be square"):
            reorder(matrix, method, symmetric)
        return
    ordering = reorder(matrix, method, symmetric)
    assert sorted(ordering.order.tolist()) == list(range(rows))
    moved = ordering.apply(matrix)
    expected = matrix.to_dense()[ordering.order]
    assert torch.equal(moved.to_dense(), expected[:, ordering.order] if ordering.symmetric else expected)
    whole = SparseMatrix(matrix.indptr, matrix.indices, matrix.values.round(), matrix.shape)
    dense = torch.arange(columns * 5.0).reshape(columns, 5)
    product = spmm(ordering.apply(whole), ordering.apply_dense(dense), backend="rows")
    assert torch.equal(ordering.undo(product), spmm(whole, dense, backend="rows"))


def test_rcm_narrows_a_shuffled_band():
    size = 200
    band = torch.zeros(size, size)
    for offset in (-2, -1, 0, 1, 2):
        band += torch.diag(torch.ones(size - abs(offset)), offset)
    shuffle = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    matrix = SparseMatrix.from_dense(band[shuffle][:, shuffle])
    moved = reorder(matrix, "rcm").apply(matrix)
    width = (moved.rows - moved.indices).abs().max()
    assert width <= 6 < (matrix.rows - matrix.indices).abs().max()
    assert statistics(moved).nnz_per_vector8 > 2 * statistics(matrix).nnz_per_vector8


def test_hashing_brings_equal_rows_together():
    rows = torch.kron(torch.rand(20, 300, generator=torch.Generator().manual_seed(0)) < 0.05, torch.ones(8, 1))
    shuffle = torch.randperm(160, generator=torch.Generator().manual_seed(1))
    matrix = SparseMatrix.from_dense(rows.float()[shuffle])
    moved = reorder(matrix, "lsh").apply(matrix)
    assert statistics(moved).nnz_per_vector8 > 7 > 2 > statistics(matrix).nnz_per_vector8


def test_degrees_fall():
    moved = reorder(random_matrix((40, 17), 0.3), "degree").apply(random_matrix((40, 17), 0.3))
    assert np.all(np.diff(moved.indptr.diff().numpy()) <= 0)


@pytest.mark.data
def test_rcm_packs_the_squirrel_graph_as_published(data_file):
    """1.31 entries a vector in natural order, 3.20 after SciPy's RCM."""
    graph = read_edges(data_file("sparse/musae_edges/squirrel_edges.csv.gz"))
    assert statistics(graph).nnz_per_vector8 == pytest.approx(1.31, abs=0.01)
    assert statistics(reorder(graph, "rcm").apply(graph)).nnz_per_vector8 == pytest.approx(3.20, abs=0.15)


def test_metis_without_its_library_says_what_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ModuleNotFoundError, match="pymetis"):
        reorder(random_matrix((9, 9), 0.5), "metis")


def test_unknown_methods_and_wrong_sizes_are_refused():
    matrix = random_matrix((9, 9), 0.5)
    with pytest.raises(ValueError, match="method must be one of rcm, degree, lsh, metis, got 'amd'"):
        reorder(matrix, "amd")
    with pytest.raises(ValueError, match="product must have 9 rows like the order, got 8"):
        reorder(matrix, "rcm").undo(torch.ones(8, 2))
