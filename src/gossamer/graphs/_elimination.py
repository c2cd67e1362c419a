"""Symbolic elimination: the tree, the filled pattern, and supernodes.

Eliminating a vertex joins its later neighbours pairwise. On the filled pattern every path problem of the graph can be
solved by sweeps (:mod:`gossamer.graphs._lu`). The elimination tree follows Liu (1986).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.core.jit import kernel


@dataclass(frozen=True, eq=False)
class Elimination:
    """The filled pattern of a graph in an elimination order that is a postorder of its tree.

    order: int64 ``(n,)``; the vertex that is eliminated at each place. place: its inverse, int32. parent: int64 ``(n,)``
    of places, -1 for roots. starts, heads: the filled pattern; the later neighbours of each place, sorted.
    """

    order: np.ndarray
    place: np.ndarray
    parent: np.ndarray
    starts: np.ndarray
    heads: np.ndarray

    @property
    def n(self) -> int:
        """Vertices."""
        return len(self.order)

    @property
    def fill(self) -> int:
        """Entries of the filled pattern below the diagonal."""
        return len(self.heads)

    @property
    def pairs(self) -> int:
        """Pairs of later neighbours, over all vertices: the work of the factorisation."""
        counts = np.diff(self.starts)
        return int((counts * counts).sum())


def eliminate(starts: np.ndarray, neighbours: np.ndarray, order: np.ndarray) -> Elimination:
    """The symbolic elimination of an undirected graph in ``order``, put into a postorder of its tree first."""
    parent = _tree(starts, neighbours, order, _inverse(order))
    order = order[_postorder(parent)]
    place = _inverse(order)
    parent = _tree(starts, neighbours, order, place)
    counts = np.zeros(len(order) + 1, np.int64)
    nothing = np.empty(0, np.int32)
    _rows(starts, neighbours, order, place, parent, counts[1:], nothing, False)
    filled = np.cumsum(counts)
    heads = np.empty(filled[-1], np.int32)
    _rows(starts, neighbours, order, place, parent, filled[:-1].copy(), heads, True)
    return Elimination(order, place.astype(np.int32), parent, filled, heads)


def fill(starts: np.ndarray, neighbours: np.ndarray, order: np.ndarray) -> int:
    """Entries below the diagonal after elimination in ``order``, without storing them."""
    place = _inverse(order)
    counts = np.zeros(len(order), np.int64)
    _rows(
        starts, neighbours, order, place, _tree(starts, neighbours, order, place), counts, np.empty(0, np.int32), False
    )
    return int(counts.sum())


def supernodes(elimination: Elimination, widest: int = 128) -> np.ndarray:
    """Starts of runs of places that are eliminated together, and n: int64.

    A vertex joins the run of its child before it if they have the same later neighbours (fundamental), or if the zeros
    that this stores stay few: always up to 16 wide, up to 40 % zeros for 32, up to 10 % for ``widest``.
    """
    counts = np.diff(elimination.starts)
    return _relaxed(elimination.parent, counts, widest)


def _inverse(order: np.ndarray) -> np.ndarray:
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


@kernel
def _tree(starts: Any, neighbours: Any, order: Any, place: Any) -> Any:
    n = len(order)
    parent = np.full(n, -1, np.int64)
    ancestor = np.full(n, -1, np.int64)
    for i in range(n):
        for edge in range(starts[order[i]], starts[order[i] + 1]):
            j = place[neighbours[edge]]
            while j != -1 and j < i:
                following = ancestor[j]
                ancestor[j] = i  # the path is compressed: later walks jump here
                if following == -1:
                    parent[j] = i
                j = following
    return parent


@kernel
def _postorder(parent: Any) -> Any:
    n = len(parent)
    first_child, next_child = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    for vertex in range(n - 1, -1, -1):
        if parent[vertex] >= 0:
            next_child[vertex] = first_child[parent[vertex]]
            first_child[parent[vertex]] = vertex
    order, stack = np.empty(n, np.int64), np.empty(n, np.int64)
    count = 0
    for root in range(n):
        if parent[root] >= 0:
            continue
        stack[0], depth = root, 1
        while depth:
            vertex = stack[depth - 1]
            child = first_child[vertex]
            if child >= 0:
                first_child[vertex] = next_child[child]
                stack[depth] = child
                depth += 1
            else:
                order[count] = vertex
                count += 1
                depth -= 1
    return order


@kernel
def _rows(
    starts: Any, neighbours: Any, order: Any, place: Any, parent: Any, filled: Any, heads: Any, write: bool
) -> None:
    """Row i of the factor is the part of the tree between i's earlier neighbours and i: count it, or write it down."""
    n = len(order)
    mark = np.full(n, -1, np.int64)
    for i in range(n):
        mark[i] = i
        for edge in range(starts[order[i]], starts[order[i] + 1]):
            j = place[neighbours[edge]]
            while j < i and mark[j] != i:
                mark[j] = i
                if write:
                    heads[filled[j]] = i
                filled[j] += 1
                j = parent[j]


@kernel
def _relaxed(parent: Any, counts: Any, widest: int) -> Any:
    n = len(parent)
    starts: Any = [np.int64(0)]
    zeros = 0
    for vertex in range(1, n):
        first = starts[-1]
        width = vertex - first
        if parent[vertex - 1] != vertex:
            starts.append(vertex)
            zeros = 0
            continue
        # Every column of the run is stored down to the last one's pattern: what joining adds to it is zeros.
        added = zeros + (counts[vertex] + 1 - counts[vertex - 1]) * width
        stored = (width + 1) * (counts[vertex] + 1 + width // 2)
        limit = 1.0 if width < 16 else 0.4 if width < 32 else 0.1
        if counts[vertex] + 1 == counts[vertex - 1] or (width < widest and added <= limit * stored):
            zeros = added
        else:
            starts.append(vertex)
            zeros = 0
    if n:
        starts.append(n)
    return np.array(starts, np.int64)
