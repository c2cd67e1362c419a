"""A comparison of optimizers as one page: a table, and losses by steps and by seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.core.report import Cell, Report
from gossamer.train.precondition._compare import Run
from gossamer.train.precondition._tasks import Task

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HEADER = (
    "method", "learning rate", "steps to target", "seconds to target", "held-out loss", "accuracy, %", "ms a step",
    "state, MB",
)  # fmt: skip


def table(runs: Sequence[Run]) -> list[list[Cell]]:
    """A row per run, as :data:`HEADER` says."""
    return [
        [run.method, run.rate, run.steps_to_target, run.seconds_to_target, run.loss, 100 * run.accuracy,
         1e3 * run.seconds / run.steps, run.state_bytes / 1e6]
        for run in runs
    ]  # fmt: skip


def write_comparison(runs: Sequence[Run], task: Task, path: str | os.PathLike[str]) -> Path:
    """Write the page; returns its absolute path.

    Raises:
        ValueError: there is no run.
        ModuleNotFoundError: Plotly is not installed.
    """
    if not runs:
        raise ValueError("runs must hold at least one run")
    report = Report("Preconditioners compared", f"{task.text}; target: a held-out loss of {task.target:g}")
    first = runs[0]
    least = min(runs, key=lambda run: run.seconds_to_target or float("inf"))
    report.add_highlights(
        [
            ("Fewest steps", first.method, f"{first.steps_to_target or 'not reached'} to the target"),
            ("Least time", least.method, f"{least.seconds_to_target or float('nan'):.2f} s to the target"),
            ("Least state", min(runs, key=lambda run: run.state_bytes).method, "bytes kept between steps"),
        ]
    )
    report.add_heading("Methods")
    report.add_table(
        HEADER, table(runs), "The best of each method's learning rates; all had as many to try, Newton fewer."
    )
    report.add_heading("By steps")
    report.add_figure(_curves(runs, 0, "step"), "Held-out loss.")
    report.add_heading("By seconds")
    report.add_figure(_curves(runs, 1, "seconds of training"), "Held-out loss; evaluation is not counted.")
    report.add_heading("Where the time goes")
    phases = sorted({phase for run in runs for phase in run.phases})
    report.add_table(
        ["method", *phases],
        [
            [run.method, *(1e3 * run.phases.get(phase, 0.0) / run.steps for phase in phases)]
            for run in runs
            if run.phases
        ],
        "Milliseconds a step of the preconditioner's phases; curvature and inverse hold their exchange.",
    )
    report.add_json({"task": task.name, "target": task.target, "runs": [run.as_json() for run in runs]})
    return report.write(path)


def _curves(runs: Sequence[Run], axis: int, title: str) -> Figure:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for run in runs:
        figure.add_trace(
            Scatter(x=[point[axis] for point in run.curve], y=[point[2] for point in run.curve], name=run.method)
        )
    figure.update_layout(xaxis_title=title, yaxis_title="held-out loss", yaxis_type="log")
    return figure
