"""Graph files: what each form means, and what is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from gossamer.cli import app
from gossamer.graphs import read_graph

TNTP = """<NUMBER OF NODES> 4
<NUMBER OF LINKS> 3
<END OF METADATA>

~ init term capacity length time b power speed toll type ;
1 2 100 2.5 7 0.15 4 0 0 1 ;
2\t3\t100\t1.0\t3\t0.15\t4\t0\t0\t1;
3 1 100 4 9 0.15 4 0 0 1
"""


def edges(path: Path, **options: object) -> list[tuple[int, int, float]]:
    graph = read_graph(path, **options)  # type: ignore[arg-type]
    return [(int(a), int(b), float(w)) for a, b, w in zip(graph.sources, graph.indices, graph.weights, strict=True)]


def test_tntp_roads_have_lengths_and_times(tmp_path: Path) -> None:
    file = tmp_path / "a_net.tntp"
    file.write_text(TNTP)
    assert edges(file) == [(0, 1, 2.5), (1, 2, 1.0), (2, 0, 4.0)]
    times = read_graph(file, "time")
    assert times.weights.tolist() == [7, 3, 9] and times.weights.dtype == np.int32 and times.n == 4
    packed = tmp_path / "a_net.tntp.gz"
    packed.write_bytes(gzip.compress(TNTP.encode()))
    assert edges(packed) == edges(file)


def test_dimacs_arcs_are_directed(tmp_path: Path) -> None:
    file = tmp_path / "a.gr"
    file.write_text("c roads\np sp 3 2\na 1 2 5\na 3 1 7\n")
    assert edges(file) == [(0, 1, 5), (2, 0, 7)]
    file.write_text("p sp 3 3\na 1 2 5\n")
    with pytest.raises(ValueError, match="3 arcs are announced, but there are 1"):
        read_graph(file)


def test_matrix_market_is_read_with_and_without_its_banner(tmp_path: Path) -> None:
    file = tmp_path / "a.mtx"
    file.write_text("%%MatrixMarket matrix coordinate integer symmetric\n3 3 2\n2 1 4\n3 2 0\n")
    both = [(0, 1, 4), (1, 0, 4), (1, 2, 0), (2, 1, 0)]
    assert edges(file) == both
    file.write_text("% no banner\n3 3 2\n2 1 4\n3 2 0\n")
    assert edges(file) == both
    file.write_text("2 1 4\n3 2 0\n")
    assert edges(file) == both
    file.write_text("%%MatrixMarket matrix coordinate real general\n2 3 1\n1 1 1\n")
    with pytest.raises(ValueError, match="square"):
        read_graph(file)


def test_edge_lists_count_in_both_directions_unless_directed(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("from,to\n0,1\n1,2\n")
    assert edges(file) == [(0, 1, 1), (1, 0, 1), (1, 2, 1), (2, 1, 1)]
    assert edges(file, directed=True) == [(0, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.xyz", "0 1", "path must end with"),
        ("a.tntp", "1 2 3", "END OF METADATA"),
        ("a.txt", "0 x\n1 2", "numbers"),
        ("a.txt", "0 1 nan", "NaN"),
        ("a.txt", "0.5 1", "whole numbers"),
        ("a.txt", "-1 1", "must be from 0"),
        ("a.gr", "a 1 2 3", "p sp"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, content: str, told: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ValueError, match=told):
        read_graph(file)


def test_the_command_writes_all_distances(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    file, out = tmp_path / "a_net.tntp", tmp_path / "d.npy"
    file.write_text(TNTP)
    done = CliRunner().invoke(app, ["apsp", str(file), "--out", str(out), "--weight", "time", "--json"])
    assert done.exit_code == 0, done.output
    infinity = 2**30 - 1
    expected = [[0, 7, 10, infinity], [12, 0, 3, infinity], [9, 16, 0, infinity], [infinity, infinity, infinity, 0]]
    np.testing.assert_array_equal(np.load(out), expected)
    assert '"vertices": 4' in done.output
    assert CliRunner().invoke(app, ["apsp", str(file), "--out", str(tmp_path / "d.txt")]).exit_code == 2
