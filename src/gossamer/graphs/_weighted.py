"""Weighted directed graphs as shortest paths need them: stored entries are edges, whatever their weight.

A zero is an edge, parallel edges keep the better one instead of their sum, and a tiny weight is a weight. SciPy's
sums of duplicates and its reading of dense zeros as absent edges are therefore never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gossamer.graphs._semirings import Semiring, named_semiring


@dataclass(frozen=True, eq=False)
class WeightedGraph:
    """A directed graph in compressed rows: row u holds the edges that leave u, sorted, without repetition.

    indptr: int64 ``(n + 1,)``. indices: int32 ``(m,)``. weights: int32, float32 or float64 ``(m,)``.
    slots: for every entry that was given, the edge that it became, or -1 for a loop; int64.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    slots: np.ndarray

    @property
    def n(self) -> int:
        """Vertices."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """Edges, loops and repetitions not counted."""
        return len(self.indices)

    @property
    def sources(self) -> np.ndarray:
        """The tail of every edge, int32."""
        return np.repeat(np.arange(self.n, dtype=np.int32), np.diff(self.indptr))

    @classmethod
    def from_edges(
        cls, tails: Sequence[int] | np.ndarray, heads: Sequence[int] | np.ndarray, weights: Sequence[float] | np.ndarray,
        n: int | None = None, semiring: str = "min_plus",
    ) -> WeightedGraph:  # fmt: skip
        """A graph from lists of edges; of parallel edges the best remains, loops are dropped.

        n: vertices; the largest number + 1 if left out. semiring: says which of parallel edges is best.

        Raises:
            ValueError: lists differ in length, a vertex is negative or not below ``n``, or a weight is NaN or infinite
                towards the semiring's good side.
            TypeError: vertices are no integers, or weights no numbers.

        >>> graph = WeightedGraph.from_edges([0, 0, 1], [1, 1, 0], [5, 3, 0])
        >>> graph.indices.tolist(), graph.weights.tolist()
        ([1, 0], [3, 0])
        """
        rule = named_semiring(semiring)
        ends = [_vertices(name, numbers) for name, numbers in (("tails", tails), ("heads", heads))]
        values = _numbers(weights)
        if not len(ends[0]) == len(ends[1]) == len(values):
            raise ValueError(
                f"tails, heads and weights must be of one length, got {len(ends[0])}, {len(ends[1])}, {len(values)}"
            )
        size = max((int(end.max()) + 1 for end in ends if len(end)), default=0) if n is None else n
        if size > 2**31 - 2:
            raise ValueError(f"n must be below 2**31 - 1, got {size}")
        for name, end in zip(("tails", "heads"), ends, strict=True):
            if len(end) and (end.min() < 0 or end.max() >= size):
                raise ValueError(f"{name} must be from 0 to {size - 1}, got {int(end.min())} to {int(end.max())}")
        kept = ends[0] != ends[1]
        keys = ends[0][kept] * size + ends[1][kept]
        found, places = np.unique(keys, return_inverse=True)
        slots = np.full(len(values), -1, np.int64)
        slots[kept] = places
        indptr = np.searchsorted(found, np.arange(size + 1) * max(size, 1)).astype(np.int64)
        empty = cls(indptr, (found % max(size, 1)).astype(np.int32), np.empty(len(found), values.dtype), slots)
        return empty.with_weights(values, rule)

    def with_weights(self, weights: np.ndarray, rule: Semiring) -> WeightedGraph:
        """The same edges with other weights, one for every entry that was given first."""
        values = _numbers(weights)
        if len(values) != len(self.slots):
            raise ValueError(f"weights must be {len(self.slots)}, one for each entry given at first, got {len(values)}")
        _check_weights(values, rule)
        kept = self.slots >= 0
        if rule.name == "min_plus" and (values[~kept] < 0).any():
            raise NegativeCycleError("a loop has a negative weight: distances have no lower bound")
        best = np.full(self.edges, rule.zero(values.dtype), values.dtype)
        rule.reduce.at(best, self.slots[kept], values[kept])
        return replace(self, weights=best)


class NegativeCycleError(ValueError):
    """A cycle of negative length can be reached, so that distances have no lower bound."""


def as_graph(matrix: Any, semiring: str = "min_plus") -> WeightedGraph:
    """A graph from whatever holds one: SciPy sparse, :class:`~gossamer.sparse.SparseMatrix`, a dense array, a graph.

    Of sparse input every stored entry is an edge. Of a dense array every finite entry off the diagonal is: absent edges
    are infinite there (negative infinity for max_min).

    Raises:
        TypeError: ``matrix`` is nothing of these.
        ValueError: it is not square or has a NaN.
    """
    if isinstance(matrix, WeightedGraph):
        return matrix
    if isinstance(matrix, np.ndarray):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"A must be square, got shape {matrix.shape}")
        if np.isnan(matrix).any():
            raise ValueError("A holds NaN; an absent edge is an infinite entry")
        tails, heads = np.nonzero(np.isfinite(matrix))
        return WeightedGraph.from_edges(tails, heads, matrix[tails, heads], len(matrix), semiring)
    shape = getattr(matrix, "shape", None)
    if shape is None or len(shape) != 2:
        raise TypeError(f"A must be a sparse or dense matrix or a WeightedGraph, got {type(matrix).__name__}")
    if shape[0] != shape[1]:
        raise ValueError(f"A must be square, got shape {tuple(shape)}")
    if hasattr(matrix, "tocoo"):
        coo = matrix.tocoo()
        return WeightedGraph.from_edges(coo.row, coo.col, coo.data, shape[0], semiring)
    if hasattr(matrix, "indptr") and hasattr(matrix, "values"):
        rows, columns, values = (np.asarray(array) for array in (matrix.rows, matrix.indices, matrix.values.float()))
        return WeightedGraph.from_edges(rows, columns, values, shape[0], semiring)
    raise TypeError(f"A must be a sparse or dense matrix or a WeightedGraph, got {type(matrix).__name__}")


def _vertices(name: str, numbers: Any) -> np.ndarray:
    array = np.asarray(numbers)
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def _numbers(weights: Any) -> np.ndarray:
    """Weights as int32 (or float64 where they do not fit), float32 or float64."""
    array = np.asarray(weights)
    if array.dtype == np.bool_:
        return array.astype(np.int32)
    if np.issubdtype(array.dtype, np.integer):
        fits = not len(array) or (abs(array.astype(np.int64)).max() < 2**30 - 1)
        return array.astype(np.int32 if fits else np.float64)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(f"weights must be numbers, got {array.dtype}")
    return array.astype(np.float32 if array.dtype.itemsize < 8 else np.float64)


def _check_weights(values: np.ndarray, rule: Semiring) -> None:
    if not np.issubdtype(values.dtype, np.floating):
        return
    if np.isnan(values).any():
        raise ValueError(f"weights hold NaN, first at entry {int(np.isnan(values).argmax())}")
    forbidden = -rule.zero(values.dtype)
    if (values == forbidden).any():
        raise ValueError(f"weights hold {forbidden}, first at entry {int((values == forbidden).argmax())}")
