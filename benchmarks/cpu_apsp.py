"""All-pairs shortest paths on CPUs against SciPy: real roads, meshes, and a graph without small separators; one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra, floyd_warshall

from gossamer.codegen import min_plus_chains
from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, geometric_mean, worst
from gossamer.graphs import WeightedGraph, apsp_plan, read_graph
from gossamer.graphs._closure import Products
from gossamer.graphs._semirings import named_semiring

SOURCES = ("graphs/_*.py", "codegen/*.py")
SAMPLED = 256


def grid(side: int, seed: int) -> WeightedGraph:
    """The twin of a road network: a grid of streets of which a tenth is missing."""
    generator = np.random.default_rng(seed)
    number = np.arange(side * side).reshape(side, side)
    pairs = [(number[:, :-1].ravel(), number[:, 1:].ravel()), (number[:-1].ravel(), number[1:].ravel())]
    tails, heads = (np.concatenate([pair[end] for pair in pairs]) for end in (0, 1))
    kept = generator.random(len(tails)) < 0.9
    tails, heads = np.concatenate([tails[kept], heads[kept]]), np.concatenate([heads[kept], tails[kept]])
    return WeightedGraph.from_edges(tails, heads, generator.integers(1, 101, len(tails)), side * side)


def web(n: int, degree: int, seed: int) -> WeightedGraph:
    """The twin of an adverse graph: random edges, whose separators are large."""
    generator = np.random.default_rng(seed)
    ends = generator.integers(0, n, (2, n * degree))
    tails, heads = np.concatenate([ends, ends[::-1]], axis=1)
    return WeightedGraph.from_edges(tails, heads, generator.integers(1, 101, 2 * n * degree), n)


# Where the data folder is absent, a generated twin of the same size and kind takes the graph's place.
GRAPHS: Mapping[str, tuple[str, Callable[[], WeightedGraph]]] = {
    "ChicagoRegional": ("tntp/ChicagoRegional_net.tntp.gz", lambda: grid(114, 1)),
    "Sydney": ("tntp/Sydney_net.tntp.gz", lambda: grid(181, 2)),
    "Austin": ("tntp/Austin_net.tntp", lambda: grid(86, 3)),
    "Winnipeg": ("tntp/Winnipeg_net.tntp", lambda: grid(32, 4)),
    "power": ("metis_graphs/power.graph", lambda: grid(70, 5)),
    "astro-ph": ("metis_graphs/astro-ph.graph.gz", lambda: web(16_706, 7, 6)),
}


@claim(
    "apsp-lu-chicago",
    text="all distances of ChicagoRegional by semiring LU, ordering and writing included, against dijkstra, one thread",
    system=["ROME"],
    peer="scipy.sparse.csgraph.dijkstra",
    peer_package="scipy",
    unit="ratio",
    bar=40.0,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def chicago(bench: Bench) -> Iterator[Row]:
    yield from _whole(bench, "ChicagoRegional")


@claim(
    "apsp-lu-sydney",
    text="all distances of Sydney by semiring LU, ordering and writing included, against dijkstra, one thread",
    system=["ROME"],
    peer="scipy.sparse.csgraph.dijkstra",
    peer_package="scipy",
    unit="ratio",
    bar=60.0,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def sydney(bench: Bench) -> Iterator[Row]:
    yield from _whole(bench, "Sydney")


@claim(
    "minplus-peak",
    text="share of the measured add-and-min peak that the dense min-plus product of 2048 float32 reaches, one thread",
    system=["ROME"],
    peer="additions and minima on registers alone",
    unit="share",
    bar=0.7,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def minplus_peak(bench: Bench) -> Iterator[Row]:
    """int32, whose instructions have more ports on some processors, stands beside."""
    n = 2048
    for element, dtype in (("f32", np.float32), ("i32", np.int32)):
        a = np.random.default_rng(0).integers(1, 1000, (n, n)).astype(dtype)
        c = a.copy()
        products = Products(named_semiring("min_plus"), dtype)
        chains, work = min_plus_chains(n**3 * a.itemsize // _vector_bytes() // 8, element)
        row = bench.compare(f"{element} n={n}", partial(products.add, c, a, a), chains)
        assert row.ratio is not None
        note = f"{2e-9 * n**3 / row.ours:.1f} Gop/s"
        yield bench.value(row.case, row.ratio / work * 8, "share", counted=element == "f32", note=note)


@claim(
    "minplus-scipy",
    text="the closure of a dense matrix of 2048 whole numbers against scipy floyd_warshall, one thread",
    system=["ROME"],
    peer="scipy.sparse.csgraph.floyd_warshall",
    peer_package="scipy",
    unit="ratio",
    bar=40.0,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def minplus_scipy(bench: Bench) -> Iterator[Row]:
    """The public call on integers, which are solved in int32; float32 stands beside."""
    n = 2048
    graph = _complete(n)
    wide = np.zeros((n, n))
    wide[graph.sources, graph.indices] = graph.weights
    few = Bench(samples=3)
    for dtype in (np.int32, np.float32):
        plan = apsp_plan(graph, method="dense", dtype=dtype)
        out = np.empty((n, n), dtype)
        yield few.compare(
            f"{np.dtype(dtype)} n={n}",
            partial(plan.solve, out=out),
            partial(floyd_warshall, wide),
            counted=dtype == np.int32,
        )


@claim(
    "apsp-auto",
    text="the engine that auto takes against the fastest engine, planning included, the worst graph, one thread",
    system=["ROME"],
    peer="the fastest engine",
    unit="ratio",
    bar=1 / 1.2,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def auto(bench: Bench) -> Iterator[Row]:
    """All sources where that takes seconds, else 256; engines that are expected to take ten times the best are left out."""
    few = Bench(samples=3)
    cases = {**{name: _graph(name) for name in GRAPHS}, "complete, 700": (_complete(700), "")}
    for name, (graph, note) in cases.items():
        for sources in {graph.n if graph.n <= 8000 else SAMPLED, 1}:
            chosen = np.random.default_rng(1).integers(0, graph.n, sources)
            plan = apsp_plan(graph)
            costs = plan.costs(sources).seconds
            best = min(costs.values())
            engines = [engine for engine, seconds in costs.items() if seconds < 10 * best]
            peers = {engine: partial(_solved, graph, engine, chosen) for engine in engines}
            said = f"took {plan.costs(sources).fastest}" + (f"; {note}" if note else "")
            yield few.compare(f"{name}, {sources} sources", partial(_solved, graph, "auto", chosen), peers, note=said)


def _whole(bench: Bench, name: str) -> Iterator[Row]:
    """SciPy from all sources takes minutes: it is timed on a sample of them and brought to all.

    Ours writes into an array that was written before: what fresh memory costs is the system's affair, and SciPy's result,
    twice as large, is counted at the sample's rate.
    """
    graph, note = _graph(name)
    matrix = csr_array((graph.weights.astype(np.float64), graph.indices, graph.indptr), shape=(graph.n, graph.n))
    sample = np.random.default_rng(0).integers(0, graph.n, SAMPLED)
    out = np.zeros((graph.n, graph.n), np.float32)
    few = Bench(samples=3)
    for threads in (1, 2):

        def ours(threads: int = threads) -> None:
            apsp_plan(graph, method="lu", dtype=np.float32).solve(out=out, threads=threads)

        row = few.compare(name, ours, partial(dijkstra, matrix, indices=sample))
        assert row.peer is not None
        scale = graph.n / SAMPLED
        said = f"{row.ours:.2f} s against {row.peer * scale:.1f} s; {threads} thread(s)" + (f"; {note}" if note else "")
        yield bench.value(name, row.peer * scale / row.ours, "ratio", counted=threads == 1, note=said)


def _graph(name: str) -> tuple[WeightedGraph, str]:
    """The graph, and a remark where it is a generated twin. Graphs without weights get whole ones."""
    file, twin = GRAPHS[name]
    try:
        graph = read_graph(data_file(f"roads/{file}"))
    except FileNotFoundError:
        return twin(), "generated twin"
    if (graph.weights == 1).all():
        weights = np.random.default_rng(0).integers(1, 101, graph.edges)
        graph = WeightedGraph.from_edges(graph.sources, graph.indices, weights, graph.n)
    return graph, ""


def _complete(n: int) -> WeightedGraph:
    tails, heads = np.nonzero(~np.eye(n, dtype=bool))
    return WeightedGraph.from_edges(tails, heads, np.random.default_rng(0).integers(1, 1000, len(tails)), n)


def _solved(graph: WeightedGraph, engine: str, sources: np.ndarray) -> None:
    apsp_plan(graph, method=engine).solve(sources)  # type: ignore[arg-type]


def _vector_bytes() -> int:
    from gossamer.codegen import host_target

    return host_target().vector_bytes
