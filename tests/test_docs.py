"""What README and docs say can be run and found."""

import os
import re
from pathlib import Path

import pytest

from gossamer.cli import _VERBS
from gossamer.core.records import read_records

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture
def fill_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fill_tables

    return fill_tables


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_examples_run(page, tmp_path, monkeypatch, capsys):
    from gossamer.core import measure

    monkeypatch.setattr(measure, "_CLAIMS", {})
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__example__"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_pages_show_exist(page):
    shown = re.findall(r"^gossamer (\w+)", page.read_text(), re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shown) <= set(_VERBS)
    assert set(re.findall(r"\bmake (\w+)\s+#", page.read_text())) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert os.path.exists(page.parent / target), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_tables_agree_with_the_records(page, fill_tables):
    text = page.read_text()
    assert fill_tables.filled(text, read_records(ROOT)) == text, "run `make docs`"


def test_an_unknown_kind_of_table_is_refused(fill_tables):
    with pytest.raises(ValueError, match="got 'nonsense'"):
        fill_tables.filled("<!-- table: nonsense -->\n<!-- end -->\n", [])


def test_filling_twice_changes_nothing(fill_tables):
    text = "a\n<!-- table: systems -->\nold\n<!-- end -->\nb\n"
    once = fill_tables.filled(text, [])
    assert "| `weights` | SpInfer |" in once
    assert "old" not in once
    assert fill_tables.filled(once, []) == once
