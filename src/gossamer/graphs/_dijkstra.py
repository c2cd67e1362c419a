"""Dijkstra from many sources with a binary heap: for few sources, and for graphs that have no small separators."""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import kernel


@kernel
def dijkstra_rows(indptr: Any, indices: Any, weights: Any, sources: Any, nothing: Any, results: Any) -> None:
    """Fill ``results`` ``(len(sources), n)``, which must hold ``nothing`` everywhere, with distances. Weights are >= 0."""
    n = len(indptr) - 1
    heap = np.empty(n + 1, np.int32)  # vertices by distance, from 1
    where = np.empty(n, np.int32)  # place in the heap, 0 where not in it
    for row in range(len(sources)):
        distance = results[row]
        where[:] = 0
        source = sources[row]
        distance[source] = 0
        heap[1], where[source], size = source, 1, 1
        while size:
            vertex = heap[1]
            last = heap[size]
            size -= 1
            place = 1
            while 2 * place <= size:  # the last one sinks from the top
                child = 2 * place
                if child < size and distance[heap[child + 1]] < distance[heap[child]]:
                    child += 1
                if distance[heap[child]] >= distance[last]:
                    break
                heap[place] = heap[child]
                where[heap[place]] = place
                place = child
            if size:
                heap[place] = last
                where[last] = place
            where[vertex] = 0
            for edge in range(indptr[vertex], indptr[vertex + 1]):
                head = indices[edge]
                length = distance[vertex] + weights[edge]
                if length >= distance[head]:
                    continue
                if distance[head] == nothing and where[head] == 0:
                    size += 1
                    where[head] = size
                distance[head] = length
                place = where[head]
                while place > 1 and distance[heap[place // 2]] > length:  # it rises
                    heap[place] = heap[place // 2]
                    where[heap[place]] = place
                    place //= 2
                heap[place] = head
                where[head] = place
