"""The verbs ``gossamer compress``, ``evaluate``, ``generate``, ``serve`` and ``inspect``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gossamer.core.report import shown_number

app = typer.Typer(no_args_is_help=True)
_err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="A text file instead of the default text.")]


@app.command("compress")
def compress_command(
    model: Annotated[str, typer.Argument(help="A local folder, a GGUF file, a cached hub id, or smollm2-135m.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write; it must not exist.")],
    sparsity: Annotated[float, typer.Option(help="Share of zeros in every row, in [0, 1).")] = 0.5,
    pattern: Annotated[str | None, typer.Option(help="N:M instead of a sparsity, like 2:4.")] = None,
    score: Annotated[str, typer.Option(help="magnitude, wanda, ria or sparsegpt.")] = "wanda",
    format: Annotated[str, typer.Option(help="auto, bitmap, lossless, nm (needs --pattern) or dense.")] = "auto",
    propagate: Annotated[
        str, typer.Option(help="Calibrate on outputs of compressed (sequential) or original (dense) blocks.")
    ] = "sequential",
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 16,
    seqlen: Annotated[int, typer.Option(help="Tokens per calibration window.")] = 512,
    dtype: Annotated[str, typer.Option(help="Of the stored weights: bfloat16, float16 or float32.")] = "bfloat16",
    text: TextFile = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw an unfinished run away instead of resuming it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prune a language model, encode it into compressed formats and write a model folder.

    Interrupt it whenever you like: the same command goes on from the last finished block.
    """
    from gossamer.compress import Settings, compress, read_about, read_text

    settings = Settings(sparsity, pattern, score, format, propagate, samples, seqlen, dtype)
    with _progress() as progress:
        folder = compress(model, out, settings, read_text(text) if text else None, progress, fresh)
    about = read_about(folder)
    if as_json:
        print(json.dumps({"out": str(folder), **about}))
    else:
        _show_layers(about, by_format=True)
        Console().print(f"wrote {folder}; next: gossamer evaluate {out}")


@app.command("evaluate")
def evaluate_command(
    folder: Annotated[Path, typer.Argument(help="A folder that gossamer compress wrote.")],
    text: TextFile = None,
    seqlen: Annotated[int, typer.Option(help="Tokens per evaluation window.")] = 1024,
    windows: Annotated[int, typer.Option(help="Evaluation windows.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens to decode when timing.")] = 64,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report here.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a compressed model with the dense one: perplexity, agreement, decode speed, memory, sample text."""
    from gossamer.compress import evaluate, read_text, write_report

    with _progress() as progress:
        result = evaluate(folder, read_text(text) if text else None, seqlen, windows, tokens, progress)
    if report is not None:
        write_report(result, report)
    if as_json:
        print(json.dumps(result))
        return
    table = Table("", "dense", "compressed", "ratio")
    for row in result["summary"]:
        table.add_row(row["what"], *(_cell(row[key]) for key in ("dense", "compressed", "ratio")))
    Console().print(table)
    if report is not None:
        Console().print(f"report: {report.resolve()}")


@app.command("generate")
def generate_command(
    folder: Annotated[str, typer.Argument(help="A compressed folder, or any model that compress takes.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability mass.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a prompt."""
    from gossamer.compress import generate, load_any

    loaded = load_any(folder)
    shown = None if as_json else lambda piece: print(piece, end="", flush=True)
    result = generate(
        loaded.model, loaded.tokenizer, prompt, max_new_tokens=tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, on_text=shown,
    )  # fmt: skip
    if as_json:
        print(
            json.dumps(
                {"text": result.text, "tokens": len(result.token_ids), "tokens_per_second": result.tokens_per_second}
            )
        )
    else:
        print()
        _err.print(f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tokens/s")


@app.command("serve")
def serve_command(
    folder: Annotated[str, typer.Argument(help="A compressed folder, or any model that compress takes.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    context: Annotated[int, typer.Option(min=1, help="Positions to hold.")] = 2048,
    as_json: Json = False,
) -> None:
    """Serve a model to programs that speak OpenAI's completions, one request at a time, until interrupted."""
    from gossamer.compress import run_server

    def ready(address: str) -> None:
        print(json.dumps({"address": address}) if as_json else f"listening on {address}", flush=True)

    run_server(folder, host, port, context, ready)


@app.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(help="A compressed folder.")], as_json: Json = False
) -> None:
    """Show every layer's format, density and bytes, and check the file's checksum."""
    from gossamer.compress import check_folder, read_about

    about = read_about(folder)
    check_folder(folder)
    if as_json:
        print(json.dumps(about))
    else:
        _show_layers(about, by_format=False)


def _show_layers(about: dict[str, object], by_format: bool) -> None:
    from gossamer.compress import summarise_layers

    table = Table(
        "format" if by_format else "layer", "layers" if by_format else "format", "density", "MB", "of dense", "error"
    )
    for row in summarise_layers(about, by_format):
        table.add_row(*row)
    Console().print(table)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callable ``progress(what, done, total)`` that draws one bar per thing."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=_err) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else shown_number(value)
