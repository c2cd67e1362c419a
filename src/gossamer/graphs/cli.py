"""The verb ``gossamer apsp``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _graphs() -> None:
    """Path problems on sparse graphs."""


@app.command("apsp")
def apsp_command(
    graph: Annotated[Path, typer.Argument(help="A .tntp, .gr, .mtx, .graph, .txt, .csv or .edges file, perhaps .gz.")],
    out: Annotated[Path, typer.Option("--out", help="Write the distances here, as .npy; row i holds those from i.")],
    weight: Annotated[str, typer.Option(help="Of .tntp roads: length or time.")] = "length",
    method: Annotated[str, typer.Option(help="auto, lu, supernodal, dense or dijkstra.")] = "auto",
    semiring: Annotated[str, typer.Option(help="min_plus, max_min or or_and.")] = "min_plus",
    dtype: Annotated[str | None, typer.Option(help="int32, float32 or float64; by default exact.")] = None,
    directed: Annotated[
        bool, typer.Option("--directed", help="Take each line of an edge list as one direction.")
    ] = False,
    threads: Annotated[int, typer.Option(help="Threads to solve with.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute the distances between all vertices of a graph, row by row into a file that may exceed the memory."""
    from gossamer.core.files import atomic_write
    from gossamer.graphs import apsp_plan, read_graph

    if out.suffix != ".npy":
        raise ValueError(f"--out must end with .npy, got {out.name!r}")
    start = time.perf_counter()
    edges = read_graph(graph, weight, directed or None)
    plan = apsp_plan(edges, semiring=semiring, method=method, dtype=dtype)  # type: ignore[arg-type]
    planned = time.perf_counter()
    with atomic_write(out) as temporary:
        plan.solve(out=temporary, threads=threads).flush()
    result = {
        "vertices": plan.n,
        "edges": edges.edges,
        "dtype": str(plan.dtype),
        "bytes": out.stat().st_size,
        "read_and_plan_seconds": planned - start,
        "solve_seconds": time.perf_counter() - planned,
        "out": str(out),
    }
    if as_json:
        print(json.dumps(result))
        return
    console = Console()
    console.print(plan.explain(), highlight=False)
    console.print(f"{out}: {plan.n:,} x {plan.n:,} {plan.dtype} in {result['solve_seconds']:.2f} s", highlight=False)
