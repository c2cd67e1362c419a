"""Several policies on one trace, as one page: who waited, who shared, what stood idle, what it cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossamer.cluster._simulate import Result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MOST_BARS = 4000
_POINTS = 400


def write_report(results: Sequence[Result], path: str | os.PathLike[str], title: str) -> Path:
    """Write the page: a table, JCT distributions, queues, utilisation, and a Gantt chart a policy.

    Raises:
        ValueError: there is no result.
        ModuleNotFoundError: Plotly is not installed.
    """
    from gossamer.core.report import Report

    if not results:
        raise ValueError("results must hold at least one result")
    cluster, best = results[0].cluster, min(results, key=lambda result: result.jct.mean())
    report = Report(title, f"{len(best.jobs):,} jobs on {cluster.nodes} nodes of {cluster.gpus_per_node} GPUs")
    report.add_highlights(
        [
            ("Shortest mean completion", best.policy, _hours(best.jct.mean())),
            ("Its utilisation", f"{100 * best.utilisation():.0f} %", "GPUs with a job"),
            (
                "Its energy",
                f"{best.energy() / 3.6e6:,.0f} kWh",
                f"{cluster.busy_watts:g} W busy, {cluster.idle_watts:g} W idle",
            ),
        ]
    )
    report.add_heading("Policies")
    report.add_table(*_table(results))
    report.add_heading("Completion times")
    report.add_figure(_distribution(results), "Share of jobs done within a time of their submission.")
    report.add_heading("Waiting jobs")
    report.add_figure(_queues(results), "Jobs that wait for GPUs.")
    report.add_heading("GPUs in use")
    report.add_figure(_utilisation(results), "GPUs with at least one job.")
    for result in results:
        report.add_heading(f"Who ran where: {result.policy}")
        note = (
            "" if len(result.segments) <= _MOST_BARS else f" The first {_MOST_BARS:,} of {len(result.segments):,} runs."
        )
        report.add_figure(_gantt(result), f"Two bars on one line of a GPU are two jobs that share it.{note}")
    report.add_json([result.summary() for result in results])
    return report.write(path)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h"


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[Any]]]:
    header = [
        "policy", "mean JCT, h", "large jobs", "small jobs", "p99", "mean queueing, h", "makespan, h", "utilisation, %",
        "kWh", "restarts", "jobs that shared",
    ]  # fmt: skip
    rows = []
    for result in results:
        s = result.summary()
        hours = [float(s[key]) / 3600 for key in ("mean_jct", "mean_jct_large", "mean_jct_small", "p99_jct")]
        times = [float(s[key]) / 3600 for key in ("mean_queueing", "makespan")]
        shares = [100 * float(s["utilisation"]), float(s["energy"]) / 3.6e6]
        rows.append([s["policy"], *hours, *times, *shares, s["restarts"], s["shared"]])
    return header, rows


def _distribution(results: Sequence[Result]) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for result in results:
        quantiles = np.linspace(0, 1, _POINTS)
        figure.add_trace(Scatter(x=np.quantile(result.jct, quantiles) / 3600, y=quantiles, name=result.policy))
    figure.update_xaxes(type="log", title="completion time, h")
    figure.update_yaxes(title="share of jobs")
    return figure


def _queues(results: Sequence[Result]) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for result in results:
        times, waiting = result.queue
        at = np.linspace(times[0], times[-1], _POINTS)
        level = waiting[np.searchsorted(times, at, side="right") - 1]
        figure.add_trace(Scatter(x=at / 3600, y=level, name=result.policy, line_shape="hv"))
    figure.update_xaxes(title="time, h")
    figure.update_yaxes(title="waiting jobs")
    return figure


def _utilisation(results: Sequence[Result]) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for result in results:
        changes = [
            (time, gpu, step) for _, gpus, a, b in result.segments for gpu in gpus for time, step in ((a, 1), (b, -1))
        ]
        changes.sort()
        at = np.linspace(0, changes[-1][0], _POINTS)
        on, busy, levels, place = [0] * result.cluster.gpus, 0, [], 0
        for time in at:
            while place < len(changes) and changes[place][0] <= time:
                _, gpu, step = changes[place]
                busy += (on[gpu] == 0) if step > 0 else -(on[gpu] == 1)
                on[gpu] += step
                place += 1
            levels.append(busy)
        figure.add_trace(Scatter(x=at / 3600, y=levels, name=result.policy, line_shape="hv"))
    figure.update_xaxes(title="time, h")
    figure.update_yaxes(title="GPUs in use", rangemode="tozero")
    return figure


def _gantt(result: Result) -> Figure:
    """Runs as bars, GPU by GPU; a run on neighbouring GPUs is one bar."""
    from plotly.graph_objects import Bar, Figure

    runs = sorted(result.segments, key=lambda segment: segment[2])[:_MOST_BARS]
    base, length, middle, thick, text, colour = [], [], [], [], [], []
    for row, gpus, begin, end in runs:
        for first, last in _neighbours(sorted(gpus)):
            base.append(begin / 3600)
            length.append((end - begin) / 3600)
            middle.append((first + last) / 2)
            thick.append(last - first + 0.8)
            text.append(f"{result.jobs[row].id}, {result.jobs[row].gpus} GPUs")
            colour.append(f"hsla({row * 137 % 360}, 55%, 55%, 0.6)")
    bars = Bar(
        x=length,
        base=base,
        y=middle,
        width=thick,
        orientation="h",
        hovertext=text,
        hoverinfo="text",
        marker_color=colour,
    )
    figure = Figure(bars)
    figure.update_layout(barmode="overlay", height=max(300, min(900, 12 * result.cluster.gpus)))
    figure.update_xaxes(title="time, h")
    figure.update_yaxes(title="GPU")
    return figure


def _neighbours(gpus: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as first and last.

    >>> _neighbours([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    ranges: list[tuple[int, int]] = []
    for gpu in gpus:
        if ranges and ranges[-1][1] == gpu - 1:
            ranges[-1] = (ranges[-1][0], gpu)
        else:
            ranges.append((gpu, gpu))
    return ranges
