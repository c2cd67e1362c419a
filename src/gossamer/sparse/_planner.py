"""Which way a product goes: one of our kernels, or another library's where that is faster.

On CPUs the planner predicts every way's time from counts alone. If our kernel is ahead by a clear margin it is taken;
otherwise the ways in question are timed once on this machine, and the answer is kept on disk for all matrices of about the
same size, density and number of columns. On GPUs (:mod:`~gossamer.sparse._gpu_planner`) the ways are timed once for
patterns of a kind. ``plan.explain()`` says which way was taken and why.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.files import write_json
from gossamer.core.hardware import cache_dir, hardware
from gossamer.core.measure import Bench
from gossamer.sparse import _gpu_planner as gpu
from gossamer.sparse._cpu_costs import COSTS
from gossamer.sparse._matrix import VALUE_TYPES, SparseMatrix
from gossamer.sparse._ops import run_spmm

BACKENDS = ("auto", *COSTS)
GPU_BACKENDS = ("auto", *gpu.ROWS, *gpu.VECTORS, "torch", "dense")
MARGIN = 2.5
"""How many times slower than our kernel a way has to be predicted in order not to be timed."""
_DENSE_LIMIT = 1 << 28
_TABLE_VERSION = 2
_timed_on_gpu: dict[str, dict[str, float]] = {}


@dataclass(frozen=True)
class SpmmPlan:
    """How products of one pattern with ``n`` dense columns are computed.

    backend: the way taken: "torch", "scipy" or "dense", or one of our kernels: "rows" (on a GPU also "rows-wide",
        "rows-cut" and "rows-sorted") or, on tensor cores, "vectors" and "vectors-wide".
    seconds: of every way considered, predicted or measured. measured: the ways that were timed.
    why: one sentence.
    """

    backend: str
    n: int
    seconds: Mapping[str, float]
    measured: frozenset[str]
    why: str

    def explain(self) -> str:
        """All ways with their times, the chosen one first."""
        others = sorted((name for name in self.seconds if name != self.backend), key=self.seconds.__getitem__)
        lines = [f"{self.backend}: {self.why}"]
        for name in (self.backend, *others):
            if name in self.seconds:
                source = "measured" if name in self.measured else "predicted"
                lines.append(f"  {name:12} {self.seconds[name] * 1e3:10.4f} ms  {source}")
        return "\n".join(lines)


def spmm_plan(
    matrix: SparseMatrix, n: int, backend: str = "auto", threads: int | None = None, measure: bool = True
) -> SpmmPlan:
    """Plan products of ``matrix`` with ``n`` dense columns; remembered with the pattern.

    backend: "auto", or the way to take whatever it costs. threads: torch's number if left out.
    measure: time the ways that are predicted to be near each other.

    Raises:
        ValueError: ``backend`` is unknown, or ``n`` is negative.
    """
    known = BACKENDS if matrix.device.type == "cpu" else GPU_BACKENDS
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    threads = threads or torch.get_num_threads()
    key = f"plan {n} {backend} {threads} {matrix.dtype} {measure} {torch.get_float32_matmul_precision()}"
    plan: SpmmPlan | None = matrix._memo.get(key)
    if plan is None:
        if matrix.device.type == "cpu":
            plan = _planned(matrix, n, backend, threads, measure)
        else:
            plan = _planned_on_gpu(matrix, n, backend, measure)
            if measure and not plan.measured and backend == "auto":  # while a CUDA graph is captured
                return plan
        matrix._memo[key] = plan
    return plan


def run(matrix: SparseMatrix, dense: Tensor, backend: str) -> Tensor:
    """The product by one way, without gradients. ``dense`` is a matrix of the values' type."""
    if matrix.device.type != "cpu" and (backend in gpu.ROWS or backend in gpu.VECTORS):
        return gpu.multiply(matrix, dense.detach(), backend)
    if backend == "rows":
        return run_spmm(*pattern_arrays(matrix), matrix.values, dense)
    other = _prepared(matrix, backend)
    if backend == "scipy":
        return torch.from_numpy(other @ dense.detach().numpy())
    multiply = torch.sparse.mm if backend == "torch" else torch.mm
    product: Tensor = multiply(other, dense.detach() if dense.requires_grad else dense)
    return product


def pattern_arrays(matrix: SparseMatrix) -> tuple[np.ndarray, np.ndarray]:
    """The pattern as NumPy arrays, made once."""
    arrays: tuple[np.ndarray, np.ndarray] | None = matrix._memo.get("arrays")
    if arrays is None:
        arrays = matrix._memo["arrays"] = matrix.indptr.contiguous().numpy(), matrix.indices.contiguous().numpy()
    return arrays


def _prepared(matrix: SparseMatrix, backend: str) -> Any:
    """``matrix`` in the form that another library multiplies, kept for as long as its values stay the same."""
    values, key = matrix.values, f"as {backend}"
    known = matrix._memo.get(key)
    if known is not None and known[0] is values and known[1] == values._version:
        return known[2]
    plain = matrix.with_values(values.detach())
    form = {"torch": plain.to_torch, "scipy": plain.to_scipy, "dense": plain.to_dense}[backend]()
    matrix._memo[key] = values, values._version, form
    return form


def _planned(matrix: SparseMatrix, n: int, backend: str, threads: int, measure: bool) -> SpmmPlan:
    ways = possible_ways(matrix)
    wide = matrix.dtype == torch.float64
    seconds = {name: COSTS[name].seconds(matrix.shape, matrix.nnz, n, threads, wide) for name in ways}
    if backend != "auto":
        if backend not in ways:
            raise ValueError(f"backend {backend!r} cannot multiply {matrix.dtype}; accepted are {', '.join(ways)}")
        return SpmmPlan(backend, n, MappingProxyType(seconds), frozenset(), "asked for")
    best = min(seconds, key=seconds.__getitem__)
    near = [name for name in ways if seconds[name] <= MARGIN * seconds["rows"]]
    if len(near) == 1 or not measure or 0 in (*matrix.shape, n):
        why = f"predicted to be {MARGIN}x ahead of every other way" if len(near) == 1 else "predicted to be fastest"
        return SpmmPlan(best, n, MappingProxyType(seconds), frozenset(), why)
    timed = _raced(matrix, n, threads, near)
    seconds |= timed
    best = min(timed, key=timed.__getitem__)
    why = "fastest when timed on matrices like this one"
    if best != "rows":
        why += f"; our kernel steps aside for {best}"
    return SpmmPlan(best, n, MappingProxyType(seconds), frozenset(timed), why)


def _planned_on_gpu(matrix: SparseMatrix, n: int, backend: str, measure: bool) -> SpmmPlan:
    ways = possible_ways(matrix)
    if backend != "auto":
        if backend not in (*ways, *gpu.VECTORS) or backend in gpu.VECTORS and matrix.dtype == torch.float64:
            raise ValueError(f"backend {backend!r} cannot multiply {matrix.dtype}; accepted are {', '.join(ways)}")
        return SpmmPlan(backend, n, MappingProxyType({}), frozenset(), "asked for")
    if not measure or 0 in (*matrix.shape, n, matrix.nnz) or torch.cuda.is_current_stream_capturing():
        return SpmmPlan("rows", n, MappingProxyType({}), frozenset(), "taken without timing")
    key = gpu.class_of(matrix, n, ways)
    if key not in _timed_on_gpu:
        plain = matrix.with_values(matrix.values.detach())
        operands = gpu.rotated(matrix.shape[1], n, matrix.values)
        _timed_on_gpu[key] = gpu.race({name: [partial(run, plain, dense, name) for dense in operands] for name in ways})
    seconds = _timed_on_gpu[key]
    best = min(seconds, key=seconds.__getitem__)
    why = "fastest when timed on a pattern like this one"
    if best in ("torch", "dense"):
        why += f"; our kernels step aside for {best}"
    return SpmmPlan(best, n, MappingProxyType(seconds), frozenset(seconds), why)


def possible_ways(matrix: SparseMatrix) -> list[str]:
    """The ways that can multiply values of this type and size, where they are."""
    if matrix.device.type != "cpu":
        ways = [*gpu.own_ways(matrix), "torch"]
    else:
        ways = ["rows"]
        if matrix.dtype in (torch.float32, torch.float64):
            ways += ["torch", "scipy"]
    if matrix.shape[0] * matrix.shape[1] * matrix.dtype.itemsize <= _DENSE_LIMIT:
        ways.append("dense")
    return ways


def _raced(matrix: SparseMatrix, n: int, threads: int, ways: list[str]) -> dict[str, float]:
    """Seconds of each way, timed now unless a matrix of this class was timed before on this machine."""
    table, key = _table(), _class_of(matrix, n, threads)
    known = table.get(key, {})
    if not set(ways) <= set(known):
        plain = matrix.with_values(matrix.values.detach())
        generator = torch.Generator().manual_seed(0)  # torch's own stays as it is: a seeded training is replayed
        dense = torch.randn(matrix.shape[1], n, generator=generator).to(matrix.dtype)
        calls = {name: partial(run, plain, dense, name) for name in ways}
        first, *others = ways
        bench = Bench(samples=15, sample_seconds=1e-3, case_seconds=2.0)
        with bench.threads(threads):
            row = bench.compare("", calls[first], {name: calls[name] for name in others})
        assert row.peer is not None
        known = known | {first: row.ours, row.peer_name: row.peer, **row.others}
        table[key] = known
        with contextlib.suppress(OSError):  # a read-only home costs only the timing, next time again
            write_json(_table_path(), table)
    return {name: known[name] for name in ways}


def _class_of(matrix: SparseMatrix, n: int, threads: int) -> str:
    """Products whose best way is the same: sizes to a factor of 1.4, few columns exactly."""
    rows, columns, entries = (round(2 * np.log2(max(1, size))) for size in (*matrix.shape, matrix.nnz))
    wide = n if n <= 16 else f"2^{round(2 * np.log2(n)) / 2}"
    return f"{rows}x{columns} nnz {entries} n {wide} {VALUE_TYPES.index(matrix.dtype)} t{threads}"


@cache
def _table() -> dict[str, dict[str, float]]:
    try:
        return dict(json.loads(_table_path().read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _table_path() -> Path:
    return cache_dir() / f"spmm-{hardware().slug}-v{_TABLE_VERSION}.json"
