"""What each engine is expected to take, from counts of the graph: the planner's only knowledge."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from gossamer.core.hardware import cpu_features
from gossamer.graphs._elimination import Elimination
from gossamer.graphs._supernodal import supernodal_pairs
from gossamer.graphs._weighted import WeightedGraph

# Seconds per unit of work on one core, measured on a Zen 3 at about 3 GHz.
_SWEEP_PAIR = 4.5e-11
_FACTOR_PAIR = 4.8e-9
_PRODUCT_PAIR = 5.0e-11
_SUPERNODE_PAIR = 1.0e-10
_SUPERNODE = 1.0e-4
_WRITTEN_BYTE = 5.0e-10
_HEAP_STEP = 8.0e-9
_HEAP_EDGE = 1.0e-8


@dataclass(frozen=True)
class Costs:
    """Expected seconds of each engine that can solve the problem, fastest first."""

    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The engine to take."""
        return next(iter(self.seconds))


def expected(
    graph: WeightedGraph, elimination: Elimination, sources: int, dtype: np.dtype, dijkstra: bool, whole: bool
) -> Costs:
    """dijkstra: whether it may run (no negative weight, min_plus). whole: whether all distances fit into memory at once."""
    n, size = graph.n, np.dtype(dtype).itemsize
    # The vectors hold half as many numbers of eight bytes; AVX-512 holds twice as many.
    width = (size / 4) * (0.6 if "avx512f" in cpu_features() else 1.0)
    write = sources * n * size * _WRITTEN_BYTE
    factor = elimination.pairs / 2 * _FACTOR_PAIR
    found = {"lu": factor + sources * (2 * elimination.fill + 2 * n) * _SWEEP_PAIR * width + write}
    if dijkstra:
        found["dijkstra"] = sources * (n * log2(n + 2) * _HEAP_STEP + graph.edges * _HEAP_EDGE) + write
    if whole:
        found["dense"] = n**3 * _PRODUCT_PAIR * width + 2 * n * n * size * _WRITTEN_BYTE
        # The supernodal engine pays per supernode and walks the whole matrix: it is chosen where its blocks are large.
        work = supernodal_pairs(elimination) * _SUPERNODE_PAIR * width
        found["supernodal"] = work + n / 8 * _SUPERNODE + 2 * n * n * size * _WRITTEN_BYTE
    return Costs(dict(sorted(found.items(), key=lambda item: item[1])))
