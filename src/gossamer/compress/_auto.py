"""``compress --auto``: plan within a budget, make what was chosen, and show the whole front."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.compress._models import load_dense
from gossamer.compress._pipeline import compress
from gossamer.compress._plan import Candidate, Point, better_comparisons, candidates, choose, measure, with_front
from gossamer.compress._search_windows import SearchWindows, WindowSizes, search_windows
from gossamer.compress._settings import Settings
from gossamer.compress._text import Text
from gossamer.compress._workbench import Progress, Workbench
from gossamer.core.files import write_json
from gossamer.core.report import Report


def auto_compress(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    target_bytes: int | None = None,
    max_increase: float | None = None,
    base: Settings | None = None,
    text: Text | None = None,
    windows: SearchWindows | None = None,
    wanted: Callable[[Candidate], bool] = lambda candidate: True,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Find score, allocation and format for a budget, compress ``model`` so, and write ``out``, the front beside it.

    ``OUT.plan.json`` keeps the points that are known, for an interrupted plan; ``OUT.front.html`` shows them.

    Args:
        model, out, text: as for :func:`compress`.
        target_bytes: of all weights. max_increase: of the perplexity, as a share, like 0.1.
        base: what all candidates share, calibration for instance.
        windows: texts of the plan, by default those of a search.
        wanted: which candidates to try.

    Returns:
        ``{"chosen", "better", "points", "dense", "budget"}``; ``better`` names mere comparisons that are no larger and no
        worse than what was chosen.

    Raises:
        ValueError: no limit is given, or nothing keeps them.
    """
    if target_bytes is None and max_increase is None:
        raise ValueError("auto needs a target in bytes, a most increase of perplexity, or both")
    base, out = base or Settings(), Path(os.path.abspath(out))
    dense = load_dense(os.fspath(model))
    windows = windows or search_windows(dense.tokenizer, WindowSizes(base.samples, base.seqlen), text)
    file = out.with_name(out.name + ".plan.json")
    known = _known(file, {"weights": dense.fingerprint, "base": asdict(base), "texts": windows.names})
    bed = Workbench(dense.model, windows.calibration, progress=progress)
    inside = sum(bed.weights_per_block())
    others = 2 * (sum(p.numel() for p in dense.model.parameters()) - inside)
    plan = [candidate for candidate in candidates(bed, base) if wanted(candidate)]
    for done, candidate in enumerate(plan):
        if candidate.name not in known["points"]:
            point = measure(bed, windows.judged.short, candidate, others)
            known["points"][candidate.name] = asdict(point)
            write_json(file, known)
        progress("trying candidates", done + 1, len(plan))
    points = with_front([Point(**known["points"][candidate.name]) for candidate in plan])
    dense_perplexity = bed.perplexity(iter(()), windows.judged.short)
    result = {
        "points": [asdict(point) for point in points],
        "dense": dense_perplexity,
        "budget": [target_bytes, max_increase],
    }
    chosen = choose(points, dense_perplexity, target_bytes, max_increase)
    result["chosen"] = asdict(chosen)
    result["better"] = [point.name for point in better_comparisons(points, chosen)]
    write_front(result, out.with_name(out.name + ".front.html"))
    del bed, dense
    settings = _settings(chosen)
    compress(model, out, settings, text, progress)
    return result


def _settings(point: Point) -> Settings:
    found = dict(point.settings or {})
    if isinstance(found.get("allocation"), list):
        found["allocation"] = tuple(found["allocation"])
    return Settings(**found)


def _known(file: Path, identity: dict[str, Any]) -> dict[str, Any]:
    identity = json.loads(json.dumps(identity))
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text())
        if found.get("identity") == identity:
            return found
    return {"identity": identity, "points": {}}


def write_front(result: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the points of :func:`auto_compress` as a page; returns its absolute path."""
    from plotly import graph_objects

    report = Report("Size and perplexity of every way that was tried", f"chosen: {result['chosen']['name']}")
    kinds = {
        "on the front": [point for point in result["points"] if point["front"]],
        "beaten": [point for point in result["points"] if not point["front"]],
        "chosen": [result["chosen"]],
    }
    figure = graph_objects.Figure([
        graph_objects.Scatter(
            name=kind, x=[point["bytes"] / 1e6 for point in points], y=[point["perplexity"] for point in points],
            text=[point["name"] for point in points], mode="markers",
        )
        for kind, points in kinds.items()
    ])  # fmt: skip
    if result["better"]:
        report.add_text(f"No larger and no worse than what was chosen: {', '.join(result['better'])}.")
    figure.update_layout(xaxis_title="MB", yaxis_title="perplexity", yaxis_type="log")
    report.add_figure(figure, "pruned by statistics of the dense model; a comparison is marked in the table")
    rows = [
        (point["name"], point["bytes"] / 1e6, point["perplexity"], _milliseconds(point),
         "yes" if point["front"] else "", "" if point["settings"] else "comparison")
        for point in result["points"]
    ]  # fmt: skip
    report.add_table(("", "MB", "perplexity", "linear layers, ms a token", "on the front", ""), rows)
    report.add_json(result)
    return report.write(path)


def _milliseconds(point: dict[str, Any]) -> str:
    return "" if point["seconds"] is None else f"{1e3 * point['seconds']:.2f}"
