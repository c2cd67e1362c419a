"""The verbs ``gossamer compress``, ``evaluate``, ``generate``, ``serve`` and ``inspect``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gossamer.compress._cli_search import app as search_app
from gossamer.core.report import shown_number

if TYPE_CHECKING:
    from gossamer.compress._settings import Settings

app = typer.Typer(no_args_is_help=True)
app.add_typer(search_app, name="search")
_err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="A text file instead of the default text.")]


@app.command("compress")
def compress_command(
    out: Annotated[Path, typer.Option("--out", help="The folder to write; it must not exist.")],
    model: Annotated[
        str | None, typer.Argument(help="A local folder, a GGUF file, a cached hub id, or smollm2-135m.")
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Take model, settings and text from this TOML file or compressed folder instead."),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Choose score, allocation and format within a budget.")] = False,
    target_bytes: Annotated[int | None, typer.Option(help="With --auto: bytes of all weights at most.")] = None,
    max_ppl_increase: Annotated[
        float | None, typer.Option(help="With --auto: largest increase of perplexity, like 0.1 for a tenth.")
    ] = None,
    sparsity: Annotated[float, typer.Option(help="Share of zeros in every row, in [0, 1).")] = 0.5,
    pattern: Annotated[str | None, typer.Option(help="N:M instead of a sparsity, like 2:4.")] = None,
    score: Annotated[
        str, typer.Option(help="magnitude, wanda, ria, sparsegpt, or a formula that was found.")
    ] = "wanda",
    allocation: Annotated[
        str | None, typer.Option(help="owl, or search.json of a search for an allocation: take the best found.")
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Correct what the score keeps as SparseGPT does.")] = False,
    format: Annotated[
        str, typer.Option(help="auto, bitmap, lossless, dense, nm (needs --pattern) or stb (needs N:8).")
    ] = "auto",
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
    from gossamer.compress import Recipe, Settings, compress, found_allocation, read_about, read_recipe, read_text

    if (model is None) == (recipe is None):
        raise ValueError("give a model, or --recipe FILE, and not both")

    if auto:
        _auto(
            model,
            out,
            target_bytes,
            max_ppl_increase,
            Settings(samples=samples, seqlen=seqlen, dtype=dtype),
            text,
            as_json,
        )
        return
    if recipe is not None:
        chosen = read_recipe(recipe)
    else:
        assert model is not None
        per_block = allocation if allocation in (None, "owl") else found_allocation(allocation)
        settings = Settings(sparsity, pattern, score, format, propagate, samples, seqlen, dtype, per_block, update)
        chosen = Recipe(model, settings, text)
    own = read_text(chosen.text) if chosen.text else None
    with _progress() as progress:
        folder = compress(chosen.model, out, chosen.settings, own, progress, fresh)
    about = read_about(folder)
    if as_json:
        print(json.dumps({"out": str(folder), **about}))
    else:
        _show_layers(about, by_format=True)
        Console().print(f"wrote {folder}; next: gossamer evaluate {out}", soft_wrap=True)


def _auto(
    model: str | None, out: Path, target_bytes: int | None, increase: float | None, base: Settings, text: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    from gossamer.compress import auto_compress, read_text

    if model is None:
        raise ValueError("--auto needs a model")
    with _progress() as progress:
        own = read_text(text) if text else None
        result = auto_compress(model, out, target_bytes, increase, base, own, progress=progress)
    if as_json:
        print(json.dumps(result))
        return
    table = Table("", "MB", "perplexity", "linear layers, ms a token", "on the front")
    for point in result["points"]:
        milliseconds = "" if point["seconds"] is None else f"{1e3 * point['seconds']:.2f}"
        row = (point["name"], f"{point['bytes'] / 1e6:.1f}", f"{point['perplexity']:.2f}", milliseconds)
        table.add_row(*row, "yes" if point["front"] else "")
    Console().print(table)
    Console().print(f"chosen: {result['chosen']['name']}; wrote {out}; front: {out}.front.html")
    if result["better"]:
        Console().print(f"no larger and no worse, but not made here: {', '.join(result['better'])}")


@app.command("evaluate")
def evaluate_command(
    folder: Annotated[Path, typer.Argument(help="A folder that gossamer compress wrote.")],
    text: TextFile = None,
    seqlen: Annotated[int, typer.Option(help="Tokens per evaluation window.")] = 1024,
    windows: Annotated[int, typer.Option(help="Evaluation windows.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens to decode when timing.")] = 64,
    choices: Annotated[list[Path] | None, typer.Option(help="Multiple-choice questions, JSON; repeatable.")] = None,
    questions: Annotated[int, typer.Option(help="Questions of each file at most.")] = 200,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report here.")] = None,
    as_json: Json = False,
) -> None:
    """Compare a compressed model with the dense one: perplexity, agreement, decode speed, memory, sample text."""
    from gossamer.compress import evaluate, read_choices, read_text, write_report

    sets = {path.name.partition(".")[0]: read_choices(path, questions) for path in choices or []}
    with _progress() as progress:
        result = evaluate(folder, read_text(text) if text else None, seqlen, windows, tokens, sets, progress)
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
        Console().print(f"report: {report.resolve()}", soft_wrap=True)


@app.command("generate")
def generate_command(
    folder: Annotated[str, typer.Argument(help="A compressed folder, or any model that compress takes.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to add at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample within this probability mass.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU; by default what is fastest.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt."""
    if not prompt:
        raise ValueError("--prompt must not be empty: there is nothing to continue")
    from gossamer.compress import generate, load_any

    loaded = load_any(folder)
    shown = None if as_json else lambda piece: print(piece, end="", flush=True)
    result = generate(
        loaded.model, loaded.tokenizer, prompt, max_new_tokens=tokens, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, on_text=shown, threads=threads,
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


@app.command("finetune")
def finetune_command(
    model: Annotated[str, typer.Argument(help="A local folder, a GGUF file, a cached hub id, or smollm2-135m.")],
    data: Annotated[Path, typer.Option("--data", help="Examples: JSON Lines with question/answer, or the like.")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write: adapters as PEFT has them, and the base.")],
    test: Annotated[Path | None, typer.Option("--test", help="Examples whose answers are scored.")] = None,
    sparsity: Annotated[float, typer.Option(help="Share of zeros in the base; 0 is plain LoRA.")] = 0.5,
    selection: Annotated[str, typer.Option(help="row, layer or 2:4.")] = "row",
    score: Annotated[str, typer.Option(help="magnitude, or wanda, which looks at the examples.")] = "magnitude",
    rank: Annotated[int, typer.Option(help="Of the task adapter.")] = 16,
    residual_rank: Annotated[int, typer.Option(help="Of the repair; 0 for none.")] = 16,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 200,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate of the task adapter.")] = 2e-4,
    limit: Annotated[int | None, typer.Option(help="Read so many examples at most.")] = None,
    test_limit: Annotated[int | None, typer.Option(help="Score so many examples at most.")] = 200,
    seed: Annotated[int, typer.Option(help="Of adapters, order and dropout.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Fine-tune a model whose base is pruned, stays compressed and never changes.

    Interrupt it whenever you like: the same command goes on from the last checkpoint.
    """
    from gossamer.compress import SALRConfig, TrainingSettings, finetune, load_dense, read_examples

    config = SALRConfig(sparsity, selection, rank, 2.0 * rank, residual_rank=residual_rank, score=score)
    dense = load_dense(model)
    dense.model.to(device)
    scored = read_examples(test, test_limit) if test else []
    settings = TrainingSettings(steps=steps, batch=batch, lr=lr, seed=seed)
    with _progress() as progress:
        result = finetune(dense, out, read_examples(data, limit), scored, config, settings, progress)
    if as_json:
        print(json.dumps(result))
        return
    table = Table("", "value")
    for name in ("nll_before", "nll_after", "base_bytes", "adapter_bytes", "dense_bytes"):
        table.add_row(name.replace("_", " "), _cell(result[name]))
    Console().print(table)


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
