"""Semiring LU: a factorisation on the filled pattern, then two sweeps for each block of sources.

Eliminating vertex k gives each pair of its later neighbours the path through k. What remains on the pattern are an
upward and a downward part with ``A* = U* L*``; a row of the closure is an upward sweep (only along the source's path
to the root) and a downward sweep over all vertices. This is customisable contraction hierarchies with PHAST sweeps
(Dibbelt et al., JEA 2016; Delling et al., JPDC 2013) in the terms of sparse factorisation: 2 nnz(L) pairs a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.codegen import sweeps
from gossamer.core.jit import aligned_bytes, kernel
from gossamer.graphs._elimination import Elimination
from gossamer.graphs._semirings import ELEMENTS, Semiring
from gossamer.graphs._weighted import NegativeCycleError, WeightedGraph


@dataclass(frozen=True, eq=False)
class Factors:
    """Weights on the filled pattern after elimination: ``up[e]`` from a vertex to the later one, ``down[e]`` back."""

    elimination: Elimination
    rule: Semiring
    up: np.ndarray
    down: np.ndarray


def factorise(graph: WeightedGraph, elimination: Elimination, rule: Semiring, dtype: Any) -> Factors:
    """Eliminate all vertices, in numbers of ``dtype``.

    Raises:
        NegativeCycleError: the graph has a cycle of negative length.
    """
    up, down = (np.full(elimination.fill, rule.zero(dtype), dtype) for _ in range(2))
    widest = rule.kernel == "max_min"
    weights = graph.weights.astype(dtype)
    _scatter_edges(
        graph.indptr, graph.indices, weights, elimination.place, elimination.starts, elimination.heads, up, down
    )
    bad = _eliminate(elimination.starts, elimination.heads, up, down, widest, rule.zero(dtype))
    if bad >= 0:
        raise NegativeCycleError(f"a cycle of negative length goes through vertex {elimination.order[bad]}")
    return Factors(elimination, rule, up, down)


class RowSolver:
    """Rows of the closure, a block of sources at a time. One solver a thread: it owns the block's memory."""

    def __init__(self, factors: Factors) -> None:
        self._factors = factors
        self._dtype = factors.up.dtype
        self._sweeps = sweeps(factors.rule.kernel, ELEMENTS[self._dtype])
        n = factors.elimination.n
        self.width = self._sweeps.width
        self._x = aligned_bytes(n * self.width * self._dtype.itemsize).view(self._dtype).reshape(n, self.width)
        self._spare = np.empty(n, self._dtype)  # where the rows of a block that is not full go

    def rows(self, sources: np.ndarray, results: Sequence[np.ndarray]) -> None:
        """Write the distances from each source to all vertices into its array of results. At most ``width`` sources."""
        elimination = self._factors.elimination
        n, x = elimination.n, self._x
        places = elimination.place[sources].astype(np.int64)
        x.fill(self._factors.rule.zero(self._dtype))
        x[places, np.arange(len(places))] = self._factors.rule.one(self._dtype)
        climb = _ancestors(elimination.parent, places)
        starts, heads = elimination.starts.ctypes.data, elimination.heads.ctypes.data
        self._sweeps.up(x.ctypes.data, climb.ctypes.data, len(climb), starts, heads, self._factors.up.ctypes.data)
        self._sweeps.down(x.ctypes.data, n, starts, heads, self._factors.down.ctypes.data)
        rows = np.full(self.width, self._spare.ctypes.data, np.int64)
        rows[: len(results)] = [result.ctypes.data for result in results]
        self._sweeps.scatter(x.ctypes.data, elimination.place.ctypes.data, n, rows.ctypes.data)


@kernel
def _scatter_edges(
    indptr: Any, indices: Any, weights: Any, place: Any, starts: Any, heads: Any, up: Any, down: Any
) -> None:
    """Put every edge of the graph where it belongs on the filled pattern."""
    for tail in range(len(indptr) - 1):
        for edge in range(indptr[tail], indptr[tail + 1]):
            low, high = np.int64(place[tail]), np.int64(place[indices[edge]])
            upwards = low < high
            if not upwards:
                low, high = high, low
            first, last = starts[low], starts[low + 1]
            while first + 1 < last:
                middle = (first + last) // 2
                if heads[middle] <= high:
                    first = middle
                else:
                    last = middle
            if upwards:
                up[first] = weights[edge]
            else:
                down[first] = weights[edge]


@kernel
def _eliminate(starts: Any, heads: Any, up: Any, down: Any, widest: bool, nothing: Any) -> int:
    """All pairs of later neighbours of every vertex, in order; -1, or a vertex on a negative cycle."""
    for k in range(len(starts) - 1):
        first, last = starts[k], starts[k + 1]
        for e in range(first, last):
            to_k, from_k = down[e], up[e]
            if to_k == nothing and from_k == nothing:
                continue
            if not widest and to_k != nothing and from_k != nothing and to_k + from_k < 0:
                return k
            place = starts[heads[e]]
            for f in range(e + 1, last):
                other = heads[f]
                while heads[place] != other:
                    place += 1
                if widest:
                    up[place] = max(up[place], min(to_k, up[f]))
                    down[place] = max(down[place], min(down[f], from_k))
                else:
                    if to_k != nothing and up[f] != nothing:
                        up[place] = min(up[place], to_k + up[f])
                    if from_k != nothing and down[f] != nothing:
                        down[place] = min(down[place], down[f] + from_k)
    return -1


@kernel
def _ancestors(parent: Any, places: Any) -> Any:
    """All vertices on the paths from ``places`` to their roots, ascending, each once."""
    seen = np.zeros(len(parent), np.bool_)
    count = 0
    for place in places:
        vertex = place
        while vertex >= 0 and not seen[vertex]:
            seen[vertex] = True
            count += 1
            vertex = parent[vertex]
    found = np.empty(count, np.int64)
    count = 0
    for vertex in range(len(parent)):
        if seen[vertex]:
            found[count] = vertex
            count += 1
    return found
