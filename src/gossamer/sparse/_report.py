"""One matrix looked at as a whole: its picture, what reordering would gain, which way its products go, what that costs."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gossamer.core.hardware import hardware
from gossamer.core.measure import Bench
from gossamer.core.report import Report
from gossamer.sparse._hybrid import HybridPlan
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._planner import possible_ways, spmm_plan
from gossamer.sparse._products import spmm
from gossamer.sparse._reorder import reorder
from gossamer.sparse._statistics import statistics

_PIXELS = 256


def examine(matrix: SparseMatrix, n: int = 128, samples: int = 9) -> dict[str, Any]:
    """Measure every way of multiplying ``matrix`` by ``n`` columns on this CPU, and plan it for a GPU; JSON values.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    plan = spmm_plan(matrix, n)
    dense = torch.randn(matrix.shape[1], n, generator=torch.Generator().manual_seed(0)).to(matrix.dtype)
    calls = {name: partial(spmm, matrix, dense, backend=name) for name in possible_ways(matrix)}
    bench = Bench(samples=samples, sample_seconds=1e-3, case_seconds=10.0)
    others = {name: call for name, call in calls.items() if name != plan.backend}
    with bench.threads(torch.get_num_threads()):
        row = bench.compare("", calls[plan.backend], others)
    assert row.peer is not None
    seconds = {plan.backend: row.ours, row.peer_name: row.peer, **row.others}
    return {
        "rows": matrix.shape[0], "columns": matrix.shape[1], "nnz": matrix.nnz, "n": n,
        "dtype": str(matrix.dtype).removeprefix("torch."),
        "statistics": statistics(matrix).as_json(),
        "plan": {"backend": plan.backend, "why": plan.why, "explain": plan.explain()},
        "peers": [
            {"way": name, "seconds": seconds[name], "ratio": seconds[name] / seconds[plan.backend]}
            for name in sorted(seconds, key=seconds.__getitem__)
        ],
        "worst_ratio": row.ratio,
        "threads": torch.get_num_threads(),
        "hardware": hardware().slug,
        "reordering": _reordered(matrix),
        "hybrid": [_hybrid(matrix, n, dtype) for dtype in (torch.float32, torch.float16)],
    }  # fmt: skip


def write_report(result: dict[str, Any], matrix: SparseMatrix, path: str | os.PathLike[str], name: str = "") -> Path:
    """Write what :func:`examine` found as one HTML page, with a picture of where the entries are."""
    import plotly.graph_objects as go

    counts = result["statistics"]
    report = Report(
        f"Sparse matrix {name}".strip(),
        f"{result['rows']:,} x {result['columns']:,}, {result['nnz']:,} entries, products with {result['n']} columns",
    )
    chosen = result["plan"]["backend"]
    second = next((peer for peer in result["peers"] if peer["way"] != chosen), None)
    report.add_highlights(
        [
            ("way taken on this CPU", chosen, result["plan"]["why"]),
            ("against the next best", f"{second['ratio']:.2f}x" if second else "", second["way"] if second else ""),
            ("entries per 8x1 vector", f"{counts['nnz_per_vector8']:.2f}", "8 would fill tensor cores"),
            ("largest row", f"{counts['degree_largest']:,}", f"mean {counts['degree_mean']:.1f}"),
        ]
    )
    report.add_heading("Where the entries are")
    picture = np.log10(1 + sparsity_picture(matrix))
    figure = go.Figure(go.Heatmap(z=picture, colorscale="Viridis", colorbar_title="log10(1 + n)"))
    figure.update_yaxes(autorange="reversed", title="row block")
    figure.update_xaxes(title="column block")
    report.add_figure(figure, "Entries per cell of a grid over the matrix, logarithmic")
    report.add_heading("Ways to the product")
    rows = [[peer["way"], 1e3 * peer["seconds"], peer["ratio"]] for peer in result["peers"]]
    caption = f"{result['threads']} thread(s), {result['hardware']}, contenders taking turns; ratio to the way taken"
    report.add_table(["way", "ms", "ratio"], rows, caption)
    report.add_heading("Vectors and reordering")
    vectors = go.Figure(go.Bar(x=list(range(1, 9)), y=counts["histogram8"][1:]))
    vectors.update_xaxes(title="entries of an 8x1 vector")
    vectors.update_yaxes(title="vectors")
    report.add_figure(vectors, "How full the 8x1 vectors are")
    table = [
        [order["method"], order["nnz_per_vector8"], 100 * order["share_in_vectors_of_2"]]
        for order in result["reordering"]
    ]
    report.add_table(["order", "entries per vector", "% in vectors of 2 or more"], table)
    report.add_heading("Planned for a GPU")
    rows = [
        [h["dtype"], h["theta"], h["nnz_tensor"], h["nnz_long"], h["nnz_short"], h["blocks"]] for h in result["hybrid"]
    ]
    header = ["type", "theta", "on tensor cores", "in long parts", "in short parts", "blocks"]
    report.add_table(header, rows, "By the cost model, which is not calibrated for kernels of ours: there are none yet")
    report.add_json(result)
    return report.write(path)


def sparsity_picture(matrix: SparseMatrix, pixels: int = _PIXELS) -> np.ndarray:
    """Entries per cell of a grid of at most ``pixels`` x ``pixels`` over the matrix, int64.

    >>> sparsity_picture(SparseMatrix.from_coo([0, 3], [0, 3]), 2).tolist()
    [[1, 0], [0, 1]]
    """
    height, width = (max(1, min(pixels, size)) for size in matrix.shape)
    rows, columns = matrix.rows.cpu().numpy().astype(np.int64), matrix.indices.cpu().numpy().astype(np.int64)
    cell = rows * height // max(1, matrix.shape[0]) * width + columns * width // max(1, matrix.shape[1])
    return np.bincount(cell, minlength=height * width).reshape(height, width)


def _reordered(matrix: SparseMatrix) -> list[dict[str, Any]]:
    methods = ["degree", "lsh"] + (["rcm"] if matrix.shape[0] == matrix.shape[1] else [])
    moved = {"natural": matrix} | {method: reorder(matrix, method).apply(matrix) for method in methods}
    out = []
    for method, other in moved.items():
        counts = statistics(other)
        shares = {"nnz_per_vector8": counts.nnz_per_vector8, "share_in_vectors_of_2": counts.share_in_vectors(2)}
        out.append({"method": method, **shares})
    return out


def _hybrid(matrix: SparseMatrix, n: int, dtype: torch.dtype) -> dict[str, Any]:
    counts = HybridPlan.build(matrix, n, dtype=dtype).stats()
    return {"dtype": str(dtype).removeprefix("torch."), **counts}
