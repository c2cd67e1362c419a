"""Path problems on a GPU: dense closure, supernodal elimination as lists of tiles, and LU sweeps level by level.

The scheme of the supernodal engine is our own (the text of ROME was not to be had): supernodes of one level of the tree are
eliminated together. Their diagonal squares, their panels and the products of the panels are cut into equal tiles, sorted
by depth, and taken from a counter by as many blocks as the GPU holds, so that no block waits for a large supernode.
Descendants of supernodes of one level are disjoint; only among common ancestors do products meet, and there they lower
the numbers atomically.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.nvrtc import Kernel, load_kernel
from gossamer.graphs._elimination import Elimination, supernodes
from gossamer.graphs._lu import factorise
from gossamer.graphs._supernodal import first_descendants

TILE = 128
SQUARE = 64
_THREADS = 256
_BLOCK_OF_SOURCES = 4096
_JOB = np.dtype(
    [("a", "i8"), ("b", "i8"), ("c", "i8"), ("rows", "i4"), ("columns", "i4"), ("depth", "i4"), ("shared", "i4")]
)
_MACROS = {
    torch.float32: (("INFINITE", "__int_as_float(0x7f800000)"), ("NUMBER", "float")),
    torch.int32: (("INFINITE", "1073741823"), ("NUMBER", "int"), ("WHOLE", "1")),
}
_TORCH = {np.dtype(np.float32): torch.float32, np.dtype(np.int32): torch.int32}


def minplus_source() -> str:
    """The CUDA source."""
    return (Path(__file__).parent / "kernels" / "minplus.cu").read_text()


def minplus_macros(dtype: torch.dtype) -> tuple[tuple[str, str], ...]:
    """Its macros for a number type."""
    return _MACROS[dtype]


@cache
def _kernel(name: str, dtype: torch.dtype, device: int) -> Kernel:
    return load_kernel(minplus_source(), name, minplus_macros(dtype), device)


def _find(name: str, tensor: Tensor) -> Kernel:
    return _kernel(name, tensor.dtype, tensor.device.index or 0)


def minplus(c: Tensor, a: Tensor, b: Tensor) -> None:
    """``c = min(c, a (+) b)`` ``c`` may be ``a`` or ``b`` if the other is closed."""
    (m, k), n = a.shape, b.shape[1]
    if not (m and n and k):
        return
    grid = (-(-n // TILE), -(-m // TILE))
    numbers = [np.int64(x.stride(0)) for x in (a, b, c)]
    sizes = [np.int32(size) for size in (m, n, k)]
    _find("minplus_dense", c).launch(grid, _THREADS, a, numbers[0], b, numbers[1], c, numbers[2], *sizes)


def close_dense(d: Tensor) -> None:
    """The min-plus closure of a square matrix in place, by halves."""
    n = len(d)
    if n <= SQUARE:
        starts, sizes = (torch.tensor([value], dtype=torch.int32, device=d.device) for value in (0, n))
        _find("close_squares", d).launch(1, _THREADS, d, np.int64(d.stride(0)), starts, sizes)
        return
    half = (n // 2 + SQUARE - 1) // SQUARE * SQUARE
    p, q, r, s = d[:half, :half], d[:half, half:], d[half:, :half], d[half:, half:]
    close_dense(p)
    minplus(q, p, q)
    minplus(r, r, p)
    minplus(s, r, q)
    close_dense(s)
    minplus(r, s, r)
    minplus(q, q, s)
    minplus(p, q, r)


def close_supernodal(d: Tensor, elimination: Elimination, widest: int = SQUARE) -> None:
    """Supernodal elimination on ``d``, whose rows and columns are in the order of ``elimination``, in place."""
    for level in supernode_rounds(elimination, widest):
        starts = torch.tensor([first for first, *_ in level], dtype=torch.int32, device=d.device)
        sizes = torch.tensor([last - first for first, last, *_ in level], dtype=torch.int32, device=d.device)
        _find("close_squares", d).launch(len(level), _THREADS, d, np.int64(d.stride(0)), starts, sizes)
        # Panels write over what they read; as a closed diagonal changes nothing twice, tiles may meet in any order.
        for jobs in (panel_jobs(level, len(d)), outer_jobs(level, len(d))):
            _run_tiles(d, jobs)


def supernode_rounds(elimination: Elimination, widest: int) -> list[list[tuple[int, int, list[tuple[int, int]]]]]:
    """Supernodes that are eliminated together: ``(first, last, ranges of rows)``, one level of the tree after the other."""
    bounds = supernodes(elimination, widest)
    pieces = [
        (a, min(a + widest, last)) for first, last in itertools.pairwise(bounds) for a in range(first, last, widest)
    ]
    lowest = first_descendants(elimination.parent)
    height = np.zeros(elimination.n, np.int64)  # the first round in which a place may be eliminated
    rounds: list[list[tuple[int, int, list[tuple[int, int]]]]] = []
    for first, last in pieces:
        later = elimination.heads[elimination.starts[last - 1] : elimination.starts[last]]
        number = int(height[first:last].max())
        ranges = [(int(lowest[first:last].min()), int(first)), *_runs(later)]
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append((int(first), int(last), [part for part in ranges if part[0] < part[1]]))
        above = elimination.parent[last - 1]
        if above >= 0:  # later neighbours are all above the parent
            height[above] = max(height[above], number + 1)
    return rounds


def panel_jobs(level: Sequence[tuple[int, int, list[tuple[int, int]]]], ld: int) -> np.ndarray:
    """Tiles of ``D[k,R] = D[k,k] D[k,R]`` and ``D[R,k] = D[R,k] D[k,k]``."""
    jobs = []
    for first, last, ranges in level:
        width = last - first
        for start, size in _tiles(ranges):
            jobs.append((first * ld + first, first * ld + start, first * ld + start, width, size, width, 0))
            jobs.append((start * ld + first, first * ld + first, start * ld + first, size, width, width, 0))
    return np.array(jobs, _JOB)


def outer_jobs(level: Sequence[tuple[int, int, list[tuple[int, int]]]], ld: int) -> np.ndarray:
    """Tiles of ``D[R,R] = min(D[R,R], D[R,k] D[k,R])``, longest depth first."""
    parts = []
    for first, last, ranges in level:
        tiles = np.array(list(_tiles(ranges)), np.int64).reshape(-1, 2)
        jobs = np.zeros((len(tiles), len(tiles)), _JOB)
        rows, columns = tiles[:, None], tiles[None]
        jobs["a"] = rows[..., 0] * ld + first
        jobs["b"] = first * ld + columns[..., 0]
        jobs["c"] = rows[..., 0] * ld + columns[..., 0]
        jobs["rows"], jobs["columns"], jobs["depth"] = rows[..., 1], columns[..., 1], last - first
        jobs["shared"] = (rows[..., 0] >= last) & (columns[..., 0] >= last)
        parts.append(jobs.ravel())
    found = np.concatenate(parts) if parts else np.empty(0, _JOB)
    return found[np.argsort(-found["depth"].astype(np.int64), kind="stable")]


def solve_on_gpu(plan: Any, method: str, sources: Any, device: str) -> Tensor:
    """Distances as a tensor on the GPU; row i belongs to ``sources[i]``, or to vertex i.

    Raises:
        ValueError: the semiring, number type or method is not one that the GPU computes, or memory does not suffice.
    """
    if plan.semiring != "min_plus" or plan.dtype not in _TORCH:
        raise ValueError(
            f"a GPU computes min_plus in int32 and float32, got {plan.semiring} in {plan.dtype}; give dtype="
        )
    if (plan.graph.weights < 0).any():
        raise ValueError("a GPU takes weights that are not negative")
    if method not in ("auto", "lu", "supernodal", "dense"):
        raise ValueError(f"method must be auto, lu, supernodal or dense on a GPU, got {method!r}")
    where = torch.device(device)
    chosen = np.arange(plan.n) if sources is None else np.asarray(sources, np.int64)
    engine = "lu" if method == "auto" else method
    needed = (len(chosen) if engine == "lu" else 2 * plan.n) * plan.n * 4
    free = torch.cuda.mem_get_info(where)[0]
    if needed > free:
        raise ValueError(f"the distances take {needed:,} bytes on the GPU, {free:,} are free: give sources=")
    with torch.cuda.device(where):
        if engine == "lu":
            return _solve_lu(plan, chosen, where)
        d = _start(plan, engine, where)
        order = torch.from_numpy(plan.elimination.place.astype(np.int64)).to(where)
        if engine == "supernodal":
            close_supernodal(d, plan.elimination)
            rows = order[torch.from_numpy(chosen).to(where)]
            return d.index_select(0, rows).index_select(1, order)
        close_dense(d)
        return d if sources is None else d[torch.from_numpy(chosen).to(where)]


def _start(plan: Any, engine: str, where: torch.device) -> Tensor:
    """The matrix of edges, in elimination order for the supernodal engine."""
    graph, place = plan.graph, plan.elimination.place
    tails, heads = (
        (place[graph.sources], place[graph.indices]) if engine == "supernodal" else (graph.sources, graph.indices)
    )
    kind = _TORCH[plan.dtype]
    infinity = float("inf") if kind == torch.float32 else 2**30 - 1
    d = torch.full((plan.n, plan.n), infinity, dtype=kind, device=where)
    ends = [torch.from_numpy(end.astype(np.int64)).to(where) for end in (tails, heads)]
    d[ends[0], ends[1]] = torch.from_numpy(graph.weights.astype(plan.dtype)).to(where)
    d.fill_diagonal_(0)
    return d


def _solve_lu(plan: Any, chosen: np.ndarray, where: torch.device) -> Tensor:
    """Sweeps by levels of the tree, one thread a source; both pull from other vertices of lower or higher levels."""
    factors = factorise(plan.graph, plan.elimination, plan.rule, plan.dtype)
    elimination = factors.elimination
    n, kind = elimination.n, _TORCH[plan.dtype]
    infinity = float("inf") if kind == torch.float32 else 2**30 - 1
    into = _transposed(elimination, factors.up)
    out_of = elimination.starts, elimination.heads, factors.down
    up, down = (
        [torch.from_numpy(np.ascontiguousarray(array)).to(where) for array in arrays] for arrays in (into, out_of)
    )
    levels = [torch.from_numpy(level.astype(np.int32)).to(where) for level in tree_levels(elimination.parent)]
    place = torch.from_numpy(elimination.place.astype(np.int64)).to(where)
    result = torch.empty((len(chosen), n), dtype=kind, device=where)
    for start in range(0, len(chosen), _BLOCK_OF_SOURCES):
        rows = place[torch.from_numpy(chosen[start : start + _BLOCK_OF_SOURCES]).to(where)]
        width = len(rows)
        x = torch.full((n, width), infinity, dtype=kind, device=where)
        x[rows, torch.arange(width, device=where)] = 0
        sweep = _find("sweep_level", x)
        for order, (starts, others, weights) in ((levels, up), (levels[::-1], down)):
            for level in order:
                grid = (-(-width // _THREADS), min(len(level), 65_535))
                sweep.launch(grid, _THREADS, x, np.int32(width), level, np.int32(len(level)), starts, others, weights)
        result[start : start + width] = x[place].T
    return result


def tree_levels(parent: np.ndarray) -> list[np.ndarray]:
    """Places by their height in the tree: a place's neighbours in the filled pattern are in other levels."""
    height = np.zeros(len(parent), np.int64)
    for vertex, above in enumerate(parent):
        if above >= 0:
            height[above] = max(height[above], height[vertex] + 1)
    order = np.argsort(height, kind="stable")
    return np.split(order, np.searchsorted(height[order], np.arange(1, height.max(initial=0) + 1)))


def _transposed(elimination: Elimination, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The filled pattern by columns: for every vertex the earlier ones."""
    tails = np.repeat(np.arange(elimination.n, dtype=np.int32), np.diff(elimination.starts))
    order = np.argsort(elimination.heads, kind="stable")
    starts = np.searchsorted(elimination.heads[order], np.arange(elimination.n + 1)).astype(np.int64)
    return starts, tails[order], values[order]


def _run_tiles(d: Tensor, jobs: np.ndarray) -> None:
    if not len(jobs):
        return
    on_device = torch.from_numpy(jobs.view(np.uint8)).to(d.device)
    counter = torch.zeros(1, dtype=torch.int32, device=d.device)
    blocks = min(len(jobs), 2 * torch.cuda.get_device_properties(d.device).multi_processor_count)
    arguments = d, np.int64(d.stride(0)), on_device, np.int32(len(jobs)), counter
    _find("minplus_tiles", d).launch(blocks, _THREADS, *arguments)


def _runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places as ranges."""
    if not len(places):
        return []
    cuts = np.nonzero(np.diff(places) != 1)[0] + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts)]


def _tiles(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        for place in range(start, stop, TILE):
            yield place, min(TILE, stop - place)
