"""The ``tbe`` layout: about 11.3 bits a weight, in the order in which tensor cores take them.

Tensor-core-aware triple bitmap encoding ("ZipServ", ASPLOS 2026): seven consecutive exponents cover
nearly all weights of a trained matrix. A weight whose exponent is ``base + code`` with code 1..7 is stored as three
bits in three bitmaps and one byte of sign and mantissa; code 0 means that the weight is stored whole. Ours are the
choice of the window (the one that covers most weights; the published code takes the first whose seven exponents all
occur) and that ``base`` may be -1, so that a window may begin at exponent 0.

The matrix is cut into tiles of 64x64, by rows of tiles. A tile is four warp tiles of 16x64 from top to bottom, each
of these four 16x16 from left to right, each of these four 8x8 by columns. In an 8x8 tile, bit ``8 * row + column``
of a bitmap belongs to a weight. Arrays:

============== ====== ==================== ===================================================
``plane1/2/3`` uint64 64 a tile            bits 0, 1, 2 of the codes, one word an 8x8 tile
``coded``      uint8  a multiple of 16     sign << 7 | mantissa of the weights with a code
``full``       uint16 a multiple of 8      bf16 patterns of the other weights
``offsets``    int32  2 * (tiles + 1)      where each tile begins in ``coded`` and in ``full``
``warps``      int32  8 * tiles            where each warp tile begins, from its tile's beginning
============== ====== ==================== ===================================================

Both streams run in the order of the bits; in each tile they are filled with zeros up to those multiples. Tiles reach
beyond the matrix; there they hold code 1, sign and mantissa 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from torch import Tensor

from gossamer.weights._lossless_arrays import as_array
from gossamer.weights._lossless_bits import best_window, exponent_counts
from gossamer.weights._tbe_loops import (
    CODED_STEP,
    FULL_STEP,
    SMALL_TILES,
    SPARE,
    count,
    decode,
    encode,
    multiply,
    multiply_in_threads,
)
from gossamer.weights._tbe_vector import CODES, TILE

_MOST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Tbe:
    """A bf16 matrix of shape ``(rows, columns)`` in the ``tbe`` layout; the fields are described above."""

    layout: ClassVar[str] = "tbe"

    shape: tuple[int, int]
    base: int
    plane1: np.ndarray
    plane2: np.ndarray
    plane3: np.ndarray
    coded: np.ndarray
    full: np.ndarray
    offsets: np.ndarray
    warps: np.ndarray

    @classmethod
    def from_bits(cls, bits: np.ndarray) -> Self | None:
        """Encode bf16 bit patterns, uint16 ``(rows, columns)``; None if that would take no less room than they do.

        Raises:
            ValueError: the matrix has so many weights that offsets of 32 bits cannot count them.
        """
        tiles = _tiles(bits.shape)
        if tiles * TILE * TILE > _MOST:
            raise ValueError(f"layout 'tbe' counts weights in 32 bits, shape {bits.shape} has too many; use 'nib12'")
        counts = exponent_counts(bits.reshape(-1))
        base = best_window(counts, CODES) - 1
        outside = bits.size - int(counts[base + 1 : base + 1 + CODES].sum())
        inside = tiles * TILE * TILE - outside
        one, two, three = (np.empty(tiles * SMALL_TILES, np.uint64) for _ in range(3))
        coded = np.empty(inside + tiles * (CODED_STEP - 1) + SPARE, np.uint8)
        full = np.empty(outside + tiles * (FULL_STEP - 1) + SPARE, np.uint16)
        offsets, warps = np.empty(2 * (tiles + 1), np.int32), np.empty(8 * tiles, np.int32)
        encode(bits, base, one, two, three, coded, full, offsets, warps)
        coded, full = coded[: offsets[-2]].copy(), full[: offsets[-1]].copy()
        stored = cls((bits.shape[0], bits.shape[1]), base, one, two, three, coded, full, offsets, warps)
        size = sum(array.nbytes for array in stored.arrays().values())
        return stored if size < bits.nbytes else None

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], meta: Mapping[str, str | int]) -> Self:
        """From stored arrays, without a copy; ``ValueError`` where they contradict each other or the shape."""
        tiles, base = _tiles(shape), meta.get("base")
        if not isinstance(base, int) or not -1 <= base <= 255 - CODES:
            raise ValueError(f"base must be an integer from -1 to {255 - CODES}, got {base!r}")
        one, two, three = (as_array(arrays, f"plane{i}", np.uint64, tiles * SMALL_TILES) for i in (1, 2, 3))
        offsets = as_array(arrays, "offsets", np.int32, 2 * (tiles + 1))
        warps = as_array(arrays, "warps", np.int32, 8 * tiles)
        implied, implied_warps = np.empty_like(offsets), np.empty_like(warps)
        count(one, two, three, implied, implied_warps)
        for name, array, right in (("offsets", offsets, implied), ("warps", warps, implied_warps)):
            if not np.array_equal(array, right):
                raise ValueError(f"array {name!r} contradicts the bitmaps from entry {(array != right).argmax()} on")
        coded = as_array(arrays, "coded", np.uint8, int(offsets[-2]))
        full = as_array(arrays, "full", np.uint16, int(offsets[-1]))
        stored = cls(shape, base, one, two, three, coded, full, offsets, warps)
        if {name: meta.get(name) for name in stored.meta()} != stored.meta():
            raise ValueError(f"meta must be {stored.meta()}, got {dict(meta)}")
        return stored

    def arrays(self) -> dict[str, np.ndarray]:
        """The stored arrays by name."""
        names = ("plane1", "plane2", "plane3", "coded", "full", "offsets", "warps")
        return {name: getattr(self, name) for name in names}

    def meta(self) -> dict[str, str | int]:
        """The layout's name, ``base``, and the longest parts of both streams that a tile takes, padding included."""
        longest_coded, longest_full = np.diff(self.offsets.reshape(-1, 2), axis=0).max(axis=0)
        return {
            "layout": self.layout,
            "base": self.base,
            "max_coded": int(longest_coded),
            "max_full": int(longest_full),
        }

    def to_bits(self, out: np.ndarray) -> None:
        """Write the bf16 bit patterns into ``out``, uint16 ``(rows, columns)``."""
        decode(self.plane1, self.plane2, self.plane3, self.coded, self.full, self.offsets, self.base, out)

    def product(self, count: int, threads: int, features: frozenset[str]) -> Callable[[np.ndarray, np.ndarray], None]:
        """``f(x, out)``: ``out = x @ W.T``, ``x`` float32 ``(count, columns)``, ``out`` float32 ``(count, rows)``.

        The code is the same for all processor features and any ``count``.
        """
        stored = (self.plane1, self.plane2, self.plane3, self.coded, self.full, self.offsets, self.base)
        if threads == 1:
            return lambda x, out: multiply(*stored, x, out)
        return lambda x, out: multiply_in_threads(*stored, x, out, threads)


def _tiles(shape: tuple[int, ...]) -> int:
    return -(-shape[0] // TILE) * -(-shape[1] // TILE)
