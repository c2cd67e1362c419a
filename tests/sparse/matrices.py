"""Small sparse matrices of every kind for the tests of this room, and slow models to compare with."""

import numpy as np
import torch
from hypothesis import strategies as st

from gossamer.sparse import SparseMatrix

SIZES = (0, 1, 2, 7, 8, 9, 16, 17, 40)


def random_dense(shape, density, dtype=torch.float32, seed=0):
    """N(0, 1) entries at random places; some rows empty, and one full if density is above a half."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator)
    dense = torch.where(dense == 0, 1, dense)
    dense = dense.masked_fill(torch.rand(shape, generator=generator) >= density, 0)
    dense[torch.rand(shape[0], generator=generator) < 0.2] = 0
    if shape[0] and density > 0.5:
        dense[-1] = 1
    return dense.to(dtype)


def random_matrix(shape, density, dtype=torch.float32, seed=0, index=torch.int32):
    matrix = SparseMatrix.from_dense(random_dense(shape, density, dtype, seed))
    return SparseMatrix(matrix.indptr.to(index), matrix.indices.to(index), matrix.values, matrix.shape)


def entries(matrix):
    """The entries as a list of (row, column, value), read off the arrays one by one."""
    found = []
    for row in range(matrix.shape[0]):
        for place in range(int(matrix.indptr[row]), int(matrix.indptr[row + 1])):
            found.append((row, int(matrix.indices[place]), matrix.values[place].item()))
    return found


@st.composite
def matrices(draw, dtypes=(torch.float32,), sizes=SIZES):
    shape = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 0.9]))
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    return random_matrix(shape, density, draw(st.sampled_from(dtypes)), draw(st.integers(0, 9)), index)


def error_bound(absolute, terms, storage):
    """|C - C*| of float32 sums in any order: absolute is |A||B| in float64, terms the number of addends."""
    unit = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0, torch.float64: 0.0}[storage]
    step = 2.0**-53 if storage == torch.float64 else 2.0**-24
    least = (
        2.0**-25 if storage == torch.float16 else np.finfo(np.float32).tiny
    )  # half a step among the smallest numbers
    return (2 * (terms + 2) * step + unit) * absolute + least
