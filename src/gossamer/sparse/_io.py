"""Reading sparse matrices from files: Matrix Market, METIS graphs, edge lists, SciPy's and our own archives.

Files may be compressed by gzip (``.mtx.gz`` and so on). Symmetric and skew-symmetric Matrix Market files, which store
one triangle, are expanded; a METIS file names every edge from both ends.
"""

from __future__ import annotations

import gzip
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gossamer.sparse._matrix import SparseMatrix


def read_matrix(path: str | os.PathLike[str]) -> SparseMatrix:
    """Read a sparse matrix; the ending of the name says in which form.

    ``.mtx``: Matrix Market (pattern files get ones). ``.graph``: METIS. ``.csv``, ``.txt``, ``.edges``: an edge list
    without direction, see :func:`read_edges`. ``.npz``: ``scipy.sparse.save_npz``. ``.safetensors``: ours.

    Raises:
        ValueError: the ending is unknown or the content malformed; the message names the file.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    ending = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if ending.lower() not in _READERS:
        raise ValueError(f"path must end with one of {', '.join(_READERS)} (or that and .gz), got {path.name!r}")
    return _READERS[ending.lower()](path)


def read_edges(path: str | os.PathLike[str], directed: bool = False, nodes: int | None = None) -> SparseMatrix:
    """Read an edge list: two node numbers from 0 on a line, divided by a comma or blanks, and perhaps a weight.

    A first line that is no numbers and lines that start with ``#`` or ``%`` are skipped. Row = the first number.
    directed: take each line as one entry; otherwise both directions are stored, and repeated edges count once (the
    weight of the first line that names the edge counts). nodes: how many there are, the largest number + 1 if left out.
    """
    path = Path(path)
    lines = [line for line in _text(path).splitlines() if line.strip() and line.lstrip()[0] not in "#%"]
    if lines and not _is_number(lines[0].replace(",", " ").split()[0]):
        del lines[0]
    try:
        cells = np.array([line.replace(",", " ").split()[:3] for line in lines], np.float64)
    except ValueError:
        raise ValueError(f"{path}: every line must hold two node numbers, and the same number of cells") from None
    if not len(cells):
        return SparseMatrix.from_coo([], [], shape=(nodes or 0, nodes or 0))
    if cells.shape[1] < 2:
        raise ValueError(f"{path}: every line must hold two node numbers, got lines of one")
    ends = cells[:, :2].astype(np.int64)
    if (ends != cells[:, :2]).any() or (ends < 0).any():
        raise ValueError(f"{path}: node numbers must be integers from 0 on")
    count = int(ends.max()) + 1 if nodes is None else nodes
    weights = cells[:, 2] if cells.shape[1] > 2 else np.ones(len(ends))
    if not directed:
        ends, weights = np.concatenate([ends, ends[:, ::-1]]), np.concatenate([weights, weights])
        _, first = np.unique(ends[:, 0] * (int(ends.max()) + 1) + ends[:, 1], return_index=True)
        ends, weights = ends[first], weights[first]
    return SparseMatrix.from_coo(ends[:, 0], ends[:, 1], weights.astype(np.float32), (count, count))


def _read_market(path: Path) -> SparseMatrix:
    from scipy.io import mmread
    from scipy.sparse import coo_array

    try:
        matrix = mmread(str(path))
    except (ValueError, OverflowError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no sound Matrix Market file: {error}") from error
    except MemoryError:
        raise ValueError(f"{path} announces more rows, columns or entries than memory holds") from None
    if np.iscomplexobj(matrix if isinstance(matrix, np.ndarray) else matrix.data):
        raise ValueError(f"{path} holds complex numbers; only real ones can be multiplied here")
    return SparseMatrix.from_scipy(coo_array(matrix))


def _read_graph(path: Path) -> SparseMatrix:
    """METIS: ``nodes edges [fmt [weights a node]]``, then a line of neighbours (from 1) for every node."""
    lines = [line.split() for line in _text(path).splitlines() if not line.startswith("%")]
    if not lines or len(lines[0]) < 2:
        raise ValueError(f"{path}: the first line must hold the numbers of nodes and edges")
    try:
        nodes, edges = int(lines[0][0]), int(lines[0][1])
        flags = lines[0][2].zfill(3) if len(lines[0]) > 2 else "000"
        sizes, node_weights, weighted = (flag == "1" for flag in flags[-3:])
        per_node = int(lines[0][3]) if len(lines[0]) > 3 else 1
        skip = int(sizes) + (per_node if node_weights else 0)
        found = [np.array(line[skip:], np.float64) for line in lines[1 : nodes + 1]]
    except ValueError:
        raise ValueError(f"{path}: every cell must be a number") from None
    if len(found) < nodes:
        raise ValueError(f"{path}: {nodes} nodes are announced, but there are lines for {len(found)}")
    width = 2 if weighted else 1
    if any(len(cells) % width for cells in found):
        raise ValueError(f"{path}: every neighbour must be followed by a weight (fmt {flags})")
    counts = np.array([len(cells) // width for cells in found], np.int64)
    cells = np.concatenate(found) if found else np.empty(0)
    columns = cells[::width].astype(np.int64) - 1
    if counts.sum() != 2 * edges:
        raise ValueError(
            f"{path}: {edges} edges are announced, but lines name {counts.sum()} ends instead of {2 * edges}"
        )
    values = cells[1::2] if weighted else np.ones(len(columns))
    try:
        rows = np.repeat(np.arange(nodes), counts)
        return SparseMatrix.from_coo(rows, columns, values.astype(np.float32), (nodes, nodes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_npz(path: Path) -> SparseMatrix:
    from scipy.sparse import load_npz

    try:
        return SparseMatrix.from_scipy(load_npz(path))
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is no sparse matrix that scipy.sparse.save_npz wrote") from error


def _text(path: Path) -> str:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt") as file:
                return file.read()
        return path.read_text()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is no text file: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_READERS: dict[str, Callable[[Path], SparseMatrix]] = {
    ".mtx": _read_market,
    ".graph": _read_graph,
    ".csv": read_edges,
    ".txt": read_edges,
    ".edges": read_edges,
    ".npz": _read_npz,
    ".safetensors": SparseMatrix.load,
}
