"""``gossamer sparse plan``: tables, JSON and a page, on a file; one line for what a user can mend."""

import json

import numpy as np
import pytest
import torch
from matrices import random_matrix
from typer.testing import CliRunner

from gossamer.cli import app
from gossamer.core.report import read_report_data
from gossamer.sparse import SparseMatrix, examine
from gossamer.sparse import _planner as planner
from gossamer.sparse._report import sparsity_picture


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch, tmp_path):
    monkeypatch.setattr(planner, "_table_path", lambda: tmp_path / "table.json")
    planner._table.cache_clear()
    yield
    planner._table.cache_clear()


@pytest.fixture
def market_file(tmp_path):
    import scipy.io

    path = tmp_path / "small.mtx"
    scipy.io.mmwrite(path, random_matrix((50, 50), 0.1).to_scipy())
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["sparse", "plan", *map(str, arguments)])


def test_tables_name_the_way_the_peers_and_the_partition(market_file):
    done = run(market_file, "--n", 16, "--samples", 3)
    assert done.exit_code == 0, done.output
    for word in ("way: ", "torch", "scipy", "dense", "rows", "rcm", "theta", "50 x 50"):
        assert word in done.output
    assert "1.00x" in done.output


def test_json_and_report_carry_the_same_figures(market_file, tmp_path):
    page = tmp_path / "page" / "report.html"
    done = run(market_file, "--n", 8, "--samples", 3, "--json", "--report", page)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result == read_report_data(page)
    assert {peer["way"] for peer in result["peers"]} == {"rows", "torch", "scipy", "dense"}
    chosen = next(peer for peer in result["peers"] if peer["way"] == result["plan"]["backend"])
    assert chosen["ratio"] == 1 and result["statistics"]["nnz"] == result["nnz"]
    assert all(plan["nnz_tensor"] + plan["nnz_long"] + plan["nnz_short"] == result["nnz"] for plan in result["hybrid"])


@pytest.mark.browser
def test_the_page_shows_the_picture_without_errors(market_file, tmp_path, browse):
    page = tmp_path / "report.html"
    assert run(market_file, "--n", 8, "--samples", 3, "--report", page).exit_code == 0
    shown = browse(page)
    assert not shown.errors and not shown.requests
    assert "Where the entries are" in shown.text and "heatmap" in shown.document


def test_mistakes_end_in_one_line(tmp_path, market_file):
    for arguments, message in (
        ((tmp_path / "nothing.mtx",), "there is no file"),
        ((market_file, "--n", 0), "n must be at least 1, got 0"),
        ((market_file, "--samples", 1), "samples must be at least 3"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and message in done.output and done.output.count("\n") == 1


def test_the_picture_counts_every_entry_once():
    matrix = random_matrix((300, 1000), 0.05)
    picture = sparsity_picture(matrix, 64)
    assert picture.shape == (64, 64) and picture.sum() == matrix.nnz
    dense = (matrix.to_dense() != 0).numpy()
    assert picture[0, 0] == dense[: int(np.ceil(300 / 64)), : int(np.ceil(1000 / 64))].sum()
    assert sparsity_picture(SparseMatrix.from_coo([], [], shape=(0, 0))).sum() == 0


def test_rectangular_and_half_matrices_are_examined_too():
    result = examine(random_matrix((20, 30), 0.2, torch.float16), 4, samples=3)
    assert {order["method"] for order in result["reordering"]} == {"natural", "degree", "lsh"}
    assert {peer["way"] for peer in result["peers"]} == {"rows", "dense"}
