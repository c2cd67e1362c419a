"""Weights in fragment order put one below the other, and taken apart again: their records need no change for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gossamer.weights._fragments import ROWS, UNIT, FragmentWeight

Fragments = TypeVar("Fragments", bound=FragmentWeight)


def stack_fragments(weights: Sequence[Fragments]) -> Fragments | None:
    """Matrices ``(out_i, in)`` one below the other as one weight; None where they do not fit together.

    They do if all are of one format, type and number of columns and, the last aside, have a multiple of 16 rows.
    Records are put one after another, and encoded anew only where weights were encoded for different ranges of numbers.

    >>> from gossamer.weights import FragmentBitmapWeight
    >>> one = FragmentBitmapWeight.from_dense(torch.eye(32, 64).half())
    >>> stack_fragments([one, one]).shape
    (64, 64)
    """
    alike = {(type(weight), weight.shape[1], weight.dtype) for weight in weights}
    if len(alike) != 1 or any(weight.shape[0] % ROWS for weight in weights[:-1]):
        return None
    if len({weight.constant for weight in weights}) > 1:
        try:
            return type(weights[0]).from_dense(torch.cat([weight.to_dense() for weight in weights]))
        except ValueError:  # their numbers differ too much for one range
            return None
    ends = torch.tensor([int(weight.offsets[-1]) for weight in weights]).cumsum(0).tolist()
    if ends[-1] >= 1 << 31:
        return None
    starts = [0, *ends[:-1]]
    offsets = [weight.offsets[:-1] + start for weight, start in zip(weights, starts, strict=True)]
    offsets.append(weights[-1].offsets[-1:] + starts[-1])
    fields: Any = {
        "shape": (sum(weight.shape[0] for weight in weights), weights[0].shape[1]),
        "records": torch.cat([weight.records for weight in weights]),
        "offsets": torch.cat(offsets),
        "longest": max(weight.longest for weight in weights),
    }
    return replace(weights[0], **fields)  # type: ignore[type-var]  # every format is a dataclass


def fragment_rows(weight: Fragments, start: int, stop: int) -> Fragments:
    """Some rows of a matrix as a weight that shares its records.

    Raises:
        ValueError: they are no rows of the matrix, or do not begin and end between strips of 16 (or at its end).
    """
    if not 0 <= start < stop <= weight.shape[0] or start % ROWS or stop % ROWS and stop != weight.shape[0]:
        raise ValueError(f"rows must be whole strips of {ROWS} below {weight.shape[0]}, got {start} to {stop}")
    offsets = weight.offsets[start // ROWS * weight.tiles : -(-stop // ROWS) * weight.tiles + 1]
    first, last = int(offsets[0]) * (UNIT // 2), int(offsets[-1]) * (UNIT // 2)
    fields: Any = {
        "shape": (stop - start, weight.shape[1]),
        "records": weight.records[first:last],
        "offsets": offsets - offsets[0],
        "longest": int(offsets.diff().max()),
    }
    return replace(weight, **fields)  # type: ignore[type-var]  # every format is a dataclass
