"""Distances against SciPy's Dijkstra, bit for bit on integers, for every engine, ordering and number type."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import bellman_ford, dijkstra

from gossamer.graphs import NegativeCycleError, WeightedGraph, apsp, apsp_plan, path, read_graph

ENGINES = ("lu", "supernodal", "dense", "dijkstra")
INFINITY = {np.dtype(np.int32): 2**30 - 1, np.dtype(np.float32): np.inf, np.dtype(np.float64): np.inf}


def random_graph(n: int, edges: int, seed: int, dtype: type = np.int32, lowest: int = 0) -> WeightedGraph:
    generator = np.random.default_rng(seed)
    ends = generator.integers(0, n, (2, edges))
    return WeightedGraph.from_edges(*ends, generator.integers(lowest, 100, edges).astype(dtype), n)


def grid(side: int, seed: int) -> WeightedGraph:
    """A square grid with different whole weights in the two directions of each edge: roads in small."""
    generator = np.random.default_rng(seed)
    number = np.arange(side * side).reshape(side, side)
    pairs = [(number[:, :-1], number[:, 1:]), (number[:-1], number[1:])]
    tails = np.concatenate([a.ravel() for a, _ in pairs] + [b.ravel() for _, b in pairs])
    heads = np.concatenate([b.ravel() for _, b in pairs] + [a.ravel() for a, _ in pairs])
    return WeightedGraph.from_edges(tails, heads, generator.integers(1, 101, len(tails)))


def oracle(graph: WeightedGraph, dtype: np.dtype, sources: np.ndarray | None = None) -> np.ndarray:
    matrix = csr_array((graph.weights.astype(np.float64), graph.indices, graph.indptr), shape=(graph.n, graph.n))
    found = dijkstra(matrix, indices=sources)
    return np.where(np.isinf(found), INFINITY[np.dtype(dtype)], found).astype(dtype)


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64])
def test_every_engine_is_bit_equal_to_dijkstra_on_whole_weights(engine: str, dtype: type) -> None:
    for graph in (random_graph(300, 700, 1), random_graph(150, 3000, 2), grid(17, 3), random_graph(5, 0, 4)):
        for ordering in ("auto", "bisection"):
            plan = apsp_plan(graph, method=engine, dtype=dtype, ordering=ordering)  # type: ignore[arg-type]
            np.testing.assert_array_equal(plan.solve(), oracle(graph, np.dtype(dtype)))


@settings(max_examples=25)
@given(n=st.integers(1, 40), edges=st.integers(0, 120), seed=st.integers(0, 2**32), engine=st.sampled_from(ENGINES))
def test_small_graphs_of_any_form_are_right(n: int, edges: int, seed: int, engine: str) -> None:
    graph = random_graph(n, edges, seed)
    found = apsp(graph, method=engine)  # type: ignore[call-overload]
    np.testing.assert_array_equal(found, oracle(graph, found.dtype))


def test_distances_do_not_depend_on_the_numbering() -> None:
    graph = grid(12, 5)
    order = np.random.default_rng(0).permutation(graph.n)
    moved = WeightedGraph.from_edges(order[graph.sources], order[graph.indices], graph.weights, graph.n)
    np.testing.assert_array_equal(apsp(moved, method="lu")[np.ix_(order, order)], apsp(graph, method="lu"))


def test_distances_obey_the_triangle_inequality() -> None:
    distances = apsp(grid(15, 6), method="lu").astype(np.int64)
    a, b, c = np.random.default_rng(1).integers(0, 225, (3, 100_000))
    assert (distances[a, c] <= distances[a, b] + distances[b, c]).all()
    assert (distances.diagonal() == 0).all()


def test_real_weights_are_right_to_rounding() -> None:
    generator = np.random.default_rng(2)
    graph = grid(14, 7)
    weights = generator.random(graph.edges)
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-12)):
        real = WeightedGraph.from_edges(graph.sources, graph.indices, weights, graph.n)
        expected = oracle(real, np.dtype(np.float64))
        for engine in ENGINES:
            found = apsp(real, method=engine, dtype=dtype)  # type: ignore[call-overload]
            np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_zero_weights_are_edges_and_tiny_ones_survive_and_parallel_ones_keep_the_least() -> None:
    matrix = coo_array(
        (np.array([0.0, 1e-9, 7.0, 5.0]), (np.array([0, 1, 2, 2]), np.array([1, 2, 0, 0]))), shape=(3, 3)
    )
    for engine in ENGINES:
        found = apsp(matrix, method=engine)  # type: ignore[call-overload]
        np.testing.assert_array_equal(found, [[0, 0, 1e-9], [5 + 1e-9, 0, 1e-9], [5, 5, 0]])


def test_negative_weights_without_a_negative_cycle_are_solved_exactly() -> None:
    graph = random_graph(60, 240, 8)
    height = np.random.default_rng(3).integers(0, 50, 60)  # a potential makes weights negative, cycles stay as they are
    weights = graph.weights + height[graph.sources] - height[graph.indices]
    moved = WeightedGraph.from_edges(graph.sources, graph.indices, weights, graph.n)
    expected = bellman_ford(csr_array((weights.astype(float), moved.indices, moved.indptr), shape=(60, 60)))
    for engine in ("lu", "supernodal", "dense", "auto"):
        found = apsp(moved, method=engine)  # type: ignore[call-overload]
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="dijkstra needs"):
        apsp(moved, method="dijkstra")


@pytest.mark.parametrize("engine", ["lu", "supernodal", "dense"])
def test_a_negative_cycle_is_an_error(engine: str) -> None:
    graph = WeightedGraph.from_edges([0, 1, 2, 3], [1, 2, 0, 0], [1, 1, -3, 1])
    with pytest.raises(NegativeCycleError, match="negative length"):
        apsp(graph, method=engine)  # type: ignore[call-overload]
    with pytest.raises(NegativeCycleError, match="loop"):
        WeightedGraph.from_edges([0], [0], [-1])


@pytest.mark.parametrize("engine", ["lu", "supernodal", "dense"])
def test_widest_paths_and_reachability(engine: str) -> None:
    graph = random_graph(60, 150, 9, lowest=1)
    width = np.full((60, 60), -(2**30 - 1), np.int64)
    np.maximum.at(width, (graph.sources, graph.indices), graph.weights)
    widest = WeightedGraph.from_edges(graph.sources, graph.indices, graph.weights, 60, semiring="max_min")
    np.fill_diagonal(width, 2**30 - 1)
    for k in range(60):
        width = np.maximum(width, np.minimum(width[:, k : k + 1], width[k]))
    np.testing.assert_array_equal(apsp(widest, semiring="max_min", method=engine), width)  # type: ignore[call-overload]
    reached = apsp(graph, semiring="or_and", method=engine)  # type: ignore[call-overload]
    np.testing.assert_array_equal(reached, width > -(2**30 - 1))


@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_predecessors_lead_back_along_shortest_paths_past_cycles_of_zeros(dtype: type) -> None:
    graph = random_graph(120, 500, 10)
    weights = np.where(np.arange(graph.edges) % 3 == 0, 0, graph.weights).astype(dtype)
    graph = WeightedGraph.from_edges(graph.sources, graph.indices, weights, graph.n)
    plan = apsp_plan(graph, method="lu")
    sources = np.array([5, 90, 17])
    distances, before = plan.solve(sources, return_predecessors=True)
    length = {(int(a), int(b)): w for a, b, w in zip(graph.sources, graph.indices, graph.weights, strict=True)}
    for row, source in enumerate(sources):
        for target in range(graph.n):
            vertices = path(before[row], int(source), target)
            if distances[row, target] == INFINITY[np.dtype(dtype)]:
                assert vertices == []
            else:
                assert sum(length[pair] for pair in itertools.pairwise(vertices)) == distances[row, target]


def test_some_sources_threads_blocks_and_files_give_the_same_rows(tmp_path: Path) -> None:
    graph = grid(16, 11)
    expected = oracle(graph, np.dtype(np.int32))
    for engine in ENGINES:
        plan = apsp_plan(graph, method=engine)  # type: ignore[arg-type]
        chosen = np.array([200, 3, 3, 77])
        np.testing.assert_array_equal(plan.solve(chosen, threads=2), expected[chosen])
    plan = apsp_plan(graph, method="lu")
    np.testing.assert_array_equal(plan.solve(out=tmp_path / "d.npy"), expected)
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), expected)
    out = np.zeros((256, 300), np.int32)[:, :256]
    assert plan.solve(out=out) is out
    np.testing.assert_array_equal(out, expected)
    seen = 0
    for sources, rows in plan.blocks(rows=100):
        np.testing.assert_array_equal(rows, expected[sources])
        seen += len(sources)
    assert seen == 256


def test_new_weights_keep_the_plan() -> None:
    generator = np.random.default_rng(4)
    ends = generator.integers(0, 50, (2, 200))  # with loops and parallel edges
    plan = apsp_plan(WeightedGraph.from_edges(*ends, generator.integers(0, 9, 200), 50), method="lu")
    weights = generator.integers(1, 100, 200)
    expected = oracle(WeightedGraph.from_edges(*ends, weights, 50), np.dtype(np.int32))
    np.testing.assert_array_equal(plan.update(weights).solve(), expected)
    with pytest.raises(ValueError, match="weights must be 200"):
        plan.update(weights[:-1])


def test_integers_that_could_leave_int32_are_solved_in_float64() -> None:
    graph = WeightedGraph.from_edges([0, 1], [1, 2], [2**30 - 3, 2**30 - 3])
    assert apsp(graph)[0, 2] == 2 * (2**30 - 3)
    assert apsp(graph, dtype=np.int32)[0, 2] == 2**30 - 1  # asked for int32: it saturates
    assert WeightedGraph.from_edges([0], [1], [2**40]).weights.dtype == np.float64


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"A": csr_array((2, 3))}, ValueError, "square"),
        ({"A": np.array([[0, np.nan], [1, 0]])}, ValueError, "NaN"),
        ({"A": csr_array((np.array([np.nan]), ([0], [1])), shape=(2, 2))}, ValueError, "NaN"),
        ({"A": csr_array((np.array([-np.inf]), ([0], [1])), shape=(2, 2))}, ValueError, "-inf"),
        ({"A": "roads"}, TypeError, "WeightedGraph"),
        ({"A": csr_array((2, 2)), "semiring": "plus_times"}, ValueError, "semiring must be"),
        ({"A": csr_array((2, 2)), "method": "magic"}, ValueError, "method must be"),
        ({"A": csr_array((2, 2)), "sources": [2]}, ValueError, "sources must be from 0 to 1"),
        ({"A": csr_array((2, 2)), "dtype": np.int64}, TypeError, "dtype must be"),
        ({"A": csr_array((2, 2)), "threads": 0}, ValueError, "threads"),
    ],
)
def test_bad_input_is_named(arguments: dict, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        apsp(**arguments)


def test_results_beyond_memory_name_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.graphs import _apsp

    monkeypatch.setattr(_apsp, "_free_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"65,536 bytes.*sources="):
        apsp(WeightedGraph.from_edges([0], [1], [1], 128), method="lu")


def test_empty_graphs_and_lonely_vertices_are_graphs() -> None:
    assert apsp(csr_array((0, 0))).shape == (0, 0)
    np.testing.assert_array_equal(apsp(csr_array((2, 2), dtype=np.float32)), [[0, np.inf], [np.inf, 0]])


ROADS = ["Anaheim", "SiouxFalls", "Winnipeg", "Barcelona", "ChicagoSketch", "Austin"]


def roads() -> Iterator[str]:
    yield from (f"roads/tntp/{name}_net.tntp" for name in ROADS)


@pytest.mark.data
@pytest.mark.parametrize("name", list(roads()))
def test_real_roads_agree_with_dijkstra(name: str, data_file) -> None:  # type: ignore[no-untyped-def]
    graph = read_graph(data_file(name), "time")
    plan = apsp_plan(graph, method="lu", dtype=np.float64)
    sources = np.random.default_rng(5).integers(0, graph.n, 64)
    np.testing.assert_allclose(plan.solve(sources), oracle(graph, np.dtype(np.float64), sources), rtol=1e-12)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["tntp/ChicagoRegional_net.tntp.gz", "tntp/berlin-center_net.tntp.gz", "metis_graphs/power.graph",
     "tntp/Sydney_net.tntp.gz",
     "metis_graphs/4elt.graph", "metis_graphs/astro-ph.graph.gz", "metis_delaunay/delaunay_n15.graph.gz"],
)  # fmt: skip
def test_large_graphs_with_whole_weights_are_bit_equal(name: str, data_file) -> None:  # type: ignore[no-untyped-def]
    graph = read_graph(data_file(f"roads/{name}"))
    weights = np.random.default_rng(6).integers(1, 101, graph.edges)
    graph = WeightedGraph.from_edges(graph.sources, graph.indices, weights, graph.n)
    sources = np.arange(graph.n) if graph.n <= 13_000 else np.random.default_rng(7).integers(0, graph.n, 64)
    expected = oracle(graph, np.dtype(np.int32), sources)
    np.testing.assert_array_equal(apsp_plan(graph, method="lu").solve(sources), expected)
    if graph.n <= 13_000:
        np.testing.assert_array_equal(apsp_plan(graph, method="supernodal").solve(sources), expected)
