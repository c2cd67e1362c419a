"""Ways into compressed rows and out again: coordinates, dense, SciPy, torch, PyTorch Geometric."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.sparse import _csr_loops as loops
from gossamer.sparse._matrix import INDEX_TYPES, VALUE_TYPES, SparseMatrix, check_shape

if TYPE_CHECKING:
    import scipy.sparse

Parts = tuple[Tensor, Tensor, Tensor, tuple[int, int]]
_LARGEST_INT32 = 2**31 - 1
_COUNTED = 64


def from_coo(
    rows: Any, columns: Any, values: Any, shape: tuple[int, int] | None, index_dtype: torch.dtype | None
) -> Parts:
    """See :meth:`SparseMatrix.from_coo`."""
    row, column = _indices("rows", rows), _indices("columns", columns)
    if len(row) != len(column):
        raise ValueError(f"rows and columns must be equally long, got {len(row)} and {len(column)}")
    value = _values(values, len(row))
    if shape is None:
        shape = (_beyond(row), _beyond(column))
    size = check_shape(shape)
    for name, index, limit in (("rows", row, size[0]), ("columns", column, size[1])):
        if len(index) and (index.min() < 0 or index.max() >= limit):
            raise ValueError(f"{name} must lie in [0, {limit}), got {index.min()} to {index.max()}")
    counting = max(size) <= _COUNTED * (len(row) + 1024)  # otherwise counters would outweigh entries
    order = loops.sorted_order(row, column, *size) if counting else np.lexsort((column, row))
    group, count = loops.groups_of(row, column, order)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    kept = order[first]
    indptr = np.zeros(size[0] + 1, np.int64)
    np.cumsum(np.bincount(row[kept], minlength=size[0]), out=indptr[1:])
    value = value[torch.from_numpy(order)]
    if count < len(order):
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        summed = torch.zeros(count, dtype=wide).index_add_(0, torch.from_numpy(group), value.to(wide))
        value = summed.to(value.dtype)
    kind = _index_dtype(index_dtype, size, count)
    device = next((given.device for given in (values, columns, rows) if isinstance(given, Tensor)), torch.device("cpu"))
    starts, found = (torch.from_numpy(array).to(device, kind) for array in (indptr, column[kept]))
    return starts, found, value.to(device), size


def from_csr(indptr: Any, indices: Any, values: Any, shape: tuple[int, int] | None) -> Parts:
    """See :meth:`SparseMatrix.from_csr`."""
    given = indices.dtype if isinstance(indices, Tensor) and indices.dtype in INDEX_TYPES else None
    pointer, column = _indices("indptr", indptr), _indices("indices", indices)
    if not len(pointer):
        raise ValueError("indptr must have one entry more than there are rows, got an empty one")
    if pointer[0] != 0 or pointer[-1] != len(column) or (np.diff(pointer) < 0).any():
        raise ValueError(f"indptr must rise from 0 to {len(column)}, got {pointer[0]} to {pointer[-1]}")
    row_count = len(pointer) - 1
    size = check_shape(shape if shape is not None else (row_count, _beyond(column)))
    if size[0] != row_count:
        raise ValueError(f"indptr must have {size[0] + 1} entries for {size[0]} rows, got {len(pointer)}")
    rows = np.empty(len(column), np.int64)
    loops.row_of_entries(pointer, rows)
    return from_coo(rows, column, values, size, given)


def from_dense(dense: Tensor) -> Parts:
    """See :meth:`SparseMatrix.from_dense`."""
    if not isinstance(dense, Tensor):
        raise TypeError(f"dense must be a torch.Tensor, got {type(dense).__name__}")
    if dense.ndim != 2:
        raise ValueError(f"dense must be a matrix, got shape {tuple(dense.shape)}")
    rows, columns = torch.nonzero(dense.detach(), as_tuple=True)
    size = (dense.shape[0], dense.shape[1])
    kind = _index_dtype(None, size, len(rows))
    indptr = torch.zeros(size[0] + 1, dtype=torch.int64, device=dense.device)
    torch.cumsum(torch.bincount(rows, minlength=size[0]), 0, out=indptr[1:])
    return indptr.to(kind), columns.to(kind), dense[rows, columns], size


def from_scipy(matrix: scipy.sparse.sparray | scipy.sparse.spmatrix) -> Parts:
    """See :meth:`SparseMatrix.from_scipy`."""
    if not hasattr(matrix, "tocoo"):
        raise TypeError(f"matrix must be a SciPy sparse matrix, got {type(matrix).__name__}")
    coordinates = matrix.tocoo()
    if len(coordinates.shape) != 2:
        raise ValueError(f"matrix must have two dimensions, got shape {coordinates.shape}")
    return from_coo(coordinates.row, coordinates.col, coordinates.data, coordinates.shape, None)


def from_torch(tensor: Tensor) -> Parts:
    """See :meth:`SparseMatrix.from_torch`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 2:
        raise ValueError(f"tensor must be a matrix, got shape {tuple(tensor.shape)}")
    if tensor.layout == torch.strided:
        return from_dense(tensor)
    size = (tensor.shape[0], tensor.shape[1])
    if tensor.layout == torch.sparse_coo:
        rows, columns = tensor._indices()
        return from_coo(rows, columns, tensor._values(), size, None)
    if tensor.layout == torch.sparse_csr:
        return from_csr(tensor.crow_indices(), tensor.col_indices(), tensor.values(), size)
    if tensor.layout == torch.sparse_csc:
        pointer = tensor.ccol_indices().cpu().numpy()
        columns = np.repeat(np.arange(size[1]), np.diff(pointer))
        return from_coo(tensor.row_indices(), columns, tensor.values(), size, None)
    raise ValueError(f"tensor must be sparse_csr, sparse_csc, sparse_coo or strided, got {tensor.layout}")


def from_edge_index(edge_index: Tensor, edge_weight: Tensor | None, shape: int | tuple[int, int] | None) -> Parts:
    """See :meth:`SparseMatrix.from_edge_index`."""
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must be of shape (2, edges), got {tuple(edge_index.shape)}")
    if shape is None:
        shape = int(edge_index.max()) + 1 if edge_index.numel() else 0
    size = (shape, shape) if isinstance(shape, int) else shape
    return from_coo(edge_index[1], edge_index[0], edge_weight, size, None)


def to_torch(matrix: SparseMatrix, layout: torch.layout) -> Tensor:
    """See :meth:`SparseMatrix.to_torch`."""
    if layout == torch.strided:
        return matrix.to_dense()
    if layout == torch.sparse_coo:
        places = torch.stack([matrix.rows.to(torch.int64), matrix.indices.to(torch.int64)])
        return torch.sparse_coo_tensor(places, matrix.values, matrix.shape, is_coalesced=True, check_invariants=False)
    if layout == torch.sparse_csr:
        parts = matrix.indptr, matrix.indices, matrix.values
        with warnings.catch_warnings():  # torch says once that the layout is in beta
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(*parts, matrix.shape, check_invariants=False)
    raise ValueError(f"layout must be sparse_csr, sparse_coo or strided, got {layout}")


def _indices(name: str, given: Any) -> np.ndarray:
    """Any integers as a contiguous int64 array."""
    array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return np.ascontiguousarray(array, np.int64)


def _values(given: Any, count: int) -> Tensor:
    """Any numbers as a tensor of one of the value types; ones where there are none."""
    if given is None:
        return torch.ones(count)
    if isinstance(given, list | tuple):
        given = torch.as_tensor(given)
    if not isinstance(given, Tensor):
        array = np.asarray(given)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"values must be real numbers, got {array.dtype}")
        given = torch.from_numpy(np.ascontiguousarray(array))
    value = given.detach().cpu()
    if value.ndim != 1 or len(value) != count:
        raise ValueError(f"values must be of shape ({count},), one per entry, got {tuple(value.shape)}")
    if value.dtype in VALUE_TYPES:
        return value
    if value.is_complex():
        raise TypeError(f"values must be real numbers, got {value.dtype}")
    narrow = value.dtype == torch.bool or value.dtype.itemsize <= 2
    return value.to(torch.float32 if narrow else torch.float64)


def _beyond(index: np.ndarray) -> int:
    return int(index.max()) + 1 if len(index) else 0


def _index_dtype(wanted: torch.dtype | None, shape: tuple[int, int], nnz: int) -> torch.dtype:
    if wanted is not None and wanted not in INDEX_TYPES:
        raise TypeError(f"index_dtype must be int32 or int64, got {wanted}")
    fits = max(*shape, nnz) <= _LARGEST_INT32
    if wanted == torch.int32 and not fits:
        raise ValueError(f"index_dtype int32 cannot hold shape {shape} with {nnz} entries; take int64")
    return wanted or (torch.int32 if fits else torch.int64)
