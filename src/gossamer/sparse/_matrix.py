"""The sparse matrix that the whole room works on: compressed rows (CSR), always sorted, never with duplicates.

Whatever a matrix comes from (coordinates in any order, SciPy, torch, PyTorch Geometric, files), it is brought into
this one form and checked once, so that no kernel has to ask again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.core.files import load_arrays, save_arrays
from gossamer.sparse import _csr_loops as loops

if TYPE_CHECKING:
    import scipy.sparse

VALUE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_TYPES = (torch.int32, torch.int64)
_FILE_VERSION = 1


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A sparse matrix of shape ``(m, k)`` in CSR.

    indptr: int32 or int64 ``(m + 1,)``, where each row's entries start.
    indices: the same type, ``(nnz,)``, the column of every entry; strictly ascending inside a row.
    values: float16, bfloat16, float32 or float64 ``(nnz,)``; stored zeros are entries like any other.

    Raises:
        TypeError: an array is no tensor or of another type.
        ValueError: the arrays contradict each other or the shape; :meth:`from_csr` also takes unsorted rows.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor
    shape: tuple[int, int]
    _memo: dict[str, Any] = field(default_factory=dict, repr=False)
    """What was computed from the pattern once (the transpose, plans); shared by all values on one pattern."""

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            _check(self)

    @classmethod
    def from_coo(
        cls, rows: Any, columns: Any, values: Any = None, shape: tuple[int, int] | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> Self:  # fmt: skip
        """From coordinates in any order; values of equal coordinates are added up.

        rows, columns: integers ``(nnz,)``. values: ``(nnz,)``, ones in float32 if left out. shape: the smallest that
        holds all coordinates if left out. index_dtype: int32 where everything fits if left out. The work is done on
        the CPU; the matrix is then where the tensors came from.

        >>> SparseMatrix.from_coo([1, 0, 1], [2, 0, 2], [1.0, 2.0, 3.0]).to_dense().tolist()
        [[2.0, 0.0, 0.0], [0.0, 0.0, 4.0]]
        """
        from gossamer.sparse._convert import from_coo

        return cls(*from_coo(rows, columns, values, shape, index_dtype))

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, values: Any = None, shape: tuple[int, int] | None = None) -> Self:
        """From compressed rows whose columns may be unsorted or repeated; repeated ones are added up."""
        from gossamer.sparse._convert import from_csr

        return cls(*from_csr(indptr, indices, values, shape))

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """The entries of a dense matrix that are not zero (NaN is not zero, -0.0 is).

        >>> SparseMatrix.from_dense(torch.eye(3)).nnz
        3
        """
        from gossamer.sparse._convert import from_dense

        return cls(*from_dense(dense))

    @classmethod
    def from_scipy(cls, matrix: scipy.sparse.sparray | scipy.sparse.spmatrix) -> Self:
        """From any SciPy sparse matrix. Integers and truth values become float32, or float64 beyond 16 bits."""
        from gossamer.sparse._convert import from_scipy

        return cls(*from_scipy(matrix))

    @classmethod
    def from_torch(cls, tensor: Tensor) -> Self:
        """From a torch tensor of layout ``sparse_csr``, ``sparse_csc``, ``sparse_coo`` or ``strided``."""
        from gossamer.sparse._convert import from_torch

        return cls(*from_torch(tensor))

    @classmethod
    def from_edge_index(
        cls, edge_index: Tensor, edge_weight: Tensor | None = None, shape: int | tuple[int, int] | None = None
    ) -> Self:
        """From PyTorch Geometric's ``edge_index`` ``(2, edges)``: sources, then targets.

        Row = target and column = source, so that ``spmm(matrix, features)`` sums over incoming edges as PyG does.
        shape: ``(targets, sources)``, or the number of nodes.
        """
        from gossamer.sparse._convert import from_edge_index

        return cls(*from_edge_index(edge_index, edge_weight, shape))

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return self.indices.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where all three arrays are."""
        return self.values.device

    @property
    def density(self) -> float:
        """Stored entries over all entries; 0 for an empty shape."""
        return self.nnz / max(1, self.shape[0] * self.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return sum(array.numel() * array.element_size() for array in (self.indptr, self.indices, self.values))

    @property
    def rows(self) -> Tensor:
        """The row of every entry, of the type of ``indices``, ``(nnz,)``."""
        counts = self.indptr.diff().to(torch.int64)
        rows = torch.arange(self.shape[0], dtype=self.indices.dtype, device=self.device)
        return torch.repeat_interleave(rows, counts, output_size=self.nnz)

    def with_values(self, values: Tensor) -> SparseMatrix:
        """The same pattern with other values ``(nnz,)``; what was planned for the pattern is kept.

        Raises:
            ValueError: there are not ``nnz`` values, or they are elsewhere.
        """
        if tuple(values.shape) != (self.nnz,):
            raise ValueError(f"values must be of shape ({self.nnz},), one per entry, got {tuple(values.shape)}")
        if values.device != self.device:
            raise ValueError(f"values must be on {self.device} like the pattern, got {values.device}")
        return self._like(self.indptr, self.indices, values, self._memo)

    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> SparseMatrix:
        """The same matrix on another device or with values of another type."""
        values = self.values.to(device=device, dtype=dtype)
        if values.device == self.device:
            return self.with_values(values)
        return self._like(self.indptr.to(device), self.indices.to(device), values, {})

    def transposed(self) -> SparseMatrix:
        """The matrix of shape ``(k, m)``; its pattern is computed once and remembered."""
        from gossamer.sparse._ops import transposed_pattern

        indptr, indices, order = transposed_pattern(self)
        return SparseMatrix(indptr, indices, self.values[order], (self.shape[1], self.shape[0]))

    def to_dense(self) -> Tensor:
        """The dense ``(m, k)`` matrix."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        dense[self.rows.to(torch.int64), self.indices.to(torch.int64)] = self.values
        return dense

    def to_scipy(self) -> scipy.sparse.csr_array:
        """SciPy's ``csr_array``; half types become float32. The arrays are shared where nothing was converted."""
        from scipy.sparse import csr_array

        values = self.values.detach().cpu()
        values = values if values.dtype in (torch.float32, torch.float64) else values.float()
        return csr_array((values.numpy(), self.indices.cpu().numpy(), self.indptr.cpu().numpy()), shape=self.shape)

    def to_torch(self, layout: torch.layout = torch.sparse_csr) -> Tensor:
        """A torch tensor of layout ``sparse_csr``, ``sparse_coo`` or ``strided``."""
        from gossamer.sparse._convert import to_torch

        return to_torch(self, layout)

    def to_edge_index(self) -> tuple[Tensor, Tensor]:
        """PyG's ``edge_index`` int64 ``(2, nnz)`` (sources, then targets) and the edge weights, by target."""
        return torch.stack([self.indices.to(torch.int64), self.rows.to(torch.int64)]), self.values

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one checksummed safetensors file, atomically."""
        arrays = {"indptr": self.indptr.cpu(), "indices": self.indices.cpu(), "values": self.values.detach().cpu()}
        rows, columns = self.shape
        about = {"gossamer_sparse": str(_FILE_VERSION), "rows": str(rows), "columns": str(columns)}
        save_arrays(path, arrays, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file is damaged, holds something else, or a newer version.
        """
        arrays, about = load_arrays(path)
        if "gossamer_sparse" not in about:
            raise ValueError(f"{os.fspath(path)} holds no sparse matrix")
        if int(about["gossamer_sparse"]) > _FILE_VERSION:
            raise ValueError(
                f"{os.fspath(path)} is of version {about['gossamer_sparse']}, this Gossamer reads up to "
                f"{_FILE_VERSION}: upgrade it"
            )
        return cls(arrays["indptr"], arrays["indices"], arrays["values"], (int(about["rows"]), int(about["columns"])))

    def _like(self, indptr: Tensor, indices: Tensor, values: Tensor, memo: dict[str, Any]) -> SparseMatrix:
        """A matrix on arrays that are known to be sound."""
        if torch.compiler.is_compiling():
            return SparseMatrix(indptr, indices, values, self.shape, memo)
        _check_values(values)
        matrix = object.__new__(SparseMatrix)
        for name, value in (("indptr", indptr), ("indices", indices), ("values", values), ("shape", self.shape)):
            object.__setattr__(matrix, name, value)
        object.__setattr__(matrix, "_memo", memo)
        return matrix


def check_shape(shape: Any) -> tuple[int, int]:
    """``shape`` as two non-negative integers, or ``ValueError``."""
    try:
        rows, columns = (int(size) for size in shape)
    except (TypeError, ValueError):
        raise ValueError(f"shape must be two numbers (rows, columns), got {shape!r}") from None
    if rows < 0 or columns < 0:
        raise ValueError(f"shape must not be negative, got {(rows, columns)}")
    return rows, columns


def _check(matrix: SparseMatrix) -> None:
    """Refuse arrays that are no canonical CSR."""
    indptr, indices, values = matrix.indptr, matrix.indices, matrix.values
    for name, array in (("indptr", indptr), ("indices", indices), ("values", values)):
        if not isinstance(array, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(array).__name__}")
        if array.ndim != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(array.shape)}")
        if array.device != values.device:
            raise ValueError(f"{name} must be on {values.device} like the values, got {array.device}")
    for name, array in (("indptr", indptr), ("indices", indices)):
        if array.dtype not in INDEX_TYPES:
            raise TypeError(f"{name} must be int32 or int64, got {array.dtype}")
    if indptr.dtype != indices.dtype:
        raise TypeError(f"indptr and indices must have one type, got {indptr.dtype} and {indices.dtype}")
    _check_values(values)
    rows, columns = check_shape(matrix.shape)
    object.__setattr__(matrix, "shape", (rows, columns))
    if len(indptr) != rows + 1:
        raise ValueError(f"indptr must have {rows + 1} entries for {rows} rows, got {len(indptr)}")
    if len(indices) != len(values):
        raise ValueError(f"indices and values must be equally long, got {len(indices)} and {len(values)}")
    if max(columns, rows, len(values)) > torch.iinfo(indices.dtype).max:
        raise ValueError(f"indices of {indices.dtype} cannot hold shape {(rows, columns)} with {len(values)} entries")
    check_pattern(indptr.cpu().contiguous().numpy(), indices.cpu().contiguous().numpy(), columns)


def _check_values(values: Tensor) -> None:
    if values.dtype not in VALUE_TYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in VALUE_TYPES)
        raise TypeError(f"values must be one of {accepted}, got {values.dtype}; convert them with values.to(...)")


def check_pattern(indptr: np.ndarray, indices: np.ndarray, columns: int) -> None:
    """``ValueError`` that says which row of a pattern is not sound."""
    state, row = loops.check_rows(indptr, indices, columns)
    if state == loops.BAD_START:
        raise ValueError(f"indptr must run from 0 to {len(indices)}, got {indptr[0]} to {indptr[-1]}")
    if state == loops.NOT_MONOTONE:
        raise ValueError(
            f"indptr must not decrease, but row {row} ends at {indptr[row + 1]} and starts at {indptr[row]}"
        )
    if state == loops.OUT_OF_RANGE:
        raise ValueError(f"indices must lie in [0, {columns}), but row {row} has others")
    if state == loops.NOT_SORTED:
        raise ValueError(
            f"indices must ascend strictly in every row, but row {row} does not; see SparseMatrix.from_csr"
        )
