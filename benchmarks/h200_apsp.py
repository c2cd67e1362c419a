"""All-pairs shortest paths on an H200: the dense min-plus product, the supernodal and LU engines on roads and meshes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.spatial import Delaunay

from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, geometric_mean, largest, worst
from gossamer.graphs import ApspPlan, WeightedGraph, apsp_plan, read_graph
from gossamer.graphs import _apsp_gpu as gpu
from gossamer.graphs._supernodal import supernodal_pairs

SOURCES = ("graphs/_apsp_gpu.py", "graphs/kernels/minplus.cu", "graphs/_elimination.py")
PEAK = 33.5e12  # additions and minima a second: 132 multiprocessors, 128 lanes, 1.98 GHz


@claim(
    "h200-minplus-peak",
    text="share of the H200's add-and-min peak (33.5 Top/s) that the dense float32 min-plus product reaches",
    system=["ROME"],
    peer="the arithmetic peak",
    unit="share",
    bar=0.6,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def dense(bench: Bench) -> Iterator[Row]:
    for n in (8192, 16384):
        a, b, c = (torch.rand(n, n, device="cuda") for _ in range(3))
        seconds = _timed(lambda a=a, b=b, c=c: gpu.minplus(c, a, b))  # type: ignore[misc]
        yield bench.value(f"n={n}", 2 * n**3 / seconds / PEAK, "share", note=f"{2e-12 * n**3 / seconds:.1f} Top/s")


@claim(
    "h200-rome-peak",
    text="share of the H200's add-and-min peak that supernodal elimination reaches, useful pairs only",
    system=["ROME"],
    peer="the arithmetic peak",
    unit="share",
    bar=0.2,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def supernodal(bench: Bench) -> Iterator[Row]:
    """The LU engine's time stands in the remark."""
    for name, graph in _graphs():
        plan = apsp_plan(graph, dtype=np.float32)
        d = gpu._start(plan, "supernodal", torch.device("cuda"))
        seconds = _timed(lambda d=d, plan=plan: gpu.close_supernodal(d, plan.elimination))  # type: ignore[misc]
        del d
        lu = _timed(lambda plan=plan: gpu.solve_on_gpu(plan, "lu", None, "cuda"))  # type: ignore[misc]
        share = 2 * supernodal_pairs(plan.elimination) / seconds / PEAK
        yield bench.value(name, share, "share", note=f"{1e3 * seconds:.0f} ms; lu {1e3 * lu:.0f} ms")


@claim(
    "h200-apsp-luxembourg",
    text="all 13 billion distances of a road-like graph of 114,599 vertices on the device, ordering apart",
    system=["ROME"],
    peer="none",
    unit="s",
    bar=1.0,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def luxembourg(bench: Bench) -> Iterator[Row]:
    graph = roads(60, 114_599, 1)
    start = time.perf_counter()
    plan: ApspPlan = apsp_plan(graph, dtype=np.float32)
    planned = time.perf_counter() - start
    seconds = _timed(lambda: gpu.solve_on_gpu(plan, "lu", None, "cuda"), rounds=3)
    note = f"ordering {planned:.2f} s; {plan.elimination.fill:,} entries after elimination"
    yield bench.value(f"{graph.n} vertices", seconds, "s", note=note)


def roads(side: int, n: int, seed: int) -> WeightedGraph:
    """Crossings on a grid, joined by roads of many points: ``n`` vertices in all."""
    generator = np.random.default_rng(seed)
    number = np.arange(side * side).reshape(side, side)
    tails = np.concatenate([number[:, :-1].ravel(), number[:-1].ravel()])
    heads = np.concatenate([number[:, 1:].ravel(), number[1:].ravel()])
    points = np.diff(np.linspace(0, n - side * side, len(tails) + 1).astype(int))
    ends, following = [], side * side
    for tail, head, count in zip(tails, heads, points, strict=True):
        chain = np.concatenate([[tail], np.arange(following, following + count), [head]])
        ends.append(np.stack([chain[:-1], chain[1:]]))
        following += count
    a, b = np.concatenate(ends, axis=1)
    weights = generator.integers(1, 101, len(a))
    return WeightedGraph.from_edges(np.concatenate([a, b]), np.concatenate([b, a]), np.tile(weights, 2), n)


def _triangulation(n: int) -> WeightedGraph:
    """The Delaunay graph of random points, edges weighted by their length."""
    points = np.random.default_rng(0).random((n, 2))
    corners = Delaunay(points).simplices
    a, b = np.concatenate([corners[:, [0, 1]], corners[:, [1, 2]], corners[:, [2, 0]]]).T
    weights = np.round(1e5 * np.linalg.norm(points[a] - points[b], axis=1)).astype(np.int64) + 1
    return WeightedGraph.from_edges(np.concatenate([a, b]), np.concatenate([b, a]), np.tile(weights, 2), n)


def _graphs() -> Iterator[tuple[str, WeightedGraph]]:
    for name, file in (
        ("ChicagoRegional", "tntp/ChicagoRegional_net.tntp.gz"),
        ("Sydney", "tntp/Sydney_net.tntp.gz"),
        ("delaunay_n15", "metis_delaunay/delaunay_n15.graph.gz"),
    ):
        try:
            yield name, read_graph(data_file(f"roads/{file}"))
        except FileNotFoundError:
            continue
    yield "Delaunay, 32,768 points", _triangulation(32_768)
    yield "Delaunay, 65,536 points", _triangulation(65_536)


def _timed(work: Callable[[], object], rounds: int = 5) -> float:
    """Median seconds on the device's clock, after one call that compiles."""
    times = []
    for number in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number:
            times.append(start.elapsed_time(end) / 1e3)
    return float(geometric_mean(sorted(times)[rounds // 2 : rounds // 2 + 1]))
