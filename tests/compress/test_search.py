"""The searches from end to end on tiny models, and what they write."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline import main_exits, save_tiny
from tiny_models import tiny_model, tiny_windows

from gossamer.compress import (
    NAMED_METRICS,
    EvolutionSettings,
    MetricSpace,
    SearchWindows,
    SymbolicMetric,
    read_about,
    same_ranking,
    search_allocation,
    search_metric,
)
from gossamer.compress._metric_search import MetricProblem, Texts
from gossamer.compress._models import DenseModel
from gossamer.compress._search_html import principles, write_search_report
from gossamer.compress._workbench import Workbench
from gossamer.core.report import read_report_data


class Tiny(DenseModel):
    """A random model that comes from no file."""

    fingerprint = "tiny"  # type: ignore[assignment]


def tiny(family: str = "llama") -> DenseModel:
    return Tiny(tiny_model(family), None, "tiny", Path("."))  # type: ignore[arg-type]


def windows() -> SearchWindows:
    texts = Texts(tiny_windows(2, 16, 3), tiny_windows(3, 16, 4))
    return SearchWindows(tiny_windows(4, 16), texts, tiny_windows(3, 16, 5), {})


SETTINGS = EvolutionSettings(population=5, generations=1, seed=1, finalists=1)


def test_a_search_for_a_metric_is_reported_beside_its_rivals_and_is_resumed(tmp_path: Path) -> None:
    lines: list[str] = []
    result = search_metric(
        tiny(), tmp_path, settings=SETTINGS, windows=windows(), ablate=True, correct=True, log=lines.append
    )
    names = {row["name"] for row in result["candidates"]}
    assert names >= {
        "wanda",
        "magnitude",
        "search",
        "random control",
        "no gradients",
        "classic",
        "screen only",
        "sparsegpt",
    }
    assert json.loads((tmp_path / "search.json").read_text()) == json.loads(json.dumps(result))
    for name in ("no gradients", "no inputs"):
        judged = " ".join(text for text, _, _ in result["runs"][name]["judged"])
        assert not set("GFU" if name == "no gradients" else "XMVDQ") & set(judged)
    again: list[str] = []
    assert (
        search_metric(
            tiny(), tmp_path, settings=SETTINGS, windows=windows(), ablate=True, correct=True, log=again.append
        )
        == result
    )
    assert any("generation" in line for line in lines)
    assert not any("generation" in line for line in again)
    page = write_search_report(result, tmp_path / "report.html")
    assert read_report_data(page)["candidates"] == result["candidates"]


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_search_for_an_allocation_keeps_the_budget_and_reports(tmp_path: Path, family: str) -> None:
    result = search_allocation(tiny(family), tmp_path, 0.6, settings=SETTINGS, windows=windows(), correct=True)
    names = {row["name"] for row in result["candidates"]}
    assert names >= {"uniform", "straight line", "OWL", "function: search", "levels: search", "levels: random control"}
    for row in result["candidates"]:
        assert sum(row["sparsities"]) / 3 == pytest.approx(0.6, abs=1e-4)
    write_search_report(result, tmp_path / "report.html")


def test_the_report_text_does_not_reach_the_search(tmp_path: Path) -> None:
    other = SearchWindows(windows().calibration, windows().judged, tiny_windows(3, 16, 77), {})
    found = [
        search_metric(tiny(), tmp_path / str(i), settings=SETTINGS, windows=w) for i, w in enumerate((windows(), other))
    ]
    assert found[0]["runs"] == found[1]["runs"]
    assert found[0]["candidates"] != found[1]["candidates"]


def test_repeated_searches_are_those_of_their_seeds_and_what_is_new_is_no_named_metric(tmp_path: Path) -> None:
    result = search_metric(tiny(), tmp_path / "both", settings=SETTINGS, windows=windows(), repeats=2)
    alone = search_metric(tiny(), tmp_path / "one", settings=replace(SETTINGS, seed=2), windows=windows())
    for name in ("search", "random control"):
        assert result["runs"][f"{name}, seed 2"] == alone["runs"][name]
    rows = {row["name"]: row for row in result["candidates"]}
    named = {name for name, row in rows.items() if not row["new"]} - {"random control", "random control, seed 2"}
    assert named >= set(NAMED_METRICS)
    found = [row for row in rows.values() if row["found"] and row["new"]]
    assert found
    for row in found:
        tree = SymbolicMetric.parse(row["formula"]).tree
        assert not any(same_ranking(tree, SymbolicMetric.parse(name).tree) for name in NAMED_METRICS)
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        search_metric(tiny(), tmp_path / "none", settings=SETTINGS, windows=windows(), repeats=0)


def test_screening_wanda_finds_the_loss_of_its_masks_written_out() -> None:
    dense = tiny()
    bed = Workbench(dense.model, windows().calibration)
    problem = MetricProblem(bed, windows().judged, MetricSpace(), 0.5)
    expected = 0.0
    for layer in problem._sample:
        scores = layer.weight.abs() * layer.statistics.second_moment.sqrt().float()
        pruned = torch.argsort(scores, dim=1, stable=True)[:, : scores.shape[1] // 2]
        removed = torch.zeros_like(layer.weight).scatter_(1, pruned, layer.weight.gather(1, pruned)).double()
        assert layer.gradients is not None
        assert layer.statistics.hessian is not None
        correlations = layer.statistics.hessian.double() / 2
        for row, fisher in zip(removed, layer.gradients.output_fisher, strict=True):
            expected += 0.5 * float(fisher) * float(row @ correlations @ row)
    assert problem.screen(SymbolicMetric.parse("wanda").tree) == pytest.approx(expected, rel=1e-4)


def test_features_of_good_metrics_are_found() -> None:
    judged: list[list[Any]] = [
        ["mul(W, X)", 0.0, 5.0],
        ["W", 0.0, 9.0],
        ["sqrt(W)", 0.0, 8.0],
        ["add(W, X)", 0.0, 6.0],
    ] * 2
    found = dict(principles([*judged, ["G", 0.0, None]]))
    assert found["uses X"] < -0.8
    assert "uses G" not in found


def test_a_folder_with_another_search_is_refused(tmp_path: Path) -> None:
    search_metric(tiny(), tmp_path, settings=SETTINGS, windows=windows(), control=False)
    with pytest.raises(ValueError, match="differing sparsity"):
        search_metric(tiny(), tmp_path, sparsity=0.6, settings=SETTINGS, windows=windows(), control=False)


@pytest.mark.parametrize("verb", ["metric", pytest.param("allocation", marks=pytest.mark.slow)])
def test_the_command_searches_and_compress_takes_what_it_found(tmp_path: Path, verb: str) -> None:
    model = save_tiny(tmp_path / "dense", "llama")
    for name in ("own", "other"):
        letters = random.Random(name).choices("abcdefgh", k=4000)
        (tmp_path / f"{name}.txt").write_text("\n\n".join("".join(letters[i : i + 80]) for i in range(0, 4000, 80)))
    options = ["--text", str(tmp_path / "own.txt"), "--search-text", str(tmp_path / "other.txt"), "--seqlen", "32"]
    small = ["--samples", "2", "--population", "5", "--generations", "1", "--no-control"]
    found = tmp_path / "found"
    assert main_exits(["search", verb, str(model), "--out", str(found), "--sparsity", "0.5", *options, *small]) == 0
    assert (found / "report.html").is_file()
    result = json.loads((found / "search.json").read_text())
    how = ["--allocation", str(found / "search.json")]
    if verb == "metric":
        how = ["--score", next(row["formula"] for row in result["candidates"] if row["name"] == "search")]
    making = ["--samples", "4", "--seqlen", "24", "--format", "bitmap", "--text", str(tmp_path / "own.txt")]
    assert main_exits(["compress", str(model), "--out", str(tmp_path / "small"), *making, *how]) == 0
    densities = [layer["density"] for layer in read_about(tmp_path / "small")["layers"]]
    assert sum(densities) / len(densities) == pytest.approx(0.5, abs=0.05)
