"""Supernodal Floyd-Warshall: elimination by blocks on the whole distance matrix.

Supernodes are eliminated bottom-up; for supernode k with descendants D(k) and later neighbours A(k), and R their union:
close the diagonal block, multiply it into the panels ``(k, R)`` and ``(R, k)``, and add their product to ``(R, R)``
(SuperFW: Sao, Kannan, Gera, Vuduc, PPoPP 2020; on GPUs ROME). Descendants are consecutive, so most of the work is in
large blocks; rows and columns of A(k) are gathered into consecutive memory, updated there, and put back.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from gossamer.core.jit import kernel
from gossamer.graphs._closure import Products, close
from gossamer.graphs._elimination import Elimination, supernodes
from gossamer.graphs._semirings import Semiring
from gossamer.graphs._weighted import WeightedGraph


def supernodal_closure(graph: WeightedGraph, elimination: Elimination, rule: Semiring, dtype: Any) -> np.ndarray:
    """All distances, in the places of the elimination order: ``(n, n)``."""
    n = elimination.n
    closure = np.full((n, n), rule.zero(dtype), dtype)
    place = elimination.place
    closure[place[graph.sources], place[graph.indices]] = graph.weights.astype(dtype)
    np.fill_diagonal(closure, rule.one(dtype))
    products = Products(rule, dtype)
    bounds = supernodes(elimination)
    lowest = first_descendants(elimination.parent)
    for first, last in itertools.pairwise(bounds):
        later = elimination.heads[elimination.starts[last - 1] : elimination.starts[last]].astype(np.int64)
        _eliminate(closure, products, int(lowest[first:last].min()), int(first), int(last), later)
    return closure


def supernodal_pairs(elimination: Elimination) -> int:
    """Pairs that the elimination combines: over supernodes, their width times the square of their rows."""
    bounds = supernodes(elimination)
    lowest = first_descendants(elimination.parent)
    first, last = bounds[:-1], bounds[1:]
    later = np.diff(elimination.starts)[last - 1]
    rows = (last - np.minimum.reduceat(lowest, first)) + later if len(first) else np.empty(0)
    return int(((last - first) * rows.astype(np.float64) ** 2).sum())


def _eliminate(d: np.ndarray, products: Products, low: int, first: int, last: int, later: np.ndarray) -> None:
    diagonal = d[first:last, first:last]
    close(diagonal, products)
    below = slice(low, first)
    gathered = _Gathered(d, first, last, low, later)
    # The panels: the closed diagonal times the rows, and the columns times it.
    row_parts, column_parts = [d[first:last, below], gathered.row_panel], [d[below, first:last], gathered.column_panel]
    for part in row_parts:
        products.add(part, diagonal, part)
    for part in column_parts:
        products.add(part, part, diagonal)
    products.add(d[below, below], column_parts[0], row_parts[0])
    products.add(gathered.rows, gathered.column_panel, row_parts[0])
    products.add(gathered.columns, column_parts[0], gathered.row_panel)
    products.add(gathered.corner, gathered.column_panel, gathered.row_panel)
    gathered.put_back()


class _Gathered:
    """The parts of the matrix that belong to A(k), in consecutive memory."""

    def __init__(self, d: np.ndarray, first: int, last: int, low: int, later: np.ndarray) -> None:
        self._d, self._later = d, later
        self._run, self._below = (first, last), (low, first)
        self.row_panel = _columns_of(d, first, last, later)
        self.columns = _columns_of(d, low, first, later)
        self.column_panel = np.ascontiguousarray(d[later, first:last])
        self.rows = np.ascontiguousarray(d[later, low:first])
        self.corner = np.ascontiguousarray(d[np.ix_(later, later)])

    def put_back(self) -> None:
        """Write everything back to its place."""
        d, later = self._d, self._later
        for panel, (start, stop) in ((self.row_panel, self._run), (self.columns, self._below)):
            _put_columns(d, start, stop, later, panel)
        d[later, self._run[0] : self._run[1]] = self.column_panel
        d[later, self._below[0] : self._below[1]] = self.rows
        d[np.ix_(later, later)] = self.corner


@kernel
def _columns_of(d: Any, start: int, stop: int, columns: Any) -> Any:
    found = np.empty((stop - start, len(columns)), d.dtype)
    for row in range(start, stop):
        for place in range(len(columns)):
            found[row - start, place] = d[row, columns[place]]
    return found


@kernel
def _put_columns(d: Any, start: int, stop: int, columns: Any, values: Any) -> None:
    for row in range(start, stop):
        for place in range(len(columns)):
            d[row, columns[place]] = values[row - start, place]


@kernel
def first_descendants(parent: Any) -> Any:
    """The lowest place in the subtree of each place; subtrees are consecutive in a postorder."""
    lowest = np.arange(len(parent))
    for vertex in range(len(parent)):
        if parent[vertex] >= 0:
            lowest[parent[vertex]] = min(lowest[parent[vertex]], lowest[vertex])
    return lowest
