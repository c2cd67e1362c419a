"""Nested dissection: an order of elimination in which small separators come last.

METIS does it where pymetis is installed. Otherwise a plain recursion does: the levels of a breadth-first search from a
far vertex are cut at the smallest level near the middle. Its fill is larger, the distances are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import kernel

_LEAF = 32


def undirected(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pattern of ``A + A^T`` without a diagonal: int64 row starts and sorted int32 neighbours."""
    n = len(indptr) - 1
    tails = np.repeat(np.arange(n, dtype=np.int64), np.diff(indptr))
    keys = np.unique(np.concatenate([tails * n + indices, indices.astype(np.int64) * n + tails]))
    starts = np.searchsorted(keys, np.arange(n + 1, dtype=np.int64) * max(n, 1))
    return starts.astype(np.int64), (keys % max(n, 1)).astype(np.int32)


def dissect(starts: np.ndarray, neighbours: np.ndarray, method: str = "auto", seed: int = 0) -> np.ndarray:
    """The vertices of an undirected graph in order of elimination, int64 ``(n,)``.

    method: "metis" (needs pymetis), "bisection" (ours), or "auto": METIS where it is installed.

    Raises:
        ValueError: ``method`` is none of these.
        ModuleNotFoundError: METIS is asked for and pymetis is not installed.
    """
    if method not in ("auto", "metis", "bisection"):
        raise ValueError(f"ordering must be one of auto, metis, bisection, got {method!r}")
    n = len(starts) - 1
    if method != "bisection" and n > 1 and len(neighbours):
        try:
            return _metis(starts, neighbours, seed)
        except ModuleNotFoundError:
            if method == "metis":
                raise
    order = np.empty(n, np.int64)
    _bisect(starts, neighbours, order)
    return order


def _metis(starts: np.ndarray, neighbours: np.ndarray, seed: int) -> np.ndarray:
    import pymetis

    from gossamer.graphs._elimination import fill

    graph = pymetis.CSRAdjacency(starts.astype(np.int32), neighbours)
    first, second = (
        np.asarray(order, np.int64) for order in pymetis.nested_dissection(graph, options=pymetis.Options(seed=seed))
    )
    # Which of the two is the order and which its inverse differs between versions; the fill tells.
    return first if fill(starts, neighbours, first) <= fill(starts, neighbours, second) else second


@kernel
def _bisect(starts: Any, neighbours: Any, order: Any) -> None:
    """Fill ``order`` from its end: separators first, then the two sides, each from a stack of vertex sets."""
    n = len(starts) - 1
    vertices = np.arange(n)
    level = np.full(n, -1, np.int64)
    region = np.zeros(n, np.int64)  # which set a vertex belongs to now
    queue = np.empty(n, np.int64)
    stack = [(np.int64(0), np.int64(n))]
    regions = 0
    while len(stack):
        low, high = stack.pop()
        size = high - low
        if size <= _LEAF:
            for place in range(low, high):
                order[place] = vertices[place]
            continue
        regions += 1
        for place in range(low, high):
            region[vertices[place]] = regions
            level[vertices[place]] = -1
        root = vertices[low]
        reached = 0
        for _ in range(2):  # the second search starts from the farthest vertex of the first
            for place in range(reached):
                level[queue[place]] = -1
            queue[0], reached, level[root] = root, 1, 0
            head = 0
            while head < reached:
                vertex = queue[head]
                head += 1
                for edge in range(starts[vertex], starts[vertex + 1]):
                    other = neighbours[edge]
                    if region[other] == regions and level[other] < 0:
                        level[other] = level[vertex] + 1
                        queue[reached] = other
                        reached += 1
            root = queue[reached - 1]
        if reached < size:  # not connected: what was reached on one side, the rest on the other, nothing between
            _cut, first, last = np.int64(-1), reached, reached
        else:
            _cut, first, last = _smallest_level(level, queue, reached)
        _split(vertices, level, queue, reached, low, high, first, last, region, regions)
        separator = last - first
        for place in range(high - separator, high):
            order[place] = vertices[place]
        stack.append((low, low + first))
        stack.append((low + first, high - separator))


@kernel
def _smallest_level(level: Any, queue: Any, reached: int) -> tuple[int, int, int]:
    """The smallest level whose end lies in the middle third of the search order: its number, start and end there."""
    best: Any = np.int64(-1)
    best_first: Any = np.int64(-1)
    best_last: Any = np.int64(-1)
    first = 0
    while first < reached:
        last = first
        while last < reached and level[queue[last]] == level[queue[first]]:
            last += 1
        middle = 3 * first >= reached and 3 * last <= 2 * reached
        if middle and (best < 0 or last - first < best_last - best_first):
            best, best_first, best_last = level[queue[first]], first, last
        first = last
    if best < 0:  # no whole level there: the one that holds the middle
        middle_level = level[queue[reached // 2]]
        best_first = best_last = reached // 2
        while best_first > 0 and level[queue[best_first - 1]] == middle_level:
            best_first -= 1
        while best_last < reached and level[queue[best_last]] == middle_level:
            best_last += 1
        best = middle_level
    return best, best_first, best_last


@kernel
def _split(
    vertices: Any,
    level: Any,
    queue: Any,
    reached: int,
    low: int,
    high: int,
    first: int,
    last: int,
    region: Any,
    mark: int,
) -> None:
    """Write one side, the other side and the separator, in this order, into ``vertices[low:high]``."""
    place = high - 1
    rest = np.empty(high - low - reached, np.int64)
    count = 0
    for index in range(low, high):
        if level[vertices[index]] < 0:
            rest[count] = vertices[index]
            count += 1
    for index in range(first, last):
        vertices[place] = queue[index]
        place -= 1
    for index in range(first):
        vertices[low + index] = queue[index]
    place = low + first
    for index in range(last, reached):
        vertices[place] = queue[index]
        place += 1
    for index in range(count):
        vertices[place] = rest[index]
        place += 1
