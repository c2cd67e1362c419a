"""ME-BCRS: every array against the layout text, its counters against formulas, and products read off the arrays."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import entries, matrices, random_matrix

from gossamer.sparse import MEBCRS, SparseMatrix, read_edges

TYPES = (torch.float16, torch.bfloat16, torch.float32)


def slow_arrays(matrix, height, width):
    """The layout text, sentence by sentence: pointers, columns, and values (0 for filling) as Python lists."""
    dense, pointers, columns, values, edges = matrix.to_dense().tolist(), [0], [], [], []
    number = {(row, column): i for i, (row, column, _) in enumerate(entries(matrix))}
    for first in range(0, matrix.shape[0], height):
        rows = range(first, first + height)
        distinct = sorted({column for row, column in number if row in rows})
        columns += distinct
        pointers.append(len(columns))
        for start in range(0, len(distinct), width):
            for row in rows:
                for column in distinct[start : start + width]:
                    values.append(dense[row][column] if row < len(dense) else 0.0)
                    edges.append(number.get((row, column), -1))
    return pointers, columns, values, edges


@given(matrix=matrices(TYPES), height=st.sampled_from([8, 16]))
def test_arrays_match_the_layout_text(matrix, height):
    built = MEBCRS.from_matrix(matrix, height=height)
    pointers, columns, values, edges = slow_arrays(matrix, height, built.width)
    assert built.width == (4 if matrix.dtype == torch.float32 else 8)
    assert built.row_pointers.tolist() == pointers and built.column_index.tolist() == columns
    assert built.values.tolist() == values and built.edge_of_slot().tolist() == edges
    assert built.values.dtype == matrix.dtype and built.row_pointers.dtype == torch.int32
    vectors = [b - a for a, b in pairwise(pointers)]
    assert built.blocks == sum(math.ceil(v / built.width) for v in vectors)
    size = matrix.dtype.itemsize
    assert built.nbytes == 4 * len(pointers) + 4 * len(columns) + size * height * len(columns)


@given(matrix=matrices(TYPES))
def test_the_round_trip_is_exact(matrix):
    again = MEBCRS.from_matrix(matrix).to_matrix()
    assert again.shape == matrix.shape and entries(again) == entries(matrix)
    assert torch.equal(MEBCRS.from_matrix(matrix).entry_values(), matrix.values)


def test_stored_zeros_nan_and_signed_zeros_survive():
    values = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    matrix = SparseMatrix.from_coo([0, 3, 9, 9], [1, 1, 0, 5], values, (10, 6))
    again = MEBCRS.from_matrix(matrix).to_matrix()
    assert torch.equal(again.indices, matrix.indices) and torch.equal(again.indptr, matrix.indptr)
    assert torch.equal(again.values.view(torch.int32), values.view(torch.int32))


def read_product(built, dense):
    """The product as a kernel reads it: block by block from values and columns; filling reads no dense row."""
    height, width = built.height, built.width
    out = np.zeros((math.ceil(built.shape[0] / height) * height, dense.shape[1]))
    values, edges = built.values.double().numpy(), built.edge_of_slot().numpy()
    for window in range(len(built.row_pointers) - 1):
        begin, end = built.row_pointers[window : window + 2].tolist()
        for start in range(begin, end, width):
            here = min(width, end - start)
            base = height * start
            for row in range(height):
                for i in range(here):
                    slot = base + row * here + i
                    if edges[slot] >= 0:
                        out[height * window + row] += values[slot] * dense[built.column_index[start + i]]
    return out[: built.shape[0]]


@given(matrix=matrices(TYPES), height=st.sampled_from([8, 16]))
def test_a_product_read_off_the_arrays_is_the_product(matrix, height):
    dense = np.random.default_rng(0).standard_normal((matrix.shape[1], 3))
    expected = matrix.to_dense().double().numpy() @ dense
    assert np.allclose(read_product(MEBCRS.from_matrix(matrix, height=height), dense), expected)


def test_filling_never_turns_infinity_into_nan():
    matrix = SparseMatrix.from_coo([0, 1], [0, 1], shape=(8, 2))
    dense = np.array([[np.inf], [1.0]])
    product = read_product(MEBCRS.from_matrix(matrix), dense)
    assert product[:2].tolist() == [[np.inf], [1.0]] and not product[2:].any()


def test_values_for_training_go_where_the_old_ones_were_and_carry_gradients():
    matrix = random_matrix((20, 15), 0.3)
    built = MEBCRS.from_matrix(matrix, torch.float16)
    values = torch.arange(1.0, matrix.nnz + 1, requires_grad=True)
    changed = built.with_values(values)
    assert entries(changed.to_matrix()) == entries(matrix.with_values(values.detach()).to(dtype=torch.float16))
    changed.values.float().square().sum().backward()
    assert torch.equal(values.grad, 2 * values.detach().half().float())
    with pytest.raises(ValueError, match="values must be of shape"):
        built.with_values(values[1:])


@pytest.mark.parametrize("width", [4, 8])
def test_parts_lose_no_vector_at_multiples_of_their_length(width):
    """The last part of a window whose vectors are an exact multiple is the place where a public builder loses it."""
    blocks = 3
    for vectors in (blocks * width - 1, blocks * width, blocks * width + 1, 2 * blocks * width, 1):
        dense = torch.zeros(24, 60)
        dense[8:16, :vectors] = 1
        dense[23, 5] = 1
        built = MEBCRS.from_matrix(SparseMatrix.from_dense(dense), {4: torch.float32, 8: torch.float16}[width])
        parts = built.parts(blocks)
        count = math.ceil(vectors / (blocks * width))
        assert parts.window.tolist() == [1] * count + [2]
        assert parts.atomic.tolist() == [int(count > 1)] * count + [0]
        lengths = parts.start.diff().tolist()
        assert sum(lengths) == vectors + 1 == built.column_index.numel()
        assert all(0 < length <= blocks * width for length in lengths)


@given(matrix=matrices(), blocks=st.integers(1, 4))
def test_parts_cover_all_vectors_once(matrix, blocks):
    built = MEBCRS.from_matrix(matrix)
    parts = built.parts(blocks)
    covered = []
    for i, window in enumerate(parts.window.tolist()):
        begin, end = parts.start[i : i + 2].tolist()
        low, high = built.row_pointers[window : window + 2].tolist()
        assert low <= begin < end <= high
        assert parts.atomic[i] == int(high - low > blocks * built.width)
        covered += range(begin, end)
    assert covered == list(range(built.column_index.numel()))


@pytest.mark.data
def test_bytes_against_16x1_vectors_agree_with_the_published_counts(data_file):
    """Vectors of 8 rows store less than vectors of 16 on a public graph: the ratio that the format is for."""
    graph = read_edges(data_file("sparse/musae_edges/git_edges.csv.gz"))
    eight, sixteen = MEBCRS.from_matrix(graph, torch.float16), MEBCRS.from_matrix(graph, torch.float16, height=16)
    assert graph.nnz == 578_006
    assert graph.nnz / eight.column_index.numel() == pytest.approx(1.03, abs=0.005)
    assert sixteen.values.numel() / eight.values.numel() == pytest.approx(1.94, abs=0.02)


def test_moving_between_devices_moves_every_array():
    built = MEBCRS.from_matrix(random_matrix((9, 9), 0.4)).to("meta")
    arrays = built.row_pointers, built.column_index, built.values, built.slot
    assert {array.device.type for array in arrays} == {"meta"}


def test_bad_input_is_refused():
    matrix = random_matrix((9, 9), 0.4, torch.float64)
    with pytest.raises(TypeError, match="dtype must be one of float16, bfloat16, float32, got torch.float64"):
        MEBCRS.from_matrix(matrix)
    with pytest.raises(ValueError, match="height must be 8 or 16, got 4"):
        MEBCRS.from_matrix(matrix, torch.float32, height=4)
    with pytest.raises(ValueError, match="blocks must be at least 1, got 0"):
        MEBCRS.from_matrix(matrix, torch.float32).parts(0)
