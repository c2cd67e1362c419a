"""The arrays of a hybrid partition: blocks with bitmaps for tensor cores, parts of rows for CUDA cores.

Everything here is counted from the vectors of 8-row windows; see :mod:`gossamer.sparse._hybrid` for the idea.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.sparse._csr_loops import sorted_order
from gossamer.sparse._windows import Windows

HEIGHT = 8
GROUP_BLOCKS = 32
PART_LENGTH = 32
SHORT = 3


@dataclass(frozen=True)
class TensorPart:
    """Kept vectors, window by window, as blocks of ``width`` columns.

    row_offset: int32 ``(groups + 1,)``, first block of each group; a window is cut into groups of at most 32 blocks.
    window: int32 ``(groups,)``. atomic: int32 ``(groups,)``, 1 where another unit writes a row of the window too.
    block: int32 ``(blocks + 1,)``, where each block's values start.
    column: int32 ``(width * blocks,)``, -1 for padding, which must not be read.
    bitmap: width 4: int32 ``(blocks,)``, bit ``4 row + column``. width 16: int64 ``(2 * blocks,)``, for the left and the
        right 8 columns, bit ``8 row + column``.
    entry: int64 ``(entries,)``, the CSR number of every value, in the order of blocks, halves and bits.
    """

    row_offset: np.ndarray
    window: np.ndarray
    atomic: np.ndarray
    block: np.ndarray
    column: np.ndarray
    bitmap: np.ndarray
    entry: np.ndarray


@dataclass(frozen=True)
class RowParts:
    """What is left of rows, cut into parts.

    row_offset: int32 ``(parts + 1,)``. row: int32 ``(parts,)``. atomic: int32 ``(parts,)``, 1 where another unit writes
    the row too. column: int32 ``(entries,)``. entry: int64 ``(entries,)``, CSR numbers, ascending.
    """

    row_offset: np.ndarray
    row: np.ndarray
    atomic: np.ndarray
    column: np.ndarray
    entry: np.ndarray


def kept_by_vectors(windows: Windows, theta: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the vectors with ``theta`` entries or more: the block and the column in it of every vector, or -1."""
    kept = windows.count >= theta
    return _blocks_of(np.flatnonzero(kept), windows, width)


def kept_by_blocks(windows: Windows, theta: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The same, judging whole blocks: each window's vectors, fullest first, ``width`` at a time, columns ascending."""
    window = windows.window_of_vector
    fullest = np.lexsort((windows.column, -windows.count, window))
    inside = np.arange(len(window)) - windows.offset[window]
    candidate = np.empty(len(window), np.int64)
    candidate[fullest] = window * (1 + len(window)) + inside // width
    number, block = np.unique(candidate, return_inverse=True)
    entries = np.bincount(block, windows.count, minlength=len(number))
    kept = np.flatnonzero(entries[block] >= theta)
    kept = kept[np.lexsort((windows.column[kept], candidate[kept]))]
    first = np.flatnonzero(np.diff(candidate[kept], prepend=-1))
    lengths = np.diff(np.append(first, len(kept)))
    block_of, place_of = (np.full(len(window), -1, np.int64) for _ in range(2))
    block_of[kept] = np.repeat(np.arange(len(first)), lengths)
    place_of[kept] = np.arange(len(kept)) - np.repeat(first, lengths)
    return block_of, place_of


def _blocks_of(kept: np.ndarray, windows: Windows, width: int) -> tuple[np.ndarray, np.ndarray]:
    window = windows.window_of_vector[kept]
    counts = np.bincount(window, minlength=len(windows.offset) - 1)
    inside = np.arange(len(kept)) - (np.cumsum(counts) - counts)[window]
    blocks = -(-counts // width)
    block_of, place_of = (np.full(len(windows.column), -1, np.int64) for _ in range(2))
    block_of[kept] = (np.cumsum(blocks) - blocks)[window] + inside // width
    place_of[kept] = inside % width
    return block_of, place_of


def tensor_part(windows: Windows, block_of: np.ndarray, place_of: np.ndarray, width: int) -> TensorPart:
    """The arrays of the kept vectors. ``atomic`` knows only of groups of one window so far."""
    kept = np.flatnonzero(block_of >= 0)
    blocks = int(block_of.max(initial=-1)) + 1
    window_of_block = np.zeros(blocks, np.int64)
    window_of_block[block_of[kept]] = windows.window_of_vector[kept]
    column = np.full(blocks * width, -1, np.int32)
    column[block_of[kept] * width + place_of[kept]] = windows.column[kept]
    entry = np.flatnonzero(block_of[windows.vector] >= 0)
    vector = windows.vector[entry]
    half = min(width, HEIGHT)
    word = block_of[vector] * (width // half) + place_of[vector] // half
    bit = windows.row[entry] * half + place_of[vector] % half
    words = blocks * (width // half)
    order = sorted_order(word, bit, words, HEIGHT * half)
    bitmap = np.zeros(words, np.uint64)
    np.bitwise_or.at(bitmap, word, np.uint64(1) << bit.astype(np.uint64))
    sizes = np.bincount(block_of[vector], minlength=blocks)
    groups = -(-np.bincount(window_of_block, minlength=len(windows.offset) - 1) // GROUP_BLOCKS)
    window = np.repeat(np.arange(len(groups)), groups)
    first = np.searchsorted(window_of_block, window)
    first += GROUP_BLOCKS * (np.arange(len(window)) - np.repeat(np.cumsum(groups) - groups, groups))
    return TensorPart(
        row_offset=np.append(first, blocks).astype(np.int32),
        window=window.astype(np.int32),
        atomic=(groups[window] > 1).astype(np.int32),
        block=_starts(sizes),
        column=column,
        bitmap=bitmap.astype(np.uint32).view(np.int32) if half == 4 else bitmap.view(np.int64),
        entry=entry[order],
    )


def row_parts(entry: np.ndarray, row: np.ndarray, column: np.ndarray, rows: int) -> tuple[RowParts, RowParts]:
    """Cut what is left of each row: parts of 32 entries (long), and rows or remainders of at most 3 (short).

    entry, row, column: of the left-over entries, in CSR order. ``atomic`` knows only of parts of one row so far.
    """
    counts = np.bincount(row, minlength=rows)
    inside = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    rest = counts % PART_LENGTH
    whole = counts // PART_LENGTH
    is_short = (inside // PART_LENGTH == whole[row]) & (rest[row] <= SHORT)
    long_parts = whole + (rest > SHORT)
    has_short = (rest > 0) & (rest <= SHORT)
    several = long_parts + has_short > 1
    long_row = np.repeat(np.arange(rows), long_parts)
    number = np.arange(len(long_row)) - np.repeat(np.cumsum(long_parts) - long_parts, long_parts)
    sizes = np.where(number < whole[long_row], PART_LENGTH, rest[long_row])
    short_row = np.flatnonzero(has_short)

    def parts(which: np.ndarray, part_row: np.ndarray, part_size: np.ndarray) -> RowParts:
        atomic = several[part_row].astype(np.int32)
        columns = column[which].astype(np.int32)
        return RowParts(_starts(part_size), part_row.astype(np.int32), atomic, columns, entry[which])

    return parts(~is_short, long_row, sizes), parts(is_short, short_row, rest[short_row])


def with_exact_flags(
    tensor: TensorPart, long: RowParts, short: RowParts, rows: int
) -> tuple[TensorPart, RowParts, RowParts]:
    """Set ``atomic`` wherever two units write one row. A tensor-core group writes all rows of its window."""
    windows = -(-rows // HEIGHT)
    by_tensor = np.bincount(tensor.window, minlength=windows)
    by_rows = np.zeros(windows, np.int64)
    for parts in (long, short):
        by_rows += np.bincount(parts.row // HEIGHT, minlength=windows)
    flags = ((by_tensor > 1) | (by_rows > 0))[tensor.window]
    mixed = [parts.atomic | (by_tensor[parts.row // HEIGHT] > 0) for parts in (long, short)]
    return (
        TensorPart(**{**vars(tensor), "atomic": flags.astype(np.int32)}),
        RowParts(**{**vars(long), "atomic": mixed[0].astype(np.int32)}),
        RowParts(**{**vars(short), "atomic": mixed[1].astype(np.int32)}),
    )


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
