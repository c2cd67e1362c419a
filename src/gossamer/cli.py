"""The command ``gossamer``: one verb a job, or ``gossamer ROOM VERB``.

Verbs live in the ``cli.py`` of their rooms and are loaded when they are called, so that ``gossamer --help`` is quick
and works where only the base dependencies are installed. What goes wrong for a reason that the user can mend is told
in one line, with exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import typer

from gossamer import __version__


@dataclass(frozen=True)
class _Verb:
    """Where a verb or room lives: the module whose Typer ``app`` has a command or a group of verbs of that name."""

    module: str
    help: str


_VERBS = {
    "compress": _Verb("gossamer.compress.cli", "Prune a language model and write it in compressed formats."),
    "evaluate": _Verb("gossamer.compress.cli", "Compare a compressed model with the dense one; write a report."),
    "generate": _Verb("gossamer.compress.cli", "Continue a prompt with a compressed or dense model."),
    "finetune": _Verb("gossamer.compress.cli", "Fine-tune a model on a pruned base that stays compressed."),
    "serve": _Verb("gossamer.compress.cli", "Serve a model to programs that speak OpenAI's completions."),
    "inspect": _Verb("gossamer.compress.cli", "Show every layer's format, density and bytes."),
    "search": _Verb("gossamer.compress.cli", "Find the pruning metric or the layer allocation that suits a model."),
    "weights": _Verb("gossamer.weights.cli", "Pack a safetensors checkpoint into fewer bytes, bit for bit, and back."),
    "sparse": _Verb("gossamer.sparse.cli", "Plan the products of a sparse matrix; write a report."),
    "cluster": _Verb("gossamer.cluster.cli", "Replay job traces under schedulers; load, traces, energy."),
    "apsp": _Verb("gossamer.graphs.cli", "Distances between all vertices of a graph, into a .npy file."),
    "train": _Verb("gossamer.train.cli", "Compare preconditioners and optimizers on a task; write a report."),
    "bench": _Verb("gossamer.core.cli", "Measure claims again and write their records."),
    "claims": _Verb("gossamer.core.cli", "Show every claim beside its bar and its records."),
    "systems": _Verb("gossamer.core.cli", "Show the published systems: what works here, and where."),
}

_RESUMED = ("compress", "finetune", "search")
"""Verbs that keep what is finished when they are interrupted."""

_EXTRAS = {
    "torch": "llm",
    "transformers": "llm",
    "tokenizers": "llm",
    "accelerate": "llm",
    "gguf": "llm",
    "scipy": "sparse",
    "pymetis": "graphs",
    "plotly": "report",
    "joblib": "cluster",
    "cuda": "gpu",
    "triton": "gpu",
}

app = typer.Typer(
    help="Efficient AI computing: store, compute and send only what the data need.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing Rich would double the time of --help
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if version:
        typer.echo(f"gossamer {__version__}")
        raise typer.Exit()


def _mount(name: str, verb: _Verb) -> None:
    def run(context: typer.Context) -> None:
        parent = context.parent
        debug = parent is not None and parent.params["debug"]
        _guarded(lambda: _call(verb, [name, *context.args]), name, debug)

    forward_everything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=verb.help, add_help_option=False, context_settings=forward_everything)(run)


def _call(verb: _Verb, arguments: list[str]) -> None:
    room = typer.main.get_command(import_module(verb.module).app)
    code = room.main(args=arguments, prog_name="gossamer", standalone_mode=False)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


def _guarded(action: Callable[[], None], verb: str, debug: bool) -> None:
    """Run ``action``; what a user can mend ends in one line and exit code 2, unless ``debug``."""
    try:
        action()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        again = "; the same command goes on from there" if verb in _RESUMED else ""
        typer.echo(f"gossamer {verb}: interrupted{again}", err=True)
        raise typer.Exit(130) from None
    except (ValueError, TypeError, OSError, MemoryError, ModuleNotFoundError) as error:
        if debug:
            raise
        typer.echo(f"gossamer {verb}: {_one_line(error)}", err=True)
        raise typer.Exit(2) from None


def _one_line(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = _EXTRAS.get(package)
        remedy = f"pip install 'gossamer[{extra}]'" if extra else f"pip install {package}"
        return f"needs {package}, which is not installed: {remedy}"
    if isinstance(error, MemoryError):
        return "not enough memory; close other programs or take a smaller input"
    return " ".join(str(error).split()) or type(error).__name__


for _name, _verb in _VERBS.items():
    _mount(_name, _verb)


def main() -> None:
    """The entry point of the command ``gossamer``."""
    app(prog_name="gossamer")


if __name__ == "__main__":
    main()
