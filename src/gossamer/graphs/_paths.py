"""Predecessors from distances: one breadth-first search over tight edges per source.

An edge is tight where it closes the gap between the distances of its ends. Searching breadth-first from the source gives
every vertex the tight predecessor of fewest edges, so that cycles of weight zero cannot trap a path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import kernel
from gossamer.graphs._weighted import WeightedGraph

_TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-12, np.dtype(np.int32): 0.0}


def predecessors(graph: WeightedGraph, sources: np.ndarray, distances: np.ndarray, nothing: Any) -> np.ndarray:
    """The vertex before each vertex on a shortest path from each source: int32 ``(sources, n)``, -1 where there is none."""
    found = np.full(distances.shape, -1, np.int32)
    tolerance = _TOLERANCE[distances.dtype]
    weights = graph.weights.astype(distances.dtype)
    _search(graph.indptr, graph.indices, weights, sources, distances, nothing, tolerance, found)
    return found


def path(predecessors: np.ndarray, source: int, target: int) -> list[int]:
    """The vertices from ``source`` to ``target`` by one row of predecessors; empty where there is no path.

    >>> path(np.array([-1, 0, 1], np.int32), 0, 2)
    [0, 1, 2]
    """
    vertices = [target]
    while vertices[-1] != source:
        before = int(predecessors[vertices[-1]])
        if before < 0:
            return []
        vertices.append(before)
    return vertices[::-1]


@kernel
def _search(
    indptr: Any, indices: Any, weights: Any, sources: Any, distances: Any, nothing: Any, tolerance: float, found: Any
) -> None:
    n = distances.shape[1]
    queue = np.empty(n, np.int32)
    for row in range(len(sources)):
        distance, before, source = distances[row], found[row], sources[row]
        queue[0], reached, head = source, 1, 0
        while head < reached:
            vertex = queue[head]
            head += 1
            for edge in range(indptr[vertex], indptr[vertex + 1]):
                other = indices[edge]
                if before[other] >= 0 or other == source or distance[other] == nothing:
                    continue
                length = distance[vertex] + weights[edge]
                if length <= distance[other] + tolerance * abs(distance[other]):
                    before[other] = vertex
                    queue[reached] = other
                    reached += 1
