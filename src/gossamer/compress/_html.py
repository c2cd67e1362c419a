"""The HTML report of an evaluation: one self-contained file whose numbers are those of the JSON inside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gossamer.core.report import Report

SUMMARY_COLUMNS = ("what", "dense", "compressed", "ratio")


def write_report(result: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write what :func:`evaluate` returned as a page; returns its absolute path."""
    settings = result["settings"]
    sparsity = settings["pattern"] or f"{settings['sparsity']:.0%}"
    report = Report(
        f"{result['model']}, {sparsity} pruned by {settings['score']}", "compressed and dense, side by side"
    )
    report.add_highlights(_highlights(result))
    report.add_heading("Dense and compressed")
    header = ("", "dense", "compressed", "dense / compressed (speed: compressed / dense)")
    report.add_table(header, [tuple(row[key] for key in SUMMARY_COLUMNS) for row in result["summary"]])
    report.add_heading("Decode speed")
    report.add_figure(_speed_figure(result), _speed_caption(result))
    report.add_heading("Layers")
    report.add_figure(_layer_figure(result, "density", "share of weights kept"))
    report.add_figure(_layer_figure(result, "relative_output_error", "relative output error on calibration text"))
    report.add_figure(_layer_figure(result, "bytes", "stored bytes"))
    report.add_heading("Sample text")
    for sample in result["samples"]:
        report.add_text(sample["prompt"])
        report.add_columns({"dense": sample["dense"], "compressed": sample["compressed"]})
    report.add_heading("How it was made and measured")
    facts = {**settings, **result["text"], **result["protocol"], **result["hardware"]}
    report.add_table(("setting", "value"), [(key, str(value)) for key, value in facts.items()])
    report.add_json(result)
    return report.write(path)


def _highlights(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = {row["what"].partition(",")[0]: row for row in reversed(result["summary"])}
    speed = rows["decode tokens/s"]
    return [
        ("size on disk", f"{1 / rows['weights on disk']['ratio']:.0%}", "of dense"),
        ("decode speed", f"{speed['ratio']:.2f}×", f"{speed['compressed']:.1f} tokens/s, one thread"),
        ("perplexity", f"{rows['perplexity']['compressed']:.2f}", f"dense {rows['perplexity']['dense']:.2f}"),
        ("same next token", f"{result['quality']['top1_agreement']:.0%}", "of the time"),
    ]


def _speed_figure(result: dict[str, Any]) -> Any:
    from plotly import graph_objects

    bars = []
    for threads, speed in result["speed"].items():
        named = {
            **{f"dense, {name}": value for name, value in speed["dense"].items()},
            "compressed": speed["compressed"],
        }
        bars.append(graph_objects.Bar(name=f"{threads} threads", x=list(named), y=list(named.values())))
    figure = graph_objects.Figure(bars)
    figure.update_layout(yaxis_title="tokens per second", barmode="group")
    return figure


def _speed_caption(result: dict[str, Any]) -> str:
    profile = result["speed"]["1"]["profile"]
    parts = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in profile.items())
    return f"A step of the compressed model on one thread: {parts}."


def _layer_figure(result: dict[str, Any], key: str, title: str) -> Any:
    from plotly import graph_objects

    kinds: dict[str, list[float]] = {}
    for layer in result["layers"]:
        kinds.setdefault(_kind(layer["name"]), []).append(layer[key])
    figure = graph_objects.Figure([graph_objects.Scatter(name=kind, y=values) for kind, values in kinds.items()])
    figure.update_layout(xaxis_title="block", yaxis_title=title)
    return figure


def _kind(name: str) -> str:
    """A layer's name without the path to its block: ``model.layers.3.mlp.up_proj`` is ``mlp.up_proj``."""
    parts = name.split(".")
    last_number = max((place for place, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last_number + 1 :])
