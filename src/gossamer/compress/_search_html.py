"""The HTML report of a search: what was found, beside what it must beat, and how the search went."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from gossamer.compress._correlation import spearman
from gossamer.compress._expression import Expr
from gossamer.core.report import Report

_MIN_FEATURE_SHARE = 0.05


def write_search_report(result: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write what :func:`search_metric` or :func:`search_allocation` returned as a page; returns its absolute path."""
    kind = result["kind"]
    sparsity = f"{result['sparsity']:.0%}" if not result.get("pattern") else ":".join(map(str, result["pattern"]))
    report = Report(f"Search for a pruning {kind}: {Path(result['model']).name} at {sparsity}", _texts_line(result))
    rival = "wanda" if kind == "metric" else "uniform"
    report.add_highlights(_highlights(result, rival))
    report.add_heading("Best found")
    best = _best(result)
    report.add_columns({"expression": best["formula"], **({"LaTeX": best["latex"]} if "latex" in best else {})})
    report.add_heading("Perplexity beside the alternatives")
    report.add_table(
        ("", "text searched on", "text never searched on", f"ratio to {rival}", "formula"), _rows(result, rival)
    )
    report.add_figure(_bars(result), "perplexity on the text that no search has seen")
    report.add_heading("How the search went")
    report.add_figure(_curves(result), "best score so far over the number of scored candidates")
    for name, run in result["runs"].items():
        report.add_text(f"{name}: {_run_line(run)}")
    if kind == "metric":
        report.add_heading("What good metrics have in common")
        report.add_figure(
            _frequencies(result), "share of the best tenth, and of all scored metrics, that contain a name"
        )
        report.add_table(
            ("feature", "rank correlation with perplexity"), principles(result["runs"]["search"]["judged"]),
            "negative: metrics with more of it are better",
        )  # fmt: skip
    else:
        report.add_heading("Sparsity per block")
        report.add_figure(_sparsities(result))
    report.add_json(result)
    return report.write(path)


def principles(judged: list[list[Any]]) -> list[tuple[str, float]]:
    """Rank correlation of features of metrics with their scores, strongest first.

    judged: ``[expression, screen, score]`` each; those without a score are left out, and features that nearly all or
    nearly no metric has.

    >>> principles([["W", 0.0, 9.0], ["mul(W, X)", 0.0, 5.0]] * 3)[0]
    ('uses X', -1.0)
    """
    scored = [(Expr.from_string(text), score) for text, _, score in judged if score is not None]
    features = {"size": [float(tree.size) for tree, _ in scored], "depth": [float(tree.depth) for tree, _ in scored]}
    names = [{node.op for node in tree.nodes() if node.number is None} for tree, _ in scored]
    for name in sorted(set().union(*names)):
        features[f"uses {name}"] = [float(name in own) for own in names]
    found = []
    for feature, values in features.items():
        rare = min(values.count(0.0), len(values) - values.count(0.0)) < _MIN_FEATURE_SHARE * len(values)
        correlation = spearman(values, [score for _, score in scored])
        if correlation is not None and not (feature.startswith("uses") and rare):
            found.append((feature, correlation))
    return sorted(found, key=lambda pair: (-abs(pair[1]), not pair[0].startswith("uses"), pair[0]))


def _texts_line(result: dict[str, Any]) -> str:
    texts = [result["texts"].get(part, "windows given") for part in ("calibration", "search", "report")]
    return "statistics from {}, searched on {}, reported on {}".format(*texts)


def _best(result: dict[str, Any]) -> dict[str, Any]:
    """The searched candidate that is best on the text searched on: the other text must not choose."""
    found = [row for row in result["candidates"] if row.get("found")]
    best: dict[str, Any] = min(found, key=lambda row: row["search"])
    return best


def _highlights(result: dict[str, Any], rival: str) -> list[tuple[str, str, str]]:
    best, other = _best(result), next(row for row in result["candidates"] if row["name"] == rival)
    return [
        ("perplexity", f"{best['report']:.2f}", f"dense {result['dense']:.2f}"),
        (f"against {rival}", f"{best['report'] / other['report']:.3f}×", f"{rival} {other['report']:.2f}"),
        ("scored", str(sum(run["history"][-1]["scored"] for run in result["runs"].values())), "candidates in all"),
    ]


def _rows(result: dict[str, Any], rival: str) -> list[tuple[str | float, ...]]:
    base = next(row["report"] for row in result["candidates"] if row["name"] == rival)
    rows = sorted(result["candidates"], key=lambda row: row["report"])
    return [(row["name"], row["search"], row["report"], row["report"] / base, row["formula"]) for row in rows]


def _run_line(run: dict[str, Any]) -> str:
    last = run["history"][-1]
    screens = "screens were not compared"
    if run["correlation"] is not None:
        used = "and were used" if run["screened"] else "and were dropped"
        screens = f"screens correlated with scores by {run['correlation']:.2f} {used}"
    counts = f"{last['generation']} generations, {last['judged']} candidates judged, {last['scored']} scored"
    return f"{counts}; {screens}; {run['stopped']}."


def _bars(result: dict[str, Any]) -> Any:
    from plotly import graph_objects

    rows = sorted(result["candidates"], key=lambda row: row["report"])
    figure = graph_objects.Figure(
        [graph_objects.Bar(x=[row["name"] for row in rows], y=[row["report"] for row in rows])]
    )
    figure.add_hline(y=result["dense"], line_dash="dot", annotation_text="dense")
    figure.update_layout(yaxis_title="perplexity")
    return figure


def _curves(result: dict[str, Any]) -> Any:
    from plotly import graph_objects

    lines = [
        graph_objects.Scatter(
            name=name,
            x=[record["scored"] for record in run["history"]],
            y=[record["best"] for record in run["history"]],
            mode="lines+markers",
        )
        for name, run in result["runs"].items()
    ]
    figure = graph_objects.Figure(lines)
    figure.update_layout(xaxis_title="scored candidates", yaxis_title="perplexity of the short text")
    return figure


def _frequencies(result: dict[str, Any]) -> Any:
    from plotly import graph_objects

    scored = sorted((score, text) for text, _, score in result["runs"]["search"]["judged"] if score is not None)
    groups = {"best tenth": scored[: max(1, len(scored) // 10)], "all": scored}
    names = sorted({node.op for _, text in scored for node in Expr.from_string(text).nodes() if node.number is None})
    bars = []
    for group, members in groups.items():
        counts: Counter[str] = Counter()
        for _, text in members:
            counts.update({node.op for node in Expr.from_string(text).nodes()})
        bars.append(graph_objects.Bar(name=group, x=names, y=[counts[name] / len(members) for name in names]))
    figure = graph_objects.Figure(bars)
    figure.update_layout(barmode="group", yaxis_title="share that contains it")
    return figure


def _sparsities(result: dict[str, Any]) -> Any:
    from plotly import graph_objects

    figure = graph_objects.Figure(
        [graph_objects.Scatter(name=row["name"], y=row["sparsities"]) for row in result["candidates"]]
    )
    figure.update_layout(xaxis_title="block", yaxis_title="sparsity")
    return figure
