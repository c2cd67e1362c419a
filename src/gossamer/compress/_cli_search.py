"""The verbs ``gossamer search metric`` and ``gossamer search allocation``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from gossamer.compress._models import DenseModel
    from gossamer.compress._search_windows import SearchWindows, WindowSizes

app = typer.Typer(
    no_args_is_help=True,
    help="Search for the pruning metric or the layer allocation of one model. Every verb takes --json.",
)
_err = Console(stderr=True)

Model = Annotated[str, typer.Argument(help="A local folder, a GGUF file, a cached hub id, or smollm2-135m.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for checkpoints, search.json and report.html.")]
Population = Annotated[int, typer.Option(help="Candidates per generation.")]
Generations = Annotated[int, typer.Option(help="Generations at most.")]
Evaluations = Annotated[int, typer.Option(help="Perplexities at most.")]
Minutes = Annotated[float | None, typer.Option(help="Begin no generation after so many minutes.")]
Seed = Annotated[int, typer.Option(help="Of the search: the same seed gives the same search.")]
Correct = Annotated[bool, typer.Option("--correct", help="Also report the best with SparseGPT's correction.")]
Control = Annotated[bool, typer.Option(help="Also draw as many candidates at random.")]
Repeats = Annotated[int, typer.Option(help="Searches, each with the next seed, on the same statistics.")]
Samples = Annotated[int, typer.Option(help="Calibration windows.")]
Seqlen = Annotated[int, typer.Option(help="Tokens per window; the report's have twice as many.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="Calibrate and report on this instead of the default.")]
SearchText = Annotated[list[Path] | None, typer.Option("--search-text", help="Judge candidates on this; repeatable.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command("metric")
def metric_command(
    model: Model,
    out: Out,
    sparsity: Annotated[float, typer.Option(help="Share of zeros in every row.")] = 0.5,
    pattern: Annotated[str | None, typer.Option(help="N:M instead of a sparsity, like 2:4.")] = None,
    terminals: Annotated[str | None, typer.Option(help="What formulas may use, like W,G,X; all by default.")] = None,
    ablations: Annotated[bool, typer.Option("--ablations", help="Also search with each part of it missing.")] = False,
    population: Population = 40,
    generations: Generations = 30,
    evaluations: Evaluations = 120,
    minutes: Minutes = None,
    seed: Seed = 0,
    control: Control = True,
    correct: Correct = False,
    repeats: Repeats = 1,
    samples: Samples = 16,
    seqlen: Seqlen = 512,
    text: TextFile = None,
    search_text: SearchText = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find the formula by which to prune this model, by genetic programming.

    Interrupt it whenever you like: the same command goes on from the last generation.
    """
    from gossamer.compress import EvolutionSettings, MetricSpace, Settings, WindowSizes, search_metric

    settings = EvolutionSettings(
        population=population, generations=generations, evaluations=evaluations, seed=seed,
        seconds=float("inf") if minutes is None else 60 * minutes,
    )  # fmt: skip
    space = MetricSpace() if terminals is None else MetricSpace(tuple(terminals.replace(" ", "").split(",")))
    dense, windows = _prepare(model, device, text, search_text, WindowSizes(samples, seqlen, report_seqlen=2 * seqlen))
    result = search_metric(
        dense, out, sparsity, Settings(pattern=pattern).n_of_m, settings, space, windows, control, ablations, correct,
        repeats, _progress, _log(as_json),
    )  # fmt: skip
    _show(result, out, as_json)


@app.command("allocation")
def allocation_command(
    model: Model,
    out: Out,
    sparsity: Annotated[float, typer.Option(help="Share of zeros in the whole model.")] = 0.6,
    metric: Annotated[str, typer.Option(help="What ranks the weights: a name like wanda, or an expression.")] = "wanda",
    by: Annotated[str, typer.Option(help="function, levels, or both separated by a comma.")] = "function,levels",
    population: Population = 20,
    generations: Generations = 40,
    evaluations: Evaluations = 75,
    minutes: Minutes = None,
    seed: Seed = 0,
    control: Control = True,
    correct: Correct = False,
    repeats: Repeats = 1,
    samples: Samples = 16,
    seqlen: Seqlen = 512,
    text: TextFile = None,
    search_text: SearchText = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Find how much to prune in each block of this model: by allocation functions, or the densities themselves.

    Interrupt it whenever you like: the same command goes on from the last generation.
    """
    from gossamer.compress import EvolutionSettings, WindowSizes, search_allocation

    settings = EvolutionSettings(
        population=population, generations=generations, evaluations=evaluations, seed=seed,
        seconds=float("inf") if minutes is None else 60 * minutes,
    )  # fmt: skip
    dense, windows = _prepare(model, device, text, search_text, WindowSizes(samples, seqlen, report_seqlen=2 * seqlen))
    kinds = by.replace(" ", "").split(",")
    result = search_allocation(
        dense, out, sparsity, metric, kinds, settings, windows, control, correct, repeats, _progress, _log(as_json)
    )
    _show(result, out, as_json)


def _prepare(
    model: str, device: str, text: Path | None, search_texts: list[Path] | None, sizes: WindowSizes
) -> tuple[DenseModel, SearchWindows]:
    from gossamer.compress import load_dense, read_text, search_windows

    dense = load_dense(model)
    dense.model.to(device)
    others = [read_text(path) for path in search_texts] if search_texts else None
    return dense, search_windows(dense.tokenizer, sizes, read_text(text) if text else None, others)


def _progress(what: str, done: int, total: int) -> None:
    if done == total:
        _err.print(f"{what}: done")


def _log(quiet: bool) -> Any:
    return (lambda line: None) if quiet else (lambda line: _err.print(line, highlight=False, markup=False))


def _show(result: dict[str, Any], out: Path, as_json: bool) -> None:
    from gossamer.compress import write_search_report

    report = write_search_report(result, out / "report.html")
    if as_json:
        print(json.dumps(result))
        return
    table = Table("", "searched on", "never seen", "formula")
    for row in sorted(result["candidates"], key=lambda row: row["report"]):
        table.add_row(row["name"], f"{row['search']:.2f}", f"{row['report']:.2f}", row["formula"])
    Console().print(table)
    Console().print(f"dense {result['dense']:.2f}; report: {report}")
