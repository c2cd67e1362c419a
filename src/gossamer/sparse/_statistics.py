"""What a planner and a reader want to know of a pattern: degrees, and how well its windows fill vectors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._windows import find_windows, histogram


@dataclass(frozen=True)
class Statistics:
    """Counts of one pattern.

    degree_mean, degree_largest, empty_rows: of the rows' numbers of entries.
    vectors8, vectors16: vectors of 8 and 16 rows that are not empty.
    histogram8: ``histogram8[n]`` is the number of 8-row vectors with ``n`` entries, ``n`` = 0 (always none) to 8.
    """

    rows: int
    columns: int
    nnz: int
    degree_mean: float
    degree_largest: int
    empty_rows: int
    vectors8: int
    vectors16: int
    histogram8: tuple[int, ...]

    @property
    def density(self) -> float:
        """Entries over all places."""
        return self.nnz / max(1, self.rows * self.columns)

    @property
    def nnz_per_vector8(self) -> float:
        """Mean entries of a non-empty 8-row vector; 0 where there is none."""
        return self.nnz / max(1, self.vectors8)

    @property
    def nnz_per_vector16(self) -> float:
        """Mean entries of a non-empty 16-row vector."""
        return self.nnz / max(1, self.vectors16)

    @property
    def fill8(self) -> float:
        """Share of the slots of non-empty 8-row vectors that hold an entry."""
        return self.nnz_per_vector8 / 8

    def share_in_vectors(self, least: int) -> float:
        """Share of the entries that lie in 8-row vectors with ``least`` entries or more."""
        return sum(n * count for n, count in enumerate(self.histogram8) if n >= least) / max(1, self.nnz)

    def as_json(self) -> dict[str, Any]:
        """Counts and shares as JSON scalars and lists."""
        shares = {f"share_in_vectors_of_{least}": self.share_in_vectors(least) for least in (2, 3, 4)}
        means = {"density": self.density, "nnz_per_vector8": self.nnz_per_vector8, "fill8": self.fill8}
        return {**asdict(self), "histogram8": list(self.histogram8), **means, **shares}


def statistics(matrix: SparseMatrix) -> Statistics:
    """Count once per pattern; the answer is remembered with it.

    >>> import torch
    >>> statistics(SparseMatrix.from_dense(torch.ones(16, 3))).nnz_per_vector8
    8.0
    """
    known: Statistics | None = matrix._memo.get("statistics")
    if known is None:
        known = matrix._memo["statistics"] = _count(matrix)
    return known


def _count(matrix: SparseMatrix) -> Statistics:
    degrees = np.diff(matrix.indptr.cpu().numpy())
    eight, sixteen = find_windows(matrix, 8), find_windows(matrix, 16)
    return Statistics(
        rows=matrix.shape[0],
        columns=matrix.shape[1],
        nnz=matrix.nnz,
        degree_mean=float(degrees.mean()) if len(degrees) else 0.0,
        degree_largest=int(degrees.max()) if len(degrees) else 0,
        empty_rows=int((degrees == 0).sum()),
        vectors8=len(eight.column),
        vectors16=len(sixteen.column),
        histogram8=tuple(int(count) for count in histogram(eight.count, 8)),
    )
