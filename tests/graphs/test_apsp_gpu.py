"""The GPU engines: their source compiles here, NumPy runs their lists of tiles in any order; on a GPU, the real thing."""

import numpy as np
import pytest
import torch

from gossamer.graphs import WeightedGraph, apsp, apsp_plan
from gossamer.graphs import _apsp_gpu as gpu


def grid(side: int, seed: int) -> WeightedGraph:
    generator = np.random.default_rng(seed)
    number = np.arange(side * side).reshape(side, side)
    pairs = [(number[:, :-1], number[:, 1:]), (number[:-1], number[1:])]
    tails = np.concatenate([a.ravel() for a, _ in pairs] + [b.ravel() for _, b in pairs])
    heads = np.concatenate([b.ravel() for _, b in pairs] + [a.ravel() for a, _ in pairs])
    return WeightedGraph.from_edges(tails, heads, generator.integers(1, 101, len(tails)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_the_source_compiles(arch: str, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    assert compile_cubin(gpu.minplus_source(), arch, dict(gpu.minplus_macros(dtype))).startswith(b"\x7fELF")


def run_jobs(d: np.ndarray, jobs: np.ndarray, generator: np.random.Generator) -> None:
    """What ``minplus_tiles`` computes, tiles in random order."""
    flat, ld = d.reshape(-1), len(d)

    def view(start: int, rows: int, columns: int) -> np.ndarray:
        return np.lib.stride_tricks.as_strided(flat[start:], (rows, columns), (ld * d.itemsize, d.itemsize))

    for job in generator.permutation(jobs):
        a, b = view(job["a"], job["rows"], job["depth"]), view(job["b"], job["depth"], job["columns"])
        c = view(job["c"], job["rows"], job["columns"])
        c[:] = np.minimum(c, (a[:, :, None] + b[None]).min(1))


@pytest.mark.parametrize("widest", [4, 64])
def test_tiles_in_any_order_within_a_list_give_all_distances(widest: int) -> None:
    generator = np.random.default_rng(0)
    graph = grid(13, 1)
    plan = apsp_plan(graph)
    place = plan.elimination.place
    d = np.full((graph.n, graph.n), 2**30 - 1, np.int64)
    d[place[graph.sources], place[graph.indices]] = graph.weights
    np.fill_diagonal(d, 0)
    rounds = gpu.supernode_rounds(plan.elimination, widest)
    assert len(rounds) < graph.n / 2
    for level in rounds:
        for first, last, _ in level:
            square = d[first:last, first:last]
            for k in range(last - first):
                square[:] = np.minimum(square, square[:, k : k + 1] + square[k])
        run_jobs(d, gpu.panel_jobs(level, graph.n), generator)
        run_jobs(d, gpu.outer_jobs(level, graph.n), generator)
    np.testing.assert_array_equal(d[np.ix_(place, place)], plan.solve())


def test_tiles_of_a_list_that_meet_are_marked() -> None:
    plan = apsp_plan(grid(13, 2))
    for level in gpu.supernode_rounds(plan.elimination, 64):
        jobs = gpu.outer_jobs(level, plan.n)
        seen = np.zeros((plan.n, plan.n), np.int64)
        for job in jobs:
            row, column = divmod(int(job["c"]), plan.n)
            block = seen[row : row + job["rows"], column : column + job["columns"]]
            block += 1 if job["shared"] else 1000
        assert ((seen < 1000) | (seen == 1000)).all()  # a tile that is not marked is alone


def test_levels_of_the_tree_order_both_sweeps() -> None:
    elimination = apsp_plan(grid(12, 3)).elimination
    level_of = np.empty(elimination.n, np.int64)
    levels = gpu.tree_levels(elimination.parent)
    for number, level in enumerate(levels):
        level_of[level] = number
    tails = np.repeat(np.arange(elimination.n), np.diff(elimination.starts))
    assert (level_of[tails] < level_of[elimination.heads]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["lu", "supernodal", "dense"])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_gpu_engines_are_bit_equal_to_the_cpu(engine: str, dtype: type) -> None:
    for graph in (grid(31, 4), grid(5, 5), grid(60, 6)):
        found = apsp(graph, method=engine, dtype=dtype, device="cuda")  # type: ignore[call-overload]
        np.testing.assert_array_equal(found.cpu().numpy(), apsp(graph, method="lu", dtype=dtype))
        some = apsp(graph, method=engine, dtype=dtype, device="cuda", sources=[3, 1])  # type: ignore[call-overload]
        np.testing.assert_array_equal(some.cpu().numpy(), found.cpu().numpy()[[3, 1]])


@pytest.mark.gpu
def test_minplus_products_of_any_shape_are_exact() -> None:
    generator = np.random.default_rng(7)
    for m, n, k in ((1, 1, 1), (130, 257, 9), (128, 128, 64), (300, 5, 129)):
        a, b = (generator.integers(0, 1000, shape).astype(np.int32) for shape in ((m, k), (k, n)))
        c = np.full((m, n), 900, np.int32)
        expected = np.minimum(c, (a[:, :, None] + b[None]).min(1))
        for dtype in (torch.int32, torch.float32):
            on_gpu = [torch.from_numpy(array).to("cuda", dtype) for array in (c, a, b)]
            gpu.minplus(*on_gpu)
            np.testing.assert_array_equal(on_gpu[0].cpu().numpy(), expected)
