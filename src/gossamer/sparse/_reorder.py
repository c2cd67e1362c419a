"""Putting rows that look alike next to each other, so that windows of rows share columns.

On a randomly numbered graph almost every 8x1 vector holds one entry; after reordering, several (the figures are on the
docs page). The order is worth its time where a matrix is multiplied often. Products of a reordered matrix are put back
exactly: nothing but rows is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.jit import kernel
from gossamer.sparse._matrix import SparseMatrix

_HASHES = 8
_PART = 32


@dataclass(frozen=True, eq=False)
class Ordering:
    """A new order of the rows, and of the columns too where ``symmetric``.

    order: int64 ``(m,)``; row ``i`` of the reordered matrix is row ``order[i]`` of the old one.
    """

    method: str
    order: Tensor
    symmetric: bool

    def apply(self, matrix: SparseMatrix) -> SparseMatrix:
        """The reordered matrix."""
        self._check("matrix", matrix.shape[0])
        if self.symmetric and matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix must be square for a symmetric order, got shape {matrix.shape}")
        new = self.inverse()
        columns = matrix.indices.long()
        columns = new[columns] if self.symmetric else columns
        rows = new[matrix.rows.long()]
        moved = SparseMatrix.from_coo(rows, columns, matrix.values, matrix.shape, matrix.indices.dtype)
        return moved.to(matrix.device)

    def apply_dense(self, dense: Tensor) -> Tensor:
        """The dense operand that the reordered matrix multiplies: its rows reordered, or itself unless ``symmetric``."""
        if not self.symmetric:
            return dense
        self._check("dense", dense.shape[0])
        return dense[self.order.to(dense.device)]

    def undo(self, product: Tensor) -> Tensor:
        """The rows of a product of the reordered matrix, back where they were."""
        self._check("product", product.shape[0])
        return product[self.inverse().to(product.device)]

    def inverse(self) -> Tensor:
        """The new place of every old row, int64 ``(m,)``."""
        return torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(self.order)))

    def _check(self, name: str, rows: int) -> None:
        if rows != len(self.order):
            raise ValueError(f"{name} must have {len(self.order)} rows like the order, got {rows}")


def reorder(matrix: SparseMatrix, method: str = "rcm", symmetric: bool | None = None, seed: int = 0) -> Ordering:
    """Find a better order of the rows of ``matrix``.

    method: "rcm" (reverse Cuthill-McKee: neighbours close together), "degree" (rows by falling number of entries),
        "lsh" (rows with equal min-hashes of their columns together), "metis" (parts of about 32 rows; needs pymetis).
    symmetric: move columns like rows, which also brings reads of the dense operand together; needs a square matrix.
        By default for rcm and metis.
    seed: of the hashes and of METIS.

    Raises:
        ValueError: ``method`` is unknown, or the matrix is not square where it has to be.
        ModuleNotFoundError: METIS is asked for and pymetis is not installed.

    >>> reorder(SparseMatrix.from_coo([0, 2, 2], [0, 0, 1]), "degree").order.tolist()
    [2, 0, 1]
    """
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
    both = method in ("rcm", "metis") if symmetric is None else symmetric
    if (both or method in ("rcm", "metis")) and matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"matrix must be square for {method} in this way, got shape {matrix.shape}; take degree or lsh"
        )
    order = _METHODS[method](matrix, seed) if matrix.shape[0] else np.empty(0, np.int64)
    return Ordering(method, torch.from_numpy(np.array(order, np.int64)), both)


def _rcm(matrix: SparseMatrix, seed: int) -> np.ndarray:
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    return np.asarray(reverse_cuthill_mckee(_undirected(matrix), symmetric_mode=True))


def _degree(matrix: SparseMatrix, seed: int) -> np.ndarray:
    return np.argsort(-np.diff(matrix.indptr.cpu().numpy()), kind="stable")


def _lsh(matrix: SparseMatrix, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    factors = generator.integers(1, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    hashes = np.full((_HASHES, matrix.shape[0]), 2**64 - 1, np.uint64)
    _min_hashes(matrix.indptr.cpu().numpy(), matrix.indices.cpu().numpy(), factors, hashes)
    return np.lexsort(hashes[::-1])


def _metis(matrix: SparseMatrix, seed: int) -> np.ndarray:
    try:
        import pymetis
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "method 'metis' needs pymetis: pip install 'gossamer[graphs]'", name="pymetis"
        ) from None

    graph = _undirected(matrix)
    graph.setdiag(0)
    graph.eliminate_zeros()
    parts = -(-matrix.shape[0] // _PART)
    if parts == 1:
        return np.arange(matrix.shape[0])
    options = pymetis.Options(seed=seed)
    _, part = pymetis.part_graph(parts, pymetis.CSRAdjacency(graph.indptr, graph.indices), options=options)
    return np.argsort(part, kind="stable")


def _undirected(matrix: SparseMatrix) -> Any:
    """The pattern of ``A + A^T`` as SciPy's matrix of ones."""
    from scipy.sparse import csr_array

    arrays = np.ones(matrix.nnz, np.int8), matrix.indices.cpu().numpy(), matrix.indptr.cpu().numpy()
    pattern = csr_array(arrays, shape=matrix.shape)
    both = (pattern + pattern.T).tocsr()
    both.data[:] = 1
    return both


@kernel
def _min_hashes(indptr: Any, indices: Any, factors: Any, hashes: Any) -> None:
    """The smallest hash of each row's columns, for each of several multiplicative hash functions."""
    for row in range(len(indptr) - 1):
        for place in range(indptr[row], indptr[row + 1]):
            for i in range(len(factors)):
                mixed = (np.uint64(indices[place]) + np.uint64(1)) * factors[i]
                mixed ^= mixed >> np.uint64(29)
                mixed *= np.uint64(0xBF58476D1CE4E5B9)
                mixed ^= mixed >> np.uint64(32)
                hashes[i, row] = min(hashes[i, row], mixed)


_METHODS: dict[str, Callable[[SparseMatrix, int], np.ndarray]] = {
    "rcm": _rcm,
    "degree": _degree,
    "lsh": _lsh,
    "metis": _metis,
}
