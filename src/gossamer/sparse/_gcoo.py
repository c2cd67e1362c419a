"""Grouped coordinates (GCOO): for matrices that change every call, where making the format counts as well.

Groups of ``p`` consecutive rows hold their entries sorted by column, then row. Neighbouring entries then often share a
column, so that one row of the dense operand, once loaded, serves up to ``p`` output rows, which live in registers
(Shi et al., arXiv 2005.14469)::

    group of p = 4 rows:   (row, column):  (2, 0) (0, 3) (1, 3) (3, 3) (0, 7) ...
                                                  one load of dense row 3 for three entries

Making it from a dense matrix takes two sweeps and no sorting: count each group, then write it column by column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gossamer.core.jit import kernel, parallel_kernel
from gossamer.sparse._csr_loops import sorted_order
from gossamer.sparse._matrix import VALUE_TYPES, SparseMatrix

LARGEST_GROUP = 16


@dataclass(frozen=True, eq=False)
class GCOO:
    """A matrix of shape ``(m, k)`` in groups of ``p`` rows.

    values: ``(nnz,)``. rows, columns: int32 ``(nnz,)``, inside a group sorted by (column, row).
    starts: int32 ``(ceil(m / p) + 1,)``, where each group starts. counts: int32 ``(ceil(m / p),)``, entries of each.
    """

    shape: tuple[int, int]
    p: int
    values: Tensor
    rows: Tensor
    columns: Tensor
    starts: Tensor
    counts: Tensor

    @classmethod
    def from_dense(cls, dense: Tensor, p: int = 4, threshold: float = 0.0) -> Self:
        """Keep the entries of a dense ``(m, k)`` matrix on the CPU whose magnitude exceeds ``threshold``, and NaN.

        -0.0 counts as zero.

        Raises:
            ValueError: ``p`` is not from 1 to 16, ``threshold`` is negative, or ``dense`` is not a matrix on the CPU.
            TypeError: ``dense`` is not floating point.

        >>> GCOO.from_dense(torch.eye(8)).counts.tolist()
        [4, 4]
        """
        _check_p(p)
        if not isinstance(dense, Tensor) or dense.dtype not in VALUE_TYPES:
            raise TypeError(f"dense must be a tensor of floating point, got {getattr(dense, 'dtype', type(dense))}")
        if dense.ndim != 2 or dense.device.type != "cpu":
            raise ValueError(f"dense must be a matrix on the CPU, got shape {tuple(dense.shape)} on {dense.device}")
        if not threshold >= 0:
            raise ValueError(f"threshold must not be negative, got {threshold}")
        plain = dense.detach().contiguous()
        kept = (~(plain.abs() <= threshold)).numpy()
        shape = (dense.shape[0], dense.shape[1])
        counts = np.zeros(-(-shape[0] // p), np.int64)
        _count(kept, p, counts)
        starts = _starts(counts)
        rows, columns = (np.empty(starts[-1], np.int32) for _ in range(2))
        _fill(kept, p, starts, rows, columns)
        places = torch.from_numpy(rows).long(), torch.from_numpy(columns).long()
        return cls._of(shape, p, plain[places], rows, columns, starts, counts)

    @classmethod
    def from_matrix(cls, matrix: SparseMatrix, p: int = 4) -> Self:
        """Regroup the entries of compressed rows; stored zeros stay entries."""
        _check_p(p)
        row, column = matrix.rows.cpu().numpy().astype(np.int64), matrix.indices.cpu().numpy().astype(np.int64)
        groups = -(-matrix.shape[0] // p)
        by_column = sorted_order(column, row, matrix.shape[1], matrix.shape[0])
        order = by_column[np.argsort((row // p)[by_column], kind="stable")]
        counts = np.bincount(row // p, minlength=groups)
        values = matrix.values[torch.from_numpy(order).to(matrix.device)]
        rows, columns = row[order].astype(np.int32), column[order].astype(np.int32)
        return cls._of(matrix.shape, p, values, rows, columns, _starts(counts), counts)

    @classmethod
    def _of(
        cls, shape: tuple[int, int], p: int, values: Tensor, rows: np.ndarray, columns: np.ndarray, starts: np.ndarray,
        counts: np.ndarray,
    ) -> Self:  # fmt: skip
        arrays = rows, columns, starts.astype(np.int32), counts.astype(np.int32)
        return cls(shape, p, values, *(torch.from_numpy(array).to(values.device) for array in arrays))

    @property
    def nnz(self) -> int:
        """Stored entries."""
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: 12 an entry in float32, and 8 a group."""
        arrays = self.values, self.rows, self.columns, self.starts, self.counts
        return sum(array.numel() * array.element_size() for array in arrays)

    @property
    def dense_rows_read(self) -> int:
        """How many rows of the dense operand a product loads: the distinct columns of each group, summed."""
        if not self.nnz:
            return 0
        group = torch.repeat_interleave(torch.arange(len(self.counts), device=self.rows.device), self.counts.long())
        changes = (group.diff() != 0) | (self.columns.diff() != 0)
        return 1 + int(changes.sum())

    def to(self, device: str | torch.device) -> Self:
        """The same format on another device."""
        arrays = (self.values, self.rows, self.columns, self.starts, self.counts)
        return type(self)(self.shape, self.p, *(array.to(device) for array in arrays))

    def to_dense(self) -> Tensor:
        """The dense ``(m, k)`` matrix."""
        dense = torch.zeros(self.shape, dtype=self.values.dtype, device=self.values.device)
        dense[self.rows.long(), self.columns.long()] = self.values
        return dense

    def to_matrix(self) -> SparseMatrix:
        """The same entries as compressed rows."""
        return SparseMatrix.from_coo(self.rows, self.columns, self.values, self.shape)


def gcoo_spmm(matrix: GCOO, dense: Tensor) -> Tensor:
    """``matrix @ dense`` on the CPU, group by group, the same bits every time; summed in float32 (or float64).

    Raises:
        TypeError, ValueError: the operand is of another type, has not ``k`` rows, or is not on the CPU.
    """
    if dense.dtype != matrix.values.dtype:
        raise TypeError(f"dense must be {matrix.values.dtype} like the values, got {dense.dtype}")
    if dense.ndim != 2 or dense.shape[0] != matrix.shape[1]:
        raise ValueError(f"dense must be a matrix of {matrix.shape[1]} rows, got shape {tuple(dense.shape)}")
    if dense.device.type != "cpu" or matrix.values.device.type != "cpu":
        raise ValueError(f"dense and matrix must be on the CPU, got {dense.device} and {matrix.values.device}")
    kind = torch.float64 if dense.dtype == torch.float64 else torch.float32
    operand = dense.detach().to(kind).contiguous().numpy()
    out = np.zeros((matrix.shape[0], dense.shape[1]), operand.dtype)
    values = matrix.values.detach().to(kind).numpy()
    _multiply(matrix.starts.numpy(), matrix.rows.numpy(), matrix.columns.numpy(), values, operand, out)
    return torch.from_numpy(out).to(dense.dtype)


def spdm(sparse_in_dense: Tensor, dense: Tensor, threshold: float = 0.0, p: int = 4) -> Tensor:
    """The product of a mostly zero matrix, given densely, with a dense one: conversion and product in one call.

    >>> spdm(torch.eye(3), torch.ones(3, 1)).tolist()
    [[1.0], [1.0], [1.0]]
    """
    return gcoo_spmm(GCOO.from_dense(sparse_in_dense, p, threshold), dense)


def _check_p(p: int) -> None:
    if not 1 <= p <= LARGEST_GROUP:
        raise ValueError(f"p must be from 1 to {LARGEST_GROUP}, got {p}")


def _starts(counts: np.ndarray) -> np.ndarray:
    starts = np.concatenate([[0], np.cumsum(counts)])
    if starts[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"matrix must have fewer than 2^31 entries, got {starts[-1]}")
    return starts


@parallel_kernel
def _count(kept: Any, p: int, counts: Any) -> None:
    for group in prange(len(counts)):
        total = 0
        for row in range(group * p, min((group + 1) * p, kept.shape[0])):
            for column in range(kept.shape[1]):
                total += kept[row, column]
        counts[group] = total


@parallel_kernel
def _fill(kept: Any, p: int, starts: Any, rows: Any, columns: Any) -> None:
    for group in prange(len(starts) - 1):
        place = starts[group]
        first, last = group * p, min((group + 1) * p, kept.shape[0])
        for column in range(kept.shape[1]):
            for row in range(first, last):
                if kept[row, column]:
                    rows[place] = row
                    columns[place] = column
                    place += 1


@kernel
def _multiply(starts: Any, rows: Any, columns: Any, values: Any, dense: Any, out: Any) -> None:
    for place in range(starts[len(starts) - 1]):
        row, column, value = rows[place], columns[place], values[place]
        for j in range(dense.shape[1]):
            out[row, j] += value * dense[column, j]
