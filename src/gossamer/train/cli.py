"""The verbs ``gossamer train ...``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from gossamer.core.report import shown_number

if TYPE_CHECKING:
    from gossamer.train.precondition._compare import Run

app = typer.Typer(no_args_is_help=True)
_room = typer.Typer(no_args_is_help=True)
app.add_typer(_room, name="train", help="Training: optimizers compared. Every verb has --json.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def _rooms() -> None:
    """Hold the room's verbs."""


@_room.callback()
def _train() -> None:
    """Training."""


@_room.command("compare")
def compare_command(
    task: Annotated[str, typer.Argument(help="digits or text.")],
    method: Annotated[list[str] | None, typer.Option(help="A method; several times to choose; all without it.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of every trial.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the models and batches.")] = 0,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report here.")] = None,
    as_json: Json = False,
) -> None:
    """Compare preconditioners, SGD and Adam on a task, each at the best of its learning rates."""
    from gossamer.train.precondition._compare import compare
    from gossamer.train.precondition._page import HEADER, table, write_comparison
    from gossamer.train.precondition._tasks import TASKS

    progress = Console(stderr=True)

    def told(run: Run) -> None:
        progress.print(
            f"{run.method} at {run.rate:g}: loss {run.loss:.4f} after {run.steps} steps, {run.seconds:.1f} s"
            + (f", target at step {run.steps_to_target}" if run.steps_to_target else ""),
            highlight=False,
        )

    runs = compare(task, method or (), steps, seed, told)
    if html is not None:
        progress.print(f"report: {write_comparison(runs, TASKS[task](), html)}", highlight=False)
    if as_json:
        print(json.dumps({"task": task, "runs": [run.as_json() for run in runs]}))
        return
    shown = Table(box=None, pad_edge=False)
    for number, column in enumerate(HEADER):
        shown.add_column(column, justify="right" if number else "left")
    for row in table(runs):
        shown.add_row(*("" if cell is None else cell if isinstance(cell, str) else shown_number(cell) for cell in row))
    Console().print(shown)
