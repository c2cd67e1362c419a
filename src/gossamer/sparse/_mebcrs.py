"""ME-BCRS: a sparse matrix cut into 8x1 vectors and small blocks of them, without padding.

Tensor cores multiply tiles, and a tile is paid for in full. Swapping and transposing the operands (Shi et al.,
"FlashSparse", PPoPP 2025) makes the sparse tile 8 rows high instead of 16, which halves the zeros that are stored and
multiplied. The format holds exactly the non-empty 8x1 vectors of each window of 8 rows::

    window of 8 rows, vectors c0 < c1 < ... < c9, block width k = 8:
      block 0, row-major 8 x 8     the last block, row-major 8 x 2 (only what is there)
      [ c0 .. c7 ] row 0           [ c8 c9 ] row 0
      [ c0 .. c7 ] row 1           [ c8 c9 ] row 1        values of row p, vector i:
        ...                          ...                  8 row_pointers[w] + (i // k) 8 k + p r + i % k,
                                                          r = k in full blocks, v mod k in the last

Zeros inside a vector are stored, and a kernel that multiplies them would turn an infinity in the dense operand into NaN
in rows that have no entry there: ``slot`` (or ``edge_of_slot``) tells entries from filling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.core.jit import kernel
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._windows import find_windows

WIDTHS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
"""Vectors of a block, by the type of the values: the k of ``mma.m16n8k8`` and of ``m16n8k4`` (tf32)."""
_HEIGHTS = (8, 16)


@dataclass(frozen=True)
class Parts:
    """Windows cut into parts of bounded length, so that no thread block gets more than its share.

    start: int32 ``(parts + 1,)``, first vector of each part; a part ends where the next starts.
    window: int32 ``(parts,)``. atomic: int32 ``(parts,)``, 1 where the window has several parts, whose results add up.
    Windows without vectors have no part: what they should hold has to be zeroed beforehand.
    """

    start: Tensor
    window: Tensor
    atomic: Tensor


@dataclass(frozen=True, eq=False)
class MEBCRS:
    """A matrix of shape ``(m, k)`` in windows of ``height`` rows.

    row_pointers: int32 ``(ceil(m / height) + 1,)``, prefix sums of the windows' vectors (without padding).
    column_index: int32 ``(vectors,)``, ascending in each window.
    values: ``(height * vectors,)`` float16, bfloat16 or float32, blocks of ``width`` vectors as drawn above.
    slot: int64 ``(nnz,)``, where the entries of the CSR matrix stand in ``values``, in CSR order.
    height: 8; 16 is the baseline that earlier formats use, for comparison.
    """

    shape: tuple[int, int]
    height: int
    width: int
    row_pointers: Tensor
    column_index: Tensor
    values: Tensor
    slot: Tensor

    @classmethod
    def from_matrix(cls, matrix: SparseMatrix, dtype: torch.dtype | None = None, height: int = 8) -> Self:
        """Build the format where the matrix is: by merging rows on the CPU, by sorting on a GPU.

        dtype: of the values; that of ``matrix`` if left out.

        Raises:
            TypeError: tensor cores do not multiply ``dtype``.
            ValueError: ``height`` is neither 8 nor 16, or there are more vectors than int32 can count.

        >>> MEBCRS.from_matrix(SparseMatrix.from_dense(torch.eye(8))).values.numel()
        64
        """
        kind = dtype or matrix.dtype
        if kind not in WIDTHS:
            accepted = ", ".join(str(accepted).removeprefix("torch.") for accepted in WIDTHS)
            raise TypeError(f"dtype must be one of {accepted}, got {kind}; convert the matrix or give dtype")
        if height not in _HEIGHTS:
            raise ValueError(f"height must be 8 or 16, got {height}")
        find = _sorted_vectors if matrix.device.type == "cuda" else _merged_vectors
        offset, column, slot = find(matrix, height, WIDTHS[kind])
        if len(column) > torch.iinfo(torch.int32).max:
            raise ValueError(f"matrix must have fewer than 2^31 vectors, got {len(column)}")
        nothing = torch.empty(0, dtype=kind, device=matrix.device)
        arrays = offset.to(torch.int32), column.to(torch.int32), nothing, slot
        empty = cls(matrix.shape, height, WIDTHS[kind], *arrays)
        return empty.with_values(matrix.values)

    def with_values(self, values: Tensor) -> Self:
        """The same pattern with other values ``(nnz,)`` in CSR order; differentiable."""
        if tuple(values.shape) != tuple(self.slot.shape):
            raise ValueError(f"values must be of shape {tuple(self.slot.shape)}, got {tuple(values.shape)}")
        count = self.height * self.column_index.shape[0]
        filled = torch.zeros(count, dtype=self.values.dtype, device=self.slot.device)
        return replace(self, values=filled.index_put((self.slot,), values.to(self.values.dtype)))

    def entry_values(self) -> Tensor:
        """The values of the entries ``(nnz,)``, in CSR order."""
        return self.values[self.slot]

    def to_matrix(self) -> SparseMatrix:
        """The matrix that the format was built from; nothing else than the arrays here is used."""
        row, vector = (place.cpu() for place in self.places())
        indptr = torch.zeros(self.shape[0] + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row, minlength=self.shape[0]), 0, out=indptr[1:])
        columns = self.column_index.cpu()[vector]
        matrix = SparseMatrix(indptr.to(torch.int32), columns, self.entry_values().cpu(), self.shape)
        return matrix.to(self.values.device)

    def places(self) -> tuple[Tensor, Tensor]:
        """Row and vector of every entry, int64 ``(nnz,)`` each, in CSR order: read off ``slot``."""
        pointers = self.row_pointers.to(torch.int64)
        window_start = self.height * pointers
        window = torch.searchsorted(window_start, self.slot, right=True) - 1
        inside = self.slot - window_start[window]
        block = inside // (self.height * self.width)
        inside = inside % (self.height * self.width)
        width = (pointers.diff()[window] - block * self.width).clamp(max=self.width)
        row = window * self.height + inside // width
        return row, pointers[window] + block * self.width + inside % width

    def to(self, device: str | torch.device) -> Self:
        """The same format on another device."""
        arrays = {name: getattr(self, name).to(device) for name in ("row_pointers", "column_index", "values", "slot")}
        return replace(self, **arrays)

    def parts(self, blocks: int = 32) -> Parts:
        """Cut the windows into parts of at most ``blocks`` blocks."""
        if blocks < 1:
            raise ValueError(f"blocks must be at least 1, got {blocks}")
        pointers = self.row_pointers.cpu().numpy().astype(np.int64)
        length = blocks * self.width
        counts = -(-np.diff(pointers) // length)
        window = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(window)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = np.append(pointers[window] + number * length, pointers[-1])
        arrays = start, window, counts[window] > 1
        return Parts(*(torch.from_numpy(array.astype(np.int32)).to(self.values.device) for array in arrays))

    def edge_of_slot(self) -> Tensor:
        """The CSR number of the entry in every slot of ``values``, -1 for filling; int32 (int64 beyond 2^31 entries)."""
        count = self.slot.shape[0]
        kind = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
        template = torch.full((self.values.shape[0],), -1, dtype=kind, device=self.slot.device)
        template[self.slot] = torch.arange(count, dtype=kind, device=self.slot.device)
        return template

    @property
    def blocks(self) -> int:
        """Blocks of ``width`` vectors: how many tensor-core instructions 16 dense columns take."""
        return int((-(-self.row_pointers.to(torch.int64).diff() // self.width)).sum())

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel reads: pointers, columns and values, without the permutation."""
        arrays = self.row_pointers, self.column_index, self.values
        return sum(array.numel() * array.element_size() for array in arrays)


def _merged_vectors(matrix: SparseMatrix, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where windows start (in vectors), the vectors' columns, and the entries' places in ``values``, int64."""
    windows = find_windows(matrix, height)
    slot = np.empty(matrix.nnz, np.int64)
    _place(windows.offset, windows.window_of_vector, windows.vector, windows.row, height, width, slot)
    arrays = (torch.from_numpy(array) for array in (windows.offset, windows.column, slot))
    offset, column, places = (array.to(matrix.device) for array in arrays)
    return offset, column, places


def _sorted_vectors(matrix: SparseMatrix, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same in a handful of torch calls, of which the sort takes the time."""
    row, columns = matrix.rows.to(torch.int64), max(1, matrix.shape[1])
    keys, vector = torch.unique(row // height * columns + matrix.indices, return_inverse=True)
    window, count = keys // columns, -(-matrix.shape[0] // height)
    offset = torch.zeros(count + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(window, minlength=count), 0, out=offset[1:])
    start = offset[window[vector]]
    block = (vector - start) // width * width
    stride = (offset.diff()[window[vector]] - block).clamp(max=width)
    slot = height * (start + block) + row % height * stride + (vector - start) % width
    return offset, keys % columns, slot


@kernel
def _place(offset: Any, window_of: Any, vectors: Any, rows: Any, height: int, width: int, slot: Any) -> None:
    for entry in range(len(vectors)):
        window = window_of[vectors[entry]]
        i = vectors[entry] - offset[window]
        count = offset[window + 1] - offset[window]
        block = i // width
        stride = min(width, count - block * width)
        slot[entry] = height * (offset[window] + block * width) + rows[entry] * stride + i % width
