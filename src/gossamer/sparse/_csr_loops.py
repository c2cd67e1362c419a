"""Loops over compressed rows: sorting coordinates, checking, transposing. O(non-zeros + rows + columns), no comparisons.

Arrays are NumPy's; whoever calls has checked their types and lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.core.jit import kernel

SOUND, BAD_START, NOT_MONOTONE, OUT_OF_RANGE, NOT_SORTED = range(5)


@kernel
def check_rows(indptr: Any, indices: Any, columns: int) -> tuple[int, int]:
    """What is wrong with a CSR pattern, and at which row: one of the constants above, and a row number."""
    if indptr[0] != 0 or indptr[len(indptr) - 1] != len(indices):
        return BAD_START, 0
    for row in range(len(indptr) - 1):
        if indptr[row + 1] < indptr[row] or indptr[row + 1] > len(indices):
            return NOT_MONOTONE, row
    for row in range(len(indptr) - 1):
        before = np.int64(-1)
        for place in range(indptr[row], indptr[row + 1]):
            column = indices[place]
            if column < 0 or column >= columns:
                return OUT_OF_RANGE, row
            if column <= before:
                return NOT_SORTED, row
            before = column
    return SOUND, 0


@kernel
def sorted_order(rows: Any, columns: Any, row_count: int, column_count: int) -> Any:
    """The stable order of coordinates by (row, column): two counting sorts. int64 ``(nnz,)``."""
    return _by_key(rows, _by_key(columns, np.arange(len(columns)), column_count), row_count)


@kernel
def _by_key(keys: Any, order: Any, count: int) -> Any:
    start = np.zeros(count + 1, np.int64)
    for key in keys:
        start[key + 1] += 1
    for key in range(count):
        start[key + 1] += start[key]
    out = np.empty(len(order), np.int64)
    for place in order:
        key = keys[place]
        out[start[key]] = place
        start[key] += 1
    return out


@kernel
def groups_of(rows: Any, columns: Any, order: Any) -> tuple[Any, int]:
    """Number the distinct coordinates along ``order``: the number of each entry, and how many there are."""
    group = np.empty(len(order), np.int64)
    count = 0
    for i in range(len(order)):
        if i and (rows[order[i]] != rows[order[i - 1]] or columns[order[i]] != columns[order[i - 1]]):
            count += 1
        group[i] = count
    return group, count + 1 if len(order) else 0


@kernel
def row_of_entries(indptr: Any, rows: Any) -> None:
    """Write the row number of every entry into ``rows``, ``(nnz,)``."""
    for row in range(len(indptr) - 1):
        rows[indptr[row] : indptr[row + 1]] = row


@kernel
def transpose_rows(indptr: Any, indices: Any, columns: int, t_indptr: Any, t_indices: Any, order: Any) -> None:
    """The pattern of the transposed matrix, and the place in this one that every entry of it comes from.

    t_indptr: zeros ``(columns + 1,)``. t_indices: ``(nnz,)``. order: int64 ``(nnz,)``.
    """
    for column in indices:
        t_indptr[column + 1] += 1
    for column in range(columns):
        t_indptr[column + 1] += t_indptr[column]
    free = t_indptr[:columns].copy()
    for row in range(len(indptr) - 1):
        for place in range(indptr[row], indptr[row + 1]):
            target = free[indices[place]]
            free[indices[place]] = target + 1
            t_indices[target] = row
            order[target] = place
