"""Reading road networks and graphs: TNTP, DIMACS ``.gr``, Matrix Market with or without its banner, METIS, edge lists.

Numbers that are all whole become integers, so that distances are exact. Files may be compressed by gzip.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gossamer.graphs._weighted import WeightedGraph

_TNTP_WEIGHTS = {"length": 3, "time": 4}


def read_graph(path: str | os.PathLike[str], weight: str = "length", directed: bool | None = None) -> WeightedGraph:
    """Read a weighted graph; the ending of the name says in which form.

    ``.tntp``: directed road networks; weight: "length" or "time" (free-flow). ``.gr``: DIMACS shortest paths, directed.
    ``.mtx``: Matrix Market; one without its banner line is read as an edge list from 1. ``.graph``: METIS. ``.txt``,
    ``.csv``, ``.edges``: two vertices from 0 on a line and perhaps a weight. Edges without a weight weigh 1.
    directed: of edge lists; by default each line counts in both directions there.

    Raises:
        ValueError: the ending or ``weight`` is unknown, or the content malformed; the message names the file.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if weight not in _TNTP_WEIGHTS:
        raise ValueError(f"weight must be one of {', '.join(_TNTP_WEIGHTS)}, got {weight!r}")
    ending = (Path(path.stem).suffix if path.suffix == ".gz" else path.suffix).lower()
    if ending not in _READERS:
        raise ValueError(f"path must end with one of {', '.join(_READERS)} (or that and .gz), got {path.name!r}")
    try:
        return _READERS[ending](path, weight, directed)
    except (IndexError, OverflowError) as error:
        raise ValueError(f"{path} is malformed: {error}") from error


def _read_tntp(path: Path, weight: str, directed: bool | None) -> WeightedGraph:
    lines = _lines(path)
    start = next((number for number, line in enumerate(lines) if "<END OF METADATA>" in line.upper()), None)
    if start is None:
        raise ValueError(f"{path}: the line <END OF METADATA> is missing")
    nodes = next(
        (int(line.split(">")[1]) for line in lines[:start] if line.upper().startswith("<NUMBER OF NODES>")), None
    )
    rows = [
        line.replace(";", " ").split()
        for line in lines[start + 1 :]
        if line.strip() and not line.lstrip().startswith("~")
    ]
    cells = _table(path, [row for row in rows if row], _TNTP_WEIGHTS[weight] + 1)
    return _graph(path, cells[:, 0] - 1, cells[:, 1] - 1, cells[:, -1], nodes)


def _read_dimacs(path: Path, weight: str, directed: bool | None) -> WeightedGraph:
    lines = _lines(path)
    header = next((line.split() for line in lines if line.startswith("p ")), None)
    if header is None or len(header) < 4:
        raise ValueError(f"{path}: the line 'p sp NODES ARCS' is missing")
    cells = _table(path, [line.split()[1:] for line in lines if line.startswith("a ")], 3)
    if len(cells) != int(header[3]):
        raise ValueError(f"{path}: {header[3]} arcs are announced, but there are {len(cells)}")
    return _graph(path, cells[:, 0] - 1, cells[:, 1] - 1, cells[:, 2], int(header[2]))


def _read_market(path: Path, weight: str, directed: bool | None) -> WeightedGraph:
    lines = _lines(path)
    if lines and lines[0].startswith("%%MatrixMarket"):
        from scipy.io import mmread

        try:
            coo = mmread(str(path)).tocoo()
        except (ValueError, OverflowError, EOFError, OSError, AttributeError) as error:
            raise ValueError(f"{path} is no sound Matrix Market file of coordinates: {error}") from error
        if coo.shape[0] != coo.shape[1]:
            raise ValueError(f"{path} must be square, got {coo.shape}")
        return _graph(path, coo.row, coo.col, coo.data, coo.shape[0])
    rows = [line.split() for line in lines if line.strip() and line.lstrip()[0] not in "%#"]
    # Without the banner the first line may still be the size: three numbers, of which the first two are equal.
    sized = len(rows) > 1 and len(rows[0]) == 3 and rows[0][0] == rows[0][1] and rows[0][2] == str(len(rows) - 1)
    nodes = int(rows[0][0]) if sized else None
    return _edge_list(path, rows[1:] if sized else rows, 1, directed, nodes)


def _read_metis(path: Path, weight: str, directed: bool | None) -> WeightedGraph:
    from gossamer.sparse import read_matrix

    matrix = read_matrix(path)
    return _graph(path, matrix.rows.numpy(), matrix.indices.numpy(), matrix.values.numpy(), matrix.shape[0])


def _read_list(path: Path, weight: str, directed: bool | None) -> WeightedGraph:
    rows = [line.replace(",", " ").split() for line in _lines(path) if line.strip() and line.lstrip()[0] not in "%#"]
    if rows and not _is_number(rows[0][0]):
        del rows[0]
    return _edge_list(path, rows, 0, directed, None)


def _edge_list(
    path: Path, rows: list[list[str]], lowest: int, directed: bool | None, nodes: int | None
) -> WeightedGraph:
    width = min((len(row) for row in rows), default=2)
    cells = _table(path, rows, min(width, 3))
    tails, heads = cells[:, 0] - lowest, cells[:, 1] - lowest
    weights = cells[:, 2] if cells.shape[1] > 2 else np.ones(len(cells))
    if not directed:
        tails, heads = np.concatenate([tails, heads]), np.concatenate([heads, tails])
        weights = np.concatenate([weights, weights])
    return _graph(path, tails, heads, weights, nodes)


def _graph(path: Path, tails: np.ndarray, heads: np.ndarray, weights: np.ndarray, nodes: int | None) -> WeightedGraph:
    if (tails != np.floor(tails)).any() or (heads != np.floor(heads)).any():
        raise ValueError(f"{path}: vertices must be whole numbers")
    weights = np.asarray(weights)
    if (
        not np.issubdtype(weights.dtype, np.integer)
        and np.isfinite(weights).all()
        and (weights == np.floor(weights)).all()
    ):
        weights = weights.astype(np.int64)
    try:
        return WeightedGraph.from_edges(tails.astype(np.int64), heads.astype(np.int64), weights, nodes)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _table(path: Path, rows: list[list[str]], columns: int) -> np.ndarray:
    if columns < 2:
        raise ValueError(f"{path}: every line must hold two vertices")
    try:
        return np.array([row[:columns] for row in rows], np.float64).reshape(len(rows), columns)
    except ValueError:
        raise ValueError(f"{path}: every line must hold at least {columns} numbers") from None


def _lines(path: Path) -> list[str]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            return file.read().splitlines()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is no text file: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_READERS: dict[str, Callable[[Path, str, bool | None], WeightedGraph]] = {
    ".tntp": _read_tntp,
    ".gr": _read_dimacs,
    ".mtx": _read_market,
    ".graph": _read_metis,
    ".txt": _read_list,
    ".csv": _read_list,
    ".edges": _read_list,
}
