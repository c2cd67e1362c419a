"""Planning within a budget: sizes that files really have, a front that nothing beats, and the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipeline import SMALL, TEXT, save_tiny
from tiny_models import tiny_model, tiny_windows

from gossamer.compress import SearchWindows, Settings, auto_compress, compress, compressed_layers, load, read_about
from gossamer.compress._metric_search import Texts
from gossamer.compress._plan import Point, candidates, choose, measure, with_front
from gossamer.compress._quantised import quantised_ways
from gossamer.compress._workbench import Workbench
from gossamer.core.report import read_report_data

BASE = Settings(**SMALL)


def windows() -> SearchWindows:
    own = torch.randint(0, 8, (8, 24), generator=torch.Generator().manual_seed(0))
    return SearchWindows(own[:4], Texts(own[4:6], own[6:]), own[6:], {})


def test_predicted_bytes_are_those_of_the_files(tmp_path: Path) -> None:
    dense = save_tiny(tmp_path / "dense", "llama")
    bed = Workbench(tiny_model("llama"), tiny_windows())
    checked = 0
    for candidate in candidates(bed, BASE):
        if candidate.settings is None or candidate.name not in ("dense", "wanda at 50%", "binarised 5:8"):
            continue
        out = compress(dense, tmp_path / f"out{checked}", candidate.settings, TEXT)
        stored = sum(layer["bytes"] for layer in read_about(out)["layers"])
        predicted = measure(bed, tiny_windows(2, 16), candidate, others=0).bytes
        spare = 64 * len(compressed_layers(load(out).model))
        assert predicted <= stored <= predicted + 2 * spare
        checked += 1
    assert checked == 3


def test_every_candidate_gives_a_finite_point_and_rounding_is_near() -> None:
    bed = Workbench(tiny_model("llama"), tiny_windows())
    points = {c.name: measure(bed, tiny_windows(2, 16), c, 1000) for c in candidates(bed, BASE)}
    ways = [way.name for way in quantised_ways()]
    assert len(points) == 1 + len(ways) + 3 * 5 * 2 + 3
    dense, bytewise = points["dense"], points[ways[0]]
    assert bytewise.perplexity == pytest.approx(dense.perplexity, rel=0.02)
    assert points[ways[1]].bytes < bytewise.bytes < points["wanda at 30%"].bytes < dense.bytes
    assert all(point.seconds is not None and point.seconds > 0 for point in points.values() if point.settings)
    for layer in bed.layers:  # nothing is left behind
        assert torch.equal(layer.weight, layer.module.weight)


def test_rounding_errs_by_half_a_step_and_is_counted_in_all_its_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 64, generator=generator)
    whole, halves = quantised_ways()[:2]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((whole.weight(weight) - weight).abs() <= 0.5 * step + 0.005 * weight.abs()).all())
    grouped = weight.view(6, 2, 32)
    steps = (grouped.amax(2, keepdim=True) - grouped.amin(2, keepdim=True)) / 15
    error = (halves.weight(weight) - weight).view(6, 2, 32).abs()
    assert bool((error <= 1.05 * steps).all())  # a whole step where the zero point had to be rounded
    assert (whole.bits(weight), halves.bits(weight)) == (8.5, 4.625)


def test_nothing_beats_a_point_on_the_front() -> None:
    generator = torch.Generator().manual_seed(0)
    points = [
        Point(str(i), int(b), float(p), {}) for i, (b, p) in enumerate(torch.rand(60, 2, generator=generator) * 100)
    ]
    for point in with_front(points):
        beaten = any(
            (o.bytes <= point.bytes and o.perplexity < point.perplexity)
            or (o.bytes < point.bytes and o.perplexity <= point.perplexity)
            for o in points
        )
        assert point.front == (not beaten)


POINTS = [Point("a", 100, 10.0, {}), Point("b", 50, 12.0, {}), Point("c", 40, 11.0, None), Point("d", 20, 30.0, {})]


@pytest.mark.parametrize(
    ("target", "increase", "name"),
    [(60, None, "b"), (None, 0.25, "b"), (None, 0.05, "a"), (30, None, "d"), (60, 0.3, "b")],
)
def test_the_choice_keeps_the_limits_and_is_never_a_mere_comparison(target: Any, increase: Any, name: str) -> None:
    assert choose(POINTS, 10.0, target, increase).name == name


def test_limits_that_nothing_keeps_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"nearest: d with 20 bytes and perplexity 30.00 \(\+200.0%\)"):
        choose(POINTS, 10.0, 30, 0.1)
    with pytest.raises(ValueError, match="nearest: d with 20 bytes"):
        choose(POINTS, 10.0, 10, None)
    with pytest.raises(ValueError, match="give target_bytes"):
        choose(POINTS, 10.0, None, None)


def test_a_plan_is_made_kept_and_shown(tmp_path: Path) -> None:
    dense = save_tiny(tmp_path / "dense", "llama")
    seen: list[str] = []

    def wanted(candidate: Any) -> bool:
        own = ("dense", "wanda at 50%", "sparsegpt at 60%", "binarised 4:8")
        return candidate.name in own or candidate.name.startswith("int8")

    def make(out: str, **limits: Any) -> dict[str, Any]:
        return auto_compress(
            dense, tmp_path / out, base=BASE, text=TEXT, windows=windows(), wanted=wanted,
            progress=lambda what, done, total: seen.append(what), **limits,
        )  # fmt: skip

    result = make("out", max_increase=50.0)
    chosen = result["chosen"]
    assert chosen["bytes"] == min(point["bytes"] for point in result["points"] if point["settings"])
    assert (
        read_about(tmp_path / "out")["run"]["settings"]
        == read_report_data(tmp_path / "out.front.html")["chosen"]["settings"]
    )
    smaller = [point for point in result["points"] if point["bytes"] <= chosen["bytes"] and not point["settings"]]
    assert result["better"] == [p["name"] for p in smaller if p["perplexity"] <= chosen["perplexity"]]
    assert (tmp_path / "out.plan.json").is_file()
    with pytest.raises(ValueError, match="needs a target"):
        make("other")
