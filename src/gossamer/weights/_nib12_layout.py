"""The ``nib12`` layout: twelve bits a weight, decoded by a few vector instructions.

A bf16 weight is a sign, eight bits of exponent and seven of mantissa. Sign and mantissa are stored as they are, in
one byte; the exponent becomes a code of four bits (the layout is ours, after the public 12-bit formats):

* code 0: exponent 0, so that zeros and subnormal numbers cost no more than others (pruned weights stay cheap);
* codes 1..14: exponent ``base + code``, for the ``base`` that covers most weights;
* code 15, the escape: any other weight. It is stored whole in a list beside, its place says ``+-2**-126`` (its own
  sign, mantissa 0), and a product adds what that lacks. 0.03 % of normally distributed weights escape.

Arrays, for ``blocks = ceil(columns / 64)`` blocks of 64 weights a row, the last one padded with zeros:

=========== ====== ==================== ==========================================================================
``plane``   uint8  rows * blocks * 64   sign << 7 | mantissa
``codes``   uint8  rows * blocks * 32   byte ``i`` of a block: code of weight ``i`` | code of weight ``32 + i`` << 4
``starts``  int32  rows + 1             the escapes of row ``r`` are numbers ``starts[r]`` up to ``starts[r + 1]``
``columns`` int32  escapes              their columns, ascending in each row
``values``  uint16 escapes              their bf16 bit patterns
=========== ====== ==================== ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from gossamer.weights._lossless_arrays import as_array
from gossamer.weights._lossless_bits import best_window, exponent_counts
from gossamer.weights._nib12_loops import decode, encode, multiply, row_at_fault, threaded
from gossamer.weights._nib12_vector import BLOCK, BLOCK_HALF, CODES, Selected, Shuffled

_MOST_ESCAPES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Nib12:
    """A bf16 matrix of shape ``(rows, columns)`` in the ``nib12`` layout; the fields are described above."""

    layout: ClassVar[str] = "nib12"

    shape: tuple[int, int]
    base: int
    plane: np.ndarray
    codes: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    values: np.ndarray

    @classmethod
    def from_bits(cls, bits: np.ndarray) -> Self | None:
        """Encode bf16 bit patterns, uint16 ``(rows, columns)``; None if that would take no less room than they do."""
        rows, blocks = bits.shape[0], -(-bits.shape[1] // BLOCK)
        counts = exponent_counts(bits.reshape(-1))
        base = best_window(counts, CODES, first=1) - 1
        escapes = bits.size - int(counts[0] + counts[base + 1 : base + 1 + CODES].sum())
        size = rows * blocks * (BLOCK + BLOCK_HALF) + 4 * (rows + 1) + 6 * escapes
        if size >= bits.nbytes or escapes > _MOST_ESCAPES:
            return None
        stored = cls(
            (rows, bits.shape[1]),
            base,
            plane=np.empty(rows * blocks * BLOCK, np.uint8),
            codes=np.empty(rows * blocks * BLOCK_HALF, np.uint8),
            starts=np.empty(rows + 1, np.int32),
            columns=np.empty(escapes, np.int32),
            values=np.empty(escapes, np.uint16),
        )
        encode(bits, base, stored.plane, stored.codes, stored.starts, stored.columns, stored.values)
        return stored

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], meta: Mapping[str, str | int]) -> Self:
        """From stored arrays, without a copy; ``ValueError`` where they contradict each other or the shape."""
        (rows, width), base = shape, meta.get("base")
        blocks = -(-width // BLOCK)
        if not isinstance(base, int) or not 0 <= base <= 255 - CODES:
            raise ValueError(f"base must be an integer from 0 to {255 - CODES}, got {base!r}")
        columns = as_array(arrays, "columns", np.int32)
        stored = cls(
            shape,
            base,
            plane=as_array(arrays, "plane", np.uint8, rows * blocks * BLOCK),
            codes=as_array(arrays, "codes", np.uint8, rows * blocks * BLOCK_HALF),
            starts=as_array(arrays, "starts", np.int32, rows + 1),
            columns=columns,
            values=as_array(arrays, "values", np.uint16, columns.size),
        )
        starts = stored.starts
        if starts[0] != 0 or starts[-1] != columns.size or (np.diff(starts) < 0).any():
            raise ValueError(f"array 'starts' must ascend from 0 to the number of escapes, {columns.size}")
        row = row_at_fault(rows, width, base, stored.plane, stored.codes, starts, columns, stored.values)
        if row >= 0:
            raise ValueError(f"the codes of row {row} contradict the list of its escapes, or its padding is not zero")
        return stored

    def arrays(self) -> dict[str, np.ndarray]:
        """The stored arrays by name."""
        return {name: getattr(self, name) for name in ("plane", "codes", "starts", "columns", "values")}

    def meta(self) -> dict[str, str | int]:
        """The layout's name and ``base``."""
        return {"layout": self.layout, "base": self.base}

    def to_bits(self, out: np.ndarray) -> None:
        """Write the bf16 bit patterns into ``out``, uint16 ``(rows, columns)``."""
        decode(self.plane, self.codes, self.starts, self.columns, self.values, self.base, out)

    def product(self, count: int, threads: int, features: frozenset[str]) -> Callable[[np.ndarray, np.ndarray], None]:
        """``f(x, out)``: ``out = x @ W.T``, ``x`` float32 ``(count, columns)``, ``out`` float32 ``(count, rows)``."""
        kind = Shuffled if "avx2" in features else Selected
        variant = kind(runs=(0,) * {1: 4, 2: 2}.get(count, 1), batch=(0,) * count)
        stored = (self.plane, self.codes, self.starts, self.columns, self.values, self.base)
        if threads == 1:
            return lambda x, out: multiply(*stored, x, out, variant)
        kernel = threaded(variant)
        return lambda x, out: kernel(*stored, x, out, threads)
