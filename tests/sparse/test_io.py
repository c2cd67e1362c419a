"""Files: what Matrix Market, METIS graphs and edge lists say is what the matrix holds; bad ones are named."""

import gzip

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp
import torch
from matrices import entries, random_matrix

from gossamer.sparse import SparseMatrix, read_edges, read_matrix


def written(path, text):
    path.write_text(text)
    return path


def test_a_symmetric_matrix_market_file_is_expanded_and_its_diagonal_counted_once(tmp_path):
    text = "%%MatrixMarket matrix coordinate real symmetric\n3 3 3\n1 1 5\n3 1 2\n3 3 7\n"
    assert entries(read_matrix(written(tmp_path / "a.mtx", text))) == [(0, 0, 5), (0, 2, 2), (2, 0, 2), (2, 2, 7)]


def test_skew_pattern_integer_and_compressed_market_files_are_read(tmp_path):
    skew = "%%MatrixMarket matrix coordinate real skew-symmetric\n2 2 1\n2 1 3\n"
    assert entries(read_matrix(written(tmp_path / "a.mtx", skew))) == [(0, 1, -3), (1, 0, 3)]
    pattern = "%%MatrixMarket matrix coordinate pattern general\n2 3 2\n2 1\n1 3\n"
    with gzip.open(tmp_path / "b.mtx.gz", "wt") as file:
        file.write(pattern)
    assert entries(read_matrix(tmp_path / "b.mtx.gz")) == [(0, 2, 1), (1, 0, 1)]
    whole = "%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 4\n"
    assert read_matrix(written(tmp_path / "c.mtx", whole)).values.tolist() == [4]


def test_what_scipy_writes_is_what_we_read(tmp_path):
    matrix = random_matrix((17, 9), 0.3, torch.float64)
    scipy.io.mmwrite(tmp_path / "a.mtx", sp.coo_matrix(matrix.to_scipy()), precision=17)
    sp.save_npz(tmp_path / "a.npz", matrix.to_scipy())
    matrix.save(tmp_path / "a.safetensors")
    for name in ("a.mtx", "a.npz", "a.safetensors"):
        assert entries(read_matrix(tmp_path / name)) == entries(matrix)


def test_malformed_market_files_are_refused_by_name(tmp_path):
    header = "%%MatrixMarket matrix coordinate real general\n"
    for text in ("", "nonsense\n", header + "2 2 1\n", header + "2 2 1\n3 1 1\n", header + "2 2 1\n1 1 x\n"):
        with pytest.raises(ValueError, match=r"bad\.mtx"):
            read_matrix(written(tmp_path / "bad.mtx", text))
    with pytest.raises(ValueError, match="complex"):
        read_matrix(written(tmp_path / "z.mtx", header.replace("real", "complex") + "1 1 1\n1 1 1 2\n"))


@pytest.mark.data
def test_the_malformed_samples_of_a_public_collection_are_read_or_refused(data_file):
    folder = data_file("sparse/lagraph_malformed/mangled1.mtx").parent
    for path in sorted(folder.glob("*.mtx")):
        try:
            scipy.io.mmread(path)
        except (ValueError, OverflowError):
            with pytest.raises(ValueError, match=path.name):
                read_matrix(path)
        else:
            matrix = read_matrix(path)
            assert np.array_equal(matrix.to_dense().numpy(), scipy.sparse.coo_array(scipy.io.mmread(path)).toarray())


def test_metis_graphs_are_read_with_and_without_weights(tmp_path):
    plain = "% a path of three nodes\n3 2\n2\n1 3\n2\n"
    assert entries(read_matrix(written(tmp_path / "a.graph", plain))) == [(0, 1, 1), (1, 0, 1), (1, 2, 1), (2, 1, 1)]
    weighted = "3 2 011 1\n9 2 5\n9 1 5 3 6\n9 2 6\n"
    assert [value for *_, value in entries(read_matrix(written(tmp_path / "b.graph", weighted)))] == [5, 5, 6, 6]
    alone = "3 1\n2\n1\n\n"
    assert read_matrix(written(tmp_path / "c.graph", alone)).indptr.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize(
    "text", ["", "3\n", "3 2\n2\n", "2 1\n2\n2 1\n", "2 1\nx\n1\n", "2 1\n3\n1\n", "2 1 001\n2\n1\n"]
)
def test_malformed_metis_graphs_are_refused_by_name(tmp_path, text):
    with pytest.raises(ValueError, match=r"bad\.graph"):
        read_matrix(written(tmp_path / "bad.graph", text))


def test_edge_lists_store_both_directions_once_unless_directed(tmp_path):
    path = written(tmp_path / "a.csv", "id_1,id_2\n0,1\n1,0\n2,2\n")
    assert entries(read_matrix(path)) == [(0, 1, 1), (1, 0, 1), (2, 2, 1)]
    assert entries(read_edges(path, directed=True, nodes=5)) == [(0, 1, 1), (1, 0, 1), (2, 2, 1)]
    spaced = written(tmp_path / "b.txt", "# comment\n0 3\t2.5\n")
    assert entries(read_edges(spaced, directed=True)) == [(0, 3, 2.5)]
    assert read_matrix(written(tmp_path / "c.txt", "# nothing\n")).shape == (0, 0)


@pytest.mark.parametrize("text", ["0,1\n2\n", "0,a\n", "0,-1\n", "0,1.5\n", "3\n4\n"])
def test_malformed_edge_lists_are_refused_by_name(tmp_path, text):
    with pytest.raises(ValueError, match=r"bad\.csv"):
        read_edges(written(tmp_path / "bad.csv", text))


def test_unknown_endings_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end with one of \.mtx"):
        read_matrix(written(tmp_path / "a.xyz", ""))
    with pytest.raises(FileNotFoundError, match=r"nothing\.mtx"):
        read_matrix(tmp_path / "nothing.mtx")
    assert isinstance(read_matrix(written(tmp_path / "a.edges", "0 1\n")), SparseMatrix)


def test_files_that_cannot_be_what_they_say_are_named(tmp_path):
    size = 10**12
    huge = f"%%MatrixMarket matrix coordinate real general\n{size} {size} {size}\n1 1 1\n"
    with pytest.raises(ValueError, match=r"huge\.mtx announces more .* than memory holds"):
        read_matrix(written(tmp_path / "huge.mtx", huge))
    for name, content in (("text.npz", b"abc"), ("cut.npz", b"PK\x03\x04abc")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is no sparse matrix that scipy"):
            read_matrix(tmp_path / name)
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(ValueError, match=r"other\.npz is no sparse matrix"):
        read_matrix(tmp_path / "other.npz")
