"""An evaluation and its page: the numbers that a reader sees are those of the JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import SMALL, TEXT, save_tiny

from gossamer.compress import Choice, Settings, compress, evaluate, write_report
from gossamer.core.report import read_report_data


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("report")
    (folder / "dense").mkdir()
    dense = save_tiny(folder / "dense", "llama")
    out = compress(dense, folder / "out", Settings(format="bitmap", **SMALL), TEXT)
    questions = [Choice("abc", ("d", "e"), 0), Choice("def", ("a", "bc", "h"), 2)]
    return evaluate(out, TEXT, seqlen=24, windows=2, tokens=8, choices={"letters": questions})


def test_an_evaluation_has_every_part(result: dict[str, Any]) -> None:
    assert result["quality"]["tokens"] == 2 * 23
    assert 0 <= result["quality"]["top1_agreement"] <= 1
    assert set(result["memory"]) == {"dense", "compressed"}
    assert all(speed["compressed"] > 0 for speed in result["speed"].values())
    assert len(result["samples"]) == 3
    assert result["choices"]["letters"]["compressed"]["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert sum("letters" in row["what"] for row in result["summary"]) == 2


@pytest.mark.browser
def test_the_page_shows_the_numbers_of_its_json(
    result: dict[str, Any], browse: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = write_report(result, tmp_path / "report.html")
    page = browse(path)
    assert page.errors == []
    assert page.requests == []
    data = read_report_data(path)
    for row in data["summary"]:
        for key in ("dense", "compressed"):
            value = row[key]
            assert (f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}") in page.text, row
