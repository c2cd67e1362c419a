"""Pruned bf16 weights without their zeros, the others bit-exact with coded exponents: two savings at once.

A zero costs one bit of a bitmap, every other weight 11 to 12 bits more: at 50 % zeros about 6.7 to 7 bits a weight,
where a bitmap alone takes 9 and a lossless code alone 12. Coding a pruned matrix as it is would pay for each zero,
whose exponent lies outside of any window; here the coder never sees one. Only the pattern 0x0000 is left out: -0.0,
NaN and all others come back bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.weights._bitmap import BitmapWeight
from gossamer.weights._format import Matvec, Scalar, WeightFormat, check_matrix
from gossamer.weights._lossless import LAYOUTS
from gossamer.weights._lossless_arrays import as_array, as_tensor
from gossamer.weights._lossless_raw import Raw
from gossamer.weights._nib12_layout import Nib12
from gossamer.weights._nib12_vector import BLOCK, BLOCK_HALF
from gossamer.weights._tbe_layout import Tbe

WIDTH = 4096
"""The non-zero weights, row after row, are cut into lines of so many."""
_SPARE = 32  # values that a bitmap kernel may read beyond the last
_LINES = {"nib12": 16, "tbe": 1024}  # lines that a product decodes at a time
_STEP = {"nib12": 1, "tbe": 64}  # lines that can be decoded apart from others


@dataclass(frozen=True, eq=False)
class SparseLosslessWeight(WeightFormat):
    """A pruned bf16 matrix of shape ``(out, in)``, bit-exact.

    bitmap: uint64 ``(out * ceil(in / 64),)``, a bit per entry, set where its pattern is not 0x0000.
    row_offset: int64 ``(out + 1,)``, where each row's non-zero weights begin.
    stored: the non-zero weights in lines of 4096, in the layout :class:`Nib12` or :class:`Tbe`, the last line filled
        with the first weights again; or one line as they are (:class:`Raw`) where coding would not shrink them.
    """

    name: ClassVar[str] = "sparse-lossless"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    bitmap: np.ndarray
    row_offset: np.ndarray
    stored: Nib12 | Tbe | Raw
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def from_dense(cls, weight: Tensor, layout: str = "nib12") -> Self:  # type: ignore[override]
        """Compress ``weight``, bf16 ``(out, in)`` on the CPU; ``layout`` "nib12" multiplies faster, "tbe" is smaller.

        Raises:
            TypeError: ``weight`` is not bf16.
            ValueError: it is not a non-empty matrix on the CPU, or ``layout`` is neither of the two.

        >>> weight = torch.randn(64, 4096).to(torch.bfloat16).masked_fill(torch.rand(64, 4096) < 0.5, 0)
        >>> compressed = SparseLosslessWeight.from_dense(weight)
        >>> torch.equal(compressed.to_dense(), weight), round(compressed.bits_per_weight)
        (True, 7)
        """
        check_matrix(weight, (torch.bfloat16,))
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        bits = weight.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
        rows, columns = bits.shape
        present = np.zeros((rows, -(-columns // 64) * 64), bool)
        np.not_equal(bits, 0, out=present[:, :columns])
        row_offset = np.zeros(rows + 1, np.int64)
        np.cumsum(np.count_nonzero(present, axis=1), out=row_offset[1:])
        bitmap = np.packbits(present, bitorder="little").view(np.uint64)
        return cls((rows, columns), bitmap, row_offset, _coded(bits[present[:, :columns]], layout))

    @property
    def layout(self) -> str:
        """How the non-zero weights are stored: "nib12", "tbe" or "raw"."""
        return self.stored.layout

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, everything included, for each weight of the matrix, zero or not."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def density(self) -> float:
        """Share of entries whose pattern is not 0x0000."""
        return int(self.row_offset[-1]) / (self.shape[0] * self.shape[1])

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense bf16 matrix, written into ``out`` if given: contiguous bf16 ``(out, in)``."""
        return self._as_bitmap().to_dense(out)

    def arrays(self) -> dict[str, Tensor]:
        """``bitmap``, ``row_offset`` and the arrays of the layout."""
        own = {"bitmap": self.bitmap, "row_offset": self.row_offset}
        return {name: as_tensor(array) for name, array in {**own, **self.stored.arrays()}.items()}

    def meta(self) -> dict[str, Scalar]:
        """The layout's name and its scalars."""
        return self.stored.meta()

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """The inverse of :meth:`arrays` and :meth:`meta`; ``ValueError`` if they contradict each other."""
        if dtype != torch.bfloat16:
            raise ValueError(f"dtype must be bfloat16, got {dtype}")
        bitmap, row_offset = as_array(arrays, "bitmap", np.uint64), as_array(arrays, "row_offset", np.int64)
        if row_offset.size != shape[0] + 1 or not 0 <= row_offset[-1] <= shape[0] * shape[1]:
            raise ValueError(f"row_offset must have {shape[0] + 1} entries and count the weights of a matrix {shape}")
        kinds: dict[str, type[Nib12 | Tbe | Raw]] = {kind.layout: kind for kind in (Nib12, Tbe, Raw)}
        layout, count = str(meta.get("layout")), int(row_offset[-1])
        if layout not in kinds:
            raise ValueError(f"layout must be one of {', '.join(kinds)}, got {layout!r}")
        lines = (1, count) if layout == "raw" else (-(-count // WIDTH), WIDTH)
        if lines[0] < 1:
            raise ValueError(f"layout {layout!r} needs at least one weight, row_offset counts none")
        stored = kinds[layout].from_arrays(arrays, lines, meta)
        unknown = set(arrays) - set(stored.arrays()) - {"bitmap", "row_offset"}
        if unknown:
            raise ValueError(f"layout {layout!r} has no arrays named {', '.join(sorted(unknown))}")
        weight = cls(shape, bitmap, row_offset, stored)
        plain = weight._as_bitmap()
        BitmapWeight.from_arrays(plain.arrays(), shape, dtype, plain.meta())  # bits and offsets must agree
        return weight

    def bind(self, threads: int = 1) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``."""
        panels = [(decode, first, last, panel.bind(threads)) for decode, first, last, panel in self._panels()]

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            for decode, first, last, product in panels:
                decode()
                product(x, out[first:last])

        return matvec

    def matmul_small(self, x: np.ndarray, out: np.ndarray, threads: int = 1) -> None:
        """``out = x @ W.T`` for a few rows: ``x`` float32 ``(n, in)``, ``out`` float32 ``(n, out)``."""
        for decode, first, last, panel in self._panels():
            decode()
            panel.matmul_small(x, out[:, first:last], threads)

    def _as_bitmap(self) -> BitmapWeight:
        """The same matrix with decoded weights."""
        values = np.zeros(self.stored.shape[0] * self.stored.shape[1] + _SPARE, np.uint16)
        count = int(self.row_offset[-1])
        self.stored.to_bits(values[:-_SPARE].reshape(self.stored.shape))
        values[count:] = 0
        return self._bitmap(0, self.shape[0], values[: count + _SPARE], 0)

    def _bitmap(self, first: int, last: int, values: np.ndarray, start: int) -> BitmapWeight:
        """Rows ``first`` to ``last``, whose weights are found in ``values``, which begin with weight ``start``."""
        words = self.bitmap.size // self.shape[0]
        offsets = torch.from_numpy(self.row_offset[first : last + 1] - start)
        bitmap = as_tensor(self.bitmap[first * words : last * words])
        shape = (last - first, self.shape[1])
        return BitmapWeight(shape, self.dtype, "rows", bitmap, as_tensor(values), {"row_offset": offsets})

    def _panels(self) -> Iterator[tuple[_Decode, int, int, BitmapWeight]]:
        """Runs of rows as ``(decode, first, last, bitmap)``; the bitmap is filled by ``decode()``, the buffer shared."""
        if isinstance(self.stored, Raw):
            values = np.concatenate([self.stored.bits, np.zeros(_SPARE, np.uint16)])
            yield _Decode(None, values), 0, self.shape[0], self._bitmap(0, self.shape[0], values, 0)
            return
        step = _STEP[self.layout]
        goals = np.arange(1, self.row_offset[-1], _LINES[self.layout] * WIDTH)
        starts = np.unique(np.append(np.searchsorted(self.row_offset, goals[1:]), [0, self.shape[0]])).tolist()
        spans = []
        for first, last in pairwise(starts):
            top = min(int(self.row_offset[first]) // WIDTH, self.stored.shape[0] - 1) // step * step
            spans.append((first, last, top, max(top + 1, -(-int(self.row_offset[last]) // WIDTH))))
        buffer = np.zeros(max(bottom - top for _, _, top, bottom in spans) * WIDTH + _SPARE, np.uint16)
        for first, last, top, bottom in spans:
            lines = _lines(self.stored, top, bottom)
            yield _Decode(lines, buffer), first, last, self._bitmap(first, last, buffer, top * WIDTH)


@dataclass(frozen=True)
class _Decode:
    """Writes some lines of weights to the beginning of a buffer; does nothing where there are none to decode."""

    lines: Nib12 | Tbe | None
    buffer: np.ndarray

    def __call__(self) -> None:
        if self.lines is not None:
            rows, width = self.lines.shape
            self.lines.to_bits(self.buffer[: rows * width].reshape(rows, width))


def _coded(values: np.ndarray, layout: str) -> Nib12 | Tbe | Raw:
    """Non-zero weights, uint16, in ``layout``, or as they are where that takes no more bytes."""
    if values.size:
        lines = np.resize(values, (-(-values.size // WIDTH), WIDTH))
        encoded = Nib12.from_bits(lines) if layout == "nib12" else Tbe.from_bits(lines)
        if encoded is not None and sum(array.nbytes for array in encoded.arrays().values()) < values.nbytes:
            return encoded
    return Raw((1, values.size), values)


def _lines(stored: Nib12 | Tbe, top: int, bottom: int) -> Nib12 | Tbe:
    """Lines ``top`` to ``bottom`` as a value of their own, without a copy; ``top`` must be a multiple of the step."""
    height = bottom - top
    if isinstance(stored, Nib12):
        blocks = slice(top * WIDTH // BLOCK, bottom * WIDTH // BLOCK)
        return replace(
            stored,
            shape=(height, WIDTH),
            plane=stored.plane[blocks.start * BLOCK : blocks.stop * BLOCK],
            codes=stored.codes[blocks.start * BLOCK_HALF : blocks.stop * BLOCK_HALF],
            starts=stored.starts[top : bottom + 1],
        )
    tiles = slice(top // 64 * (WIDTH // 64), -(-bottom // 64) * (WIDTH // 64))
    words = slice(64 * tiles.start, 64 * tiles.stop)
    return replace(
        stored,
        shape=(height, WIDTH),
        plane1=stored.plane1[words],
        plane2=stored.plane2[words],
        plane3=stored.plane3[words],
        offsets=stored.offsets[2 * tiles.start : 2 * tiles.stop + 2],
    )
