"""All shortest paths of a graph: plan once, change weights, solve for all or some sources."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gossamer.graphs._apsp_costs import Costs, expected
from gossamer.graphs._closure import Products, close
from gossamer.graphs._dijkstra import dijkstra_rows
from gossamer.graphs._elimination import Elimination, eliminate
from gossamer.graphs._lu import Factors, RowSolver, factorise
from gossamer.graphs._ordering import dissect, undirected
from gossamer.graphs._paths import predecessors
from gossamer.graphs._semirings import INT_INFINITY, Semiring, named_semiring
from gossamer.graphs._supernodal import supernodal_closure
from gossamer.graphs._weighted import NegativeCycleError, WeightedGraph, as_graph

Method = Literal["auto", "lu", "supernodal", "dense", "dijkstra"]
METHODS = ("auto", "lu", "supernodal", "dense", "dijkstra")
_DTYPES = (np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float64))
_BATCH = 64


class ApspPlan:
    """A graph in its elimination order. Made by :func:`apsp_plan`.

    graph: the edges. elimination: order, tree and filled pattern. dtype: of the distances.
    """

    def __init__(
        self, graph: WeightedGraph, rule: Semiring, method: str, dtype: np.dtype, elimination: Elimination
    ) -> None:
        self.graph = graph
        self.elimination = elimination
        self.dtype = dtype
        self.rule, self._method = rule, method
        self._factors: Factors | None = None

    @property
    def semiring(self) -> str:
        """Its name."""
        return self.rule.name

    @property
    def n(self) -> int:
        """Vertices."""
        return self.graph.n

    def update(self, weights: Sequence[float] | np.ndarray) -> ApspPlan:
        """The same graph and order with other weights, one for each entry of the matrix that the plan was made from.

        Entries count in the order in which they were stored there. Returns a new plan.

        Raises:
            ValueError: the number of weights differs, or one is NaN.

        >>> plan = apsp_plan(WeightedGraph.from_edges([0, 1], [1, 2], [1, 1]))
        >>> plan.update([2, 3]).solve([0])
        array([[0, 2, 5]], dtype=int32)
        """
        graph = self.graph.with_weights(np.asarray(weights), self.rule)
        return ApspPlan(graph, self.rule, self._method, _working_type(graph, self.rule, None), self.elimination)

    def costs(self, sources: int | None = None) -> Costs:
        """Expected seconds of each engine for a number of sources, all of them if left out."""
        whole = self.n * self.n * self.dtype.itemsize < _free_memory()
        return expected(self.graph, self.elimination, sources or self.n, self.dtype, self._allows_dijkstra(), whole)

    def explain(self) -> str:
        """The engine that is taken, and what each is expected to take.

        >>> print(apsp_plan(WeightedGraph.from_edges([0], [1], [1])).explain().splitlines()[0])
        2 vertices, 1 edges; 1 entries after elimination
        """
        lines = [f"{self.n} vertices, {self.graph.edges} edges; {self.elimination.fill} entries after elimination"]
        taken = self._engine(self.n)
        for name, seconds in self.costs().seconds.items():
            lines.append(f"  {name}: {seconds:.3g} s expected{' (taken)' if name == taken else ''}")
        return "\n".join(lines)

    def solve(
        self, sources: Sequence[int] | np.ndarray | None = None, *, out: np.ndarray | str | os.PathLike[str] | None = None,
        return_predecessors: bool = False, threads: int = 1,
    ) -> Any:  # fmt: skip
        """Distances from ``sources`` (all vertices if left out) to all vertices, ``(sources, n)`` in the plan's dtype.

        Row i belongs to ``sources[i]``. Unreachable is infinite, 2**30 - 1 in int32. out: an array to write into, or the
        path of a ``.npy`` file, which is written row by row and may be larger than memory; the array (mapped) is returned.
        return_predecessors: also the vertex before each on a shortest path, int32, -1 where there is none.

        Raises:
            ValueError: a source is no vertex, or the result does not fit into memory and ``out`` is not given.
            NegativeCycleError: the graph has a cycle of negative length.
        """
        chosen = np.arange(self.n) if sources is None else _checked_sources(sources, self.n)
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if return_predecessors and self.rule.name != "min_plus":
            raise ValueError(f"predecessors are of shortest paths; the semiring is {self.rule.name}")
        distances = self._room(out, len(chosen))
        engine = self._engine(len(chosen))
        if engine in ("dense", "supernodal"):
            self._copy_closure(engine, chosen, distances)
        else:
            self._by_rows(engine, chosen, distances, threads)
        result = distances if self.rule.name != "or_and" or out is not None else distances > 0
        if not return_predecessors:
            return result
        nothing = self.rule.zero(self.dtype)
        return result, predecessors(self.graph, chosen, np.asarray(distances), nothing)

    def blocks(self, rows: int = 1024, threads: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All distances in blocks of rows, for results larger than memory: pairs of sources and ``(rows, n)``.

        Sources come in the elimination order, in which neighbours share their upward sweeps.
        """
        for start in range(0, self.n, rows):
            chosen = self.elimination.order[start : start + rows]
            yield chosen, self.solve(chosen, threads=threads)

    def _engine(self, sources: int) -> str:
        return self.costs(sources).fastest if self._method == "auto" else self._method

    def _allows_dijkstra(self) -> bool:
        return self.rule.name == "min_plus" and not (self.graph.weights < 0).any()

    def _room(self, out: Any, rows: int) -> np.ndarray:
        shape, needed = (rows, self.n), rows * self.n * self.dtype.itemsize
        if isinstance(out, str | os.PathLike):
            return np.lib.format.open_memmap(Path(out), mode="w+", dtype=self.dtype, shape=shape)
        if out is not None:
            if not isinstance(out, np.ndarray) or out.dtype != self.dtype:
                raise TypeError(
                    f"out must be an array of {self.dtype} or a path, got {getattr(out, 'dtype', type(out).__name__)}"
                )
            if out.shape != shape or (out.size and out.strides[1] != out.itemsize):
                raise ValueError(f"out must have shape {shape} and consecutive entries in its rows, got {out.shape}")
            return out
        if needed > _free_memory():
            raise ValueError(
                f"the distances take {needed:,} bytes, {_free_memory():,} are free: give sources=, a path as out=, or take "
                "blocks()"
            )
        return np.empty(shape, self.dtype)

    def _copy_closure(self, engine: str, chosen: np.ndarray, distances: np.ndarray) -> None:
        place = self.elimination.place
        if engine == "supernodal":
            closure = supernodal_closure(self.graph, self.elimination, self.rule, self.dtype)
            order = place
        else:
            closure = np.full((self.n, self.n), self.rule.zero(self.dtype), self.dtype)
            closure[self.graph.sources, self.graph.indices] = self.graph.weights.astype(self.dtype)
            np.fill_diagonal(closure, self.rule.one(self.dtype))
            close(closure, Products(self.rule, self.dtype))
            order = np.arange(self.n)
        if self.rule.name == "min_plus" and (closure.diagonal() < 0).any():
            raise NegativeCycleError(
                f"a cycle of negative length goes through vertex {self._vertex_below(closure, order)}"
            )
        for start in range(0, len(chosen), _BATCH):
            rows = order[chosen[start : start + _BATCH]]
            np.take(closure[rows], order, axis=1, out=distances[start : start + _BATCH], mode="clip")

    def _vertex_below(self, closure: np.ndarray, order: np.ndarray) -> int:
        return int((closure.diagonal()[order] < 0).argmax())

    def _by_rows(self, engine: str, chosen: np.ndarray, distances: np.ndarray, threads: int) -> None:
        if engine == "dijkstra":
            if not self._allows_dijkstra():
                raise ValueError("method dijkstra needs semiring min_plus and weights that are not negative")
            distances.fill(self.rule.zero(self.dtype))
            weights = self.graph.weights.astype(self.dtype)
            arrays = self.graph.indptr, self.graph.indices, weights
            nothing = self.rule.zero(self.dtype)
            bounds = np.linspace(0, len(chosen), threads + 1).astype(int)
            work: list[Callable[[], None]] = [
                partial(dijkstra_rows, *arrays, chosen[a:b], nothing, distances[a:b])
                for a, b in itertools.pairwise(bounds)
            ]
        else:
            if self._factors is None:
                self._factors = factorise(self.graph, self.elimination, self.rule, self.dtype)
            factors = self._factors
            # Sources that are close in the order share the upward sweep of their block.
            order = np.argsort(self.elimination.place[chosen], kind="stable")
            work = [partial(_solve_part, factors, chosen, distances, part) for part in np.array_split(order, threads)]
        if threads == 1:
            work[0]()
            return
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(job) for job in work]:
                done.result()


def apsp_plan(
    A: Any, *, semiring: str = "min_plus", method: Method = "auto", dtype: Any = None, nonneg: bool = False,
    ordering: str = "auto", seed: int = 0,
) -> ApspPlan:  # fmt: skip
    """Prepare the path problem of a square sparse matrix: order, elimination tree, filled pattern.

    A: SciPy sparse, a :class:`~gossamer.sparse.SparseMatrix`, a dense array with infinities where there is no edge, or a
    :class:`WeightedGraph`. Stored entries are edges, zeros included; parallel edges keep the better one. semiring:
    "min_plus" (shortest), "max_min" (widest), "or_and" (reachable). dtype: int32, float32 or float64; by default integers
    are solved exactly in int32 where no path can leave it, else in float64, and floats in their own type. nonneg: refuse
    negative weights. ordering: "metis" (pymetis), "bisection", or "auto".

    Raises:
        ValueError: A is not square, holds NaN, or a name is unknown.
        TypeError: A is no matrix, or ``dtype`` none of the three.
    """
    rule = named_semiring(semiring)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    graph = as_graph(A, semiring)
    if semiring == "or_and":
        graph = graph.with_weights(np.ones(len(graph.slots), np.int32), rule)
    if nonneg and (graph.weights < 0).any():
        edge = int((graph.weights < 0).argmax())
        raise ValueError(
            f"nonneg: the edge from {graph.sources[edge]} to {graph.indices[edge]} weighs {graph.weights[edge]}"
        )
    starts, neighbours = undirected(graph.indptr, graph.indices)
    elimination = eliminate(starts, neighbours, dissect(starts, neighbours, ordering, seed))
    return ApspPlan(graph, rule, method, _working_type(graph, rule, dtype), elimination)


def apsp(
    A: Any, *, semiring: str = "min_plus", method: Method = "auto", sources: Sequence[int] | np.ndarray | None = None,
    dtype: Any = None, return_predecessors: bool = False, device: str = "cpu", out: Any = None, threads: int = 1,
) -> Any:  # fmt: skip
    """Exact distances between all vertices of a sparse graph, or from ``sources``; see :func:`apsp_plan` and ``solve``.

    method: "lu" (factorise, then sweep), "supernodal" (block elimination on the whole matrix), "dense" (by halves),
    "dijkstra", or "auto": what a model of the work expects to be fastest. device: "cpu", or "cuda" for a torch tensor
    computed on the GPU by the dense or supernodal engine.

    >>> import scipy.sparse
    >>> apsp(scipy.sparse.csr_array([[0, 2, 0], [0, 0, 3], [0, 0, 0]]))
    array([[         0,          2,          5],
           [1073741823,          0,          3],
           [1073741823, 1073741823,          0]], dtype=int32)
    """
    plan = apsp_plan(A, semiring=semiring, method=method, dtype=dtype)
    if device != "cpu":
        from gossamer.graphs._apsp_gpu import solve_on_gpu

        return solve_on_gpu(plan, method, sources, device)
    return plan.solve(sources, out=out, return_predecessors=return_predecessors, threads=threads)


def _working_type(graph: WeightedGraph, rule: Semiring, wanted: Any) -> np.dtype:
    """The number type of the distances. Sums of int32 must not leave it, and its infinity must not be added to less."""
    if wanted is not None:
        if np.dtype(wanted) not in _DTYPES:
            raise TypeError(f"dtype must be int32, float32 or float64, got {wanted}")
        if np.dtype(wanted) == np.int32 and (graph.weights.dtype != np.int32 or (graph.weights < 0).any()):
            raise ValueError("dtype int32 needs integer weights that are not negative")
        return np.dtype(wanted)
    if graph.weights.dtype != np.int32 or rule.kernel == "max_min":
        return graph.weights.dtype
    largest = int(graph.weights.max(initial=0)) * max(graph.n - 1, 1)
    safe = largest < INT_INFINITY and not (graph.weights < 0).any()
    return np.dtype(np.int32 if safe else np.float64)


def _solve_part(factors: Factors, chosen: np.ndarray, distances: np.ndarray, part: np.ndarray) -> None:
    solver = RowSolver(factors)
    for start in range(0, len(part), solver.width):
        rows = part[start : start + solver.width]
        solver.rows(chosen[rows], [distances[row] for row in rows])


def _checked_sources(sources: Any, n: int) -> np.ndarray:
    array = np.asarray(sources)
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"sources must be a list of vertices, got shape {array.shape} of {array.dtype}")
    if len(array) and (array.min() < 0 or array.max() >= n):
        raise ValueError(f"sources must be from 0 to {n - 1}, got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def _free_memory() -> int:
    """Bytes that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    from gossamer.core.hardware import hardware

    return hardware().memory_bytes
