"""Citation graphs in the Planetoid form (Yang et al., ICML 2016): pickles of Python 2, read without running any code."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.graphs._propagation import as_graph
from gossamer.sparse import SparseMatrix

_VALIDATION = 500

# The only things that these files are made of; a pickle that asks for anything else is refused.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("scipy.sparse.csr", "csr_matrix"),
    ("collections", "defaultdict"),
    ("__builtin__", "list"),
}


@dataclass(frozen=True, eq=False)
class NodeTask:
    """A graph whose nodes have classes.

    graph: ``(nodes, nodes)``. features: ``(nodes, features)`` float32. labels: int64 ``(nodes,)``.
    train, validation, test: indices of nodes.
    """

    graph: SparseMatrix
    features: Tensor
    labels: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.labels.max()) + 1

    def to(self, device: str | torch.device) -> NodeTask:
        """The same task on another device."""
        tensors = {
            name: getattr(self, name).to(device) for name in ("features", "labels", "train", "validation", "test")
        }
        return replace(self, graph=self.graph.to(device), **tensors)


def read_planetoid(folder: str | Path, name: str) -> NodeTask:
    """The task ``ind.NAME.*`` in ``folder`` with its public split: 20 nodes a class, 500 to validate, listed ones to test.

    Rows of features are scaled to a sum of 1, as the papers do. Test nodes are put where ``test.index`` says.

    Raises:
        FileNotFoundError: a file is missing; the message says which.
        ValueError: a file holds anything but arrays, sparse matrices and lists, or the parts do not fit together.
    """
    folder = Path(folder)
    x, y, test_x, test_y, all_x, all_y, adjacency = (
        _unpickled(folder / f"ind.{name}.{part}") for part in ("x", "y", "tx", "ty", "allx", "ally", "graph")
    )
    test = np.loadtxt(_existing(folder / f"ind.{name}.test.index"), dtype=np.int64)
    nodes = max(len(adjacency), int(test.max()) + 1)
    if len(test) != test_x.shape[0] or all_x.shape[0] != len(all_y) or nodes < all_x.shape[0] + len(test):
        raise ValueError(f"the parts of {name} in {folder} do not fit together: {all_x.shape}, {test_x.shape}, {nodes}")
    features = np.zeros((nodes, all_x.shape[1]), np.float32)
    labels = np.zeros((nodes, all_y.shape[1]), np.float32)
    features[: all_x.shape[0]], labels[: len(all_y)] = all_x.toarray(), all_y
    features[test], labels[test] = test_x.toarray(), test_y
    features /= np.maximum(features.sum(1, keepdims=True), 1e-12)
    edges = [(node, other) for node, others in adjacency.items() for other in others]
    pairs = torch.tensor(edges, dtype=torch.int64).T
    both = torch.unique(torch.cat([pairs, pairs.flip(0)], 1), dim=1)  # listed twice, or in one direction only
    train = torch.arange(x.shape[0])
    if len(y) != len(train):
        raise ValueError(f"{name} has {len(train)} training nodes, but {len(y)} labels of them")
    return NodeTask(
        as_graph(both, nodes), torch.from_numpy(features), torch.from_numpy(labels.argmax(1)), train,
        torch.arange(len(train), len(train) + _VALIDATION), torch.from_numpy(np.sort(test)),
    )  # fmt: skip


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"a Planetoid file may not ask for {module}.{name}")
        if name == "csr_matrix":
            return _Csr
        if module.startswith("numpy"):
            return {"_reconstruct": np.ndarray.__reduce__(np.empty(0))[0], "ndarray": np.ndarray, "dtype": np.dtype}[
                name
            ]
        return {"defaultdict": _defaultdict, "list": list}[name]


class _Csr:
    """What a pickled SciPy matrix unfolds into: its attributes."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.__dict__["_shape"]
        return int(rows), int(columns)

    def toarray(self) -> np.ndarray:
        import scipy.sparse

        parts = (np.asarray(self.__dict__[key]) for key in ("data", "indices", "indptr"))
        return scipy.sparse.csr_array(tuple(parts), shape=self.shape).toarray()


def _defaultdict(*arguments: Any) -> dict[Any, Any]:
    """Python 2 pickles a defaultdict with its factory; only the entries matter."""
    return {}


def _unpickled(path: Path) -> Any:
    try:
        return _Reader(BytesIO(_existing(path).read_bytes()), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no Planetoid file: {error}") from error


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; Planetoid's data folder has it")
    return path
