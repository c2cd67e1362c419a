"""The verbs ``gossamer sparse ...``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gossamer.core.report import shown_number

app = typer.Typer(no_args_is_help=True)
_room = typer.Typer(
    no_args_is_help=True, help="Sparse matrices: how they look, and which way their products go. Every verb has --json."
)
app.add_typer(_room, name="sparse")


@_room.callback()
def _sparse() -> None:
    """Sparse matrices: how they look, and which way their products go. Every verb has --json."""


@_room.command("plan")
def plan_command(
    matrix: Annotated[Path, typer.Argument(help="A .mtx, .mtx.gz, .graph, .csv, .npz or .safetensors file.")],
    n: Annotated[int, typer.Option("--n", help="Columns of the dense operand.")] = 128,
    samples: Annotated[int, typer.Option(help="Rounds of timing, at least 3.")] = 9,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Time every way of multiplying a matrix here, and show the plan, the peers, their ratios, and the GPU partition."""
    from gossamer.sparse import examine, read_matrix, write_report

    read = read_matrix(matrix)
    result = examine(read, n, samples)
    if report is not None:
        write_report(result, read, report, matrix.name)
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    counts = result["statistics"]
    console.print(
        f"{matrix.name}: {result['rows']:,} x {result['columns']:,}, {result['nnz']:,} entries, "
        f"{counts['degree_mean']:.1f} a row (at most {counts['degree_largest']:,}), "
        f"{counts['nnz_per_vector8']:.2f} an 8x1 vector",
        highlight=False,
    )
    console.print(f"way: {result['plan']['backend']} ({result['plan']['why']})", highlight=False)
    table = Table("way", "ms", "ratio")
    for peer in result["peers"]:
        table.add_row(peer["way"], shown_number(1e3 * peer["seconds"]), f"{peer['ratio']:.2f}x")
    console.print(table)
    table = Table("order", "entries per 8x1 vector", "in vectors of 2 or more")
    for order in result["reordering"]:
        share = f"{100 * order['share_in_vectors_of_2']:.0f} %"
        table.add_row(order["method"], f"{order['nnz_per_vector8']:.2f}", share)
    console.print(table)
    table = Table("GPU plan", "theta", "on tensor cores", "long parts", "short parts")
    for plan in result["hybrid"]:
        cells = (plan[name] for name in ("theta", "nnz_tensor", "nnz_long", "nnz_short"))
        table.add_row(plan["dtype"], *map(shown_number, cells))
    console.print(table)
    if report is not None:
        console.print(f"report: {report.resolve()}")
