"""Windows of rows and their vectors: the granularity that tensor-core formats work at.

A window is a run of ``height`` consecutive rows (8 here, 16 in earlier work), a vector one column of a window that has
at least one entry. Everything that such formats store follows from the vectors and from which vector each entry is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import prange

from gossamer.core.jit import inlined, kernel, parallel_kernel
from gossamer.sparse._matrix import SparseMatrix


@dataclass(frozen=True)
class Windows:
    """The vectors of a matrix, window by window, columns ascending.

    height: rows of a window; the last one may have fewer.
    offset: int64 ``(windows + 1,)``, where each window's vectors start.
    column: int64 ``(vectors,)``. count: int64 ``(vectors,)``, entries of each vector, 1 to ``height``.
    vector: int64 ``(nnz,)``, the vector of every entry, in CSR order. row: int64 ``(nnz,)``, its row in the window.
    """

    height: int
    offset: np.ndarray
    column: np.ndarray
    count: np.ndarray
    vector: np.ndarray
    row: np.ndarray

    @property
    def window_of_vector(self) -> np.ndarray:
        """The window of every vector, int64."""
        return np.repeat(np.arange(len(self.offset) - 1), np.diff(self.offset))


def find_windows(matrix: SparseMatrix, height: int = 8) -> Windows:
    """The vectors of ``matrix``, found by merging the rows of each window: O(non-zeros + height * vectors).

    Raises:
        ValueError: ``height`` is not in 1 to 32.
    """
    if not 1 <= height <= 32:
        raise ValueError(f"height must be from 1 to 32, got {height}")
    indptr = matrix.indptr.cpu().numpy().astype(np.int64, copy=False)
    indices = matrix.indices.cpu().numpy().astype(np.int64, copy=False)
    windows = -(-matrix.shape[0] // height)
    sizes = np.zeros(windows + 1, np.int64)
    _count(indptr, indices, height, sizes)
    offset = np.cumsum(sizes)
    column, count = np.empty(offset[-1], np.int64), np.empty(offset[-1], np.int64)
    vector, row = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
    _fill(indptr, indices, height, offset, column, count, vector, row)
    return Windows(height, offset, column, count, vector, row)


@inlined
def _heads(indptr: Any, window: int, height: int) -> tuple[int, Any]:
    """First row and the next entry of each row of a window."""
    first = window * height
    rows = min(height, len(indptr) - 1 - first)
    heads = np.empty(rows, np.int64)
    for row in range(rows):
        heads[row] = indptr[first + row]
    return first, heads


@inlined
def _next_column(indptr: Any, indices: Any, first: int, heads: Any) -> int:
    """The smallest column that a row of the window has not passed yet; the largest integer where all are done."""
    column: Any = np.iinfo(np.int64).max
    for row in range(len(heads)):
        if heads[row] < indptr[first + row + 1] and indices[heads[row]] < column:
            column = np.int64(indices[heads[row]])
    return column


@parallel_kernel
def _count(indptr: Any, indices: Any, height: int, sizes: Any) -> None:
    for window in prange(len(sizes) - 1):
        first, heads = _heads(indptr, window, height)
        vectors = 0
        column = _next_column(indptr, indices, first, heads)
        while column != np.iinfo(np.int64).max:
            for row in range(len(heads)):
                if heads[row] < indptr[first + row + 1] and indices[heads[row]] == column:
                    heads[row] += 1
            vectors += 1
            column = _next_column(indptr, indices, first, heads)
        sizes[window + 1] = vectors


@parallel_kernel
def _fill(
    indptr: Any, indices: Any, height: int, offset: Any, columns: Any, counts: Any, vectors: Any, rows: Any
) -> None:
    for window in prange(len(offset) - 1):
        first, heads = _heads(indptr, window, height)
        vector = offset[window]
        column = _next_column(indptr, indices, first, heads)
        while column != np.iinfo(np.int64).max:
            count = 0
            for row in range(len(heads)):
                place = heads[row]
                if place < indptr[first + row + 1] and indices[place] == column:
                    vectors[place] = vector
                    rows[place] = row
                    heads[row] += 1
                    count += 1
            columns[vector] = column
            counts[vector] = count
            vector += 1
            column = _next_column(indptr, indices, first, heads)


@kernel
def histogram(counts: Any, height: int) -> Any:
    """How many vectors have 0, 1, ..., ``height`` entries, int64 ``(height + 1,)``."""
    out = np.zeros(height + 1, np.int64)
    for count in counts:
        out[count] += 1
    return out
