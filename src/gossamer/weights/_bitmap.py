"""Bitmap weights: the zeros of a pruned matrix cost one bit, every other entry its value and one bit.

At 50 % zeros a 16-bit matrix shrinks to 9/16 and a 32-bit one to 17/32, at any pattern of zeros: no other format for
unstructured pruning is smaller at these densities. Two layouts hold the same matrix: ``"rows"``, whose words are 64
columns of one row, made for CPUs; and ``"tca"``, the tensor-core layout of Fan et al. ("SpInfer", EuroSys 2025). Both
multiply without being unpacked.

What counts as zero: entries equal to 0.0, and also -0.0 unless ``preserve_signed_zero=True``. NaN and infinities are
kept bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor

from gossamer.core.hardware import cpu_features
from gossamer.core.jit import row_shares
from gossamer.weights._bitmap_avx512 import FEATURES as EXPAND_FEATURES
from gossamer.weights._bitmap_avx512 import rows_expanded, rows_expanded_threaded
from gossamer.weights._bitmap_decode import decode_rows
from gossamer.weights._bitmap_expand import FEATURES, shuffle_table
from gossamer.weights._bitmap_matvec import rows_matmul, rows_matvec, rows_matvec_threaded, rows_plain
from gossamer.weights._bitmap_rows import check_rows, encode_rows, words_of
from gossamer.weights._bitmap_tiles import TileOffsets, check_tiles, decode_tiles, encode_tiles, starts_of
from gossamer.weights._bitmap_tiles_matvec import tiles_matvec, tiles_plain
from gossamer.weights._dense import bit_type, kernel_view
from gossamer.weights._format import FLOAT_TYPES, Matvec, Scalar, WeightFormat, check_matrix

Layout = Literal["rows", "tca"]

_OFFSET_TYPES = {
    "rows": {"row_offset": torch.int64},
    "tca": {"gtile_offset": torch.int32, "warp_offset": torch.int32, "panel_base": torch.int64},
}


@dataclass(frozen=True, eq=False)
class BitmapWeight(WeightFormat):
    """A matrix of shape ``(out, in)``, float16, bfloat16 or float32, without its zeros.

    layout: "rows" or "tca".
    bitmap: int64 (bits of unsigned words), one bit per entry, ``(out * ceil(in / 64),)`` for rows and
        ``(64 * group tiles,)`` for tca.
    values: int16 or int32 bit patterns of the stored entries, then zeros up to a spare register.
    offsets: where values start. rows: ``row_offset`` int64 ``(out + 1,)``. tca: ``gtile_offset`` int32,
        ``warp_offset`` int32, ``panel_base`` int64.
    max_nnz: tca only: largest number of values in a 64x64 tile, rounded up to 64; sizes a GPU kernel's buffer.
    """

    name: ClassVar[str] = "bitmap"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    dtype: torch.dtype
    layout: Layout
    bitmap: Tensor
    values: Tensor
    offsets: Mapping[str, Tensor]
    max_nnz: int = 0

    @classmethod
    def from_dense(
        cls, weight: Tensor, layout: Layout = "rows", preserve_signed_zero: bool = False, **options: Any
    ) -> Self:
        """Drop the zeros of ``weight``.

        layout: "rows" for CPUs, "tca" for tensor cores. preserve_signed_zero: store -0.0 as an entry, else it
        becomes 0.0.

        Raises:
            TypeError: ``weight`` is no tensor of one of the three types, or an option is unknown.
            ValueError: ``weight`` is not a matrix on the CPU, or ``layout`` is unknown.

        >>> weight = BitmapWeight.from_dense(torch.eye(64, dtype=torch.bfloat16))
        >>> weight.density, weight.nbytes, weight.dense_nbytes
        (0.015625, 1224, 8192)
        """
        if options:
            raise TypeError(f"BitmapWeight takes layout and preserve_signed_zero, got {', '.join(options)}")
        check_matrix(weight, tuple(FLOAT_TYPES.values()))
        layout = _check_layout(layout)
        bits = _bit_matrix(weight.detach().contiguous())
        kept = (1 << 8 * weight.dtype.itemsize) - 1
        if not preserve_signed_zero:
            kept >>= 1
        shape = (weight.shape[0], weight.shape[1])
        if layout == "rows":
            bitmap, values, row_offset = encode_rows(bits, kept)
            return cls._of(shape, weight.dtype, layout, bitmap, values, {"row_offset": row_offset})
        bitmap, values, tiles = encode_tiles(bits, kept)
        offsets = {"gtile_offset": tiles.gtile, "warp_offset": tiles.warp, "panel_base": tiles.base}
        return cls._of(shape, weight.dtype, layout, bitmap, values, offsets, tiles.max_nnz)

    @classmethod
    def _of(
        cls, shape: tuple[int, int], dtype: torch.dtype, layout: Layout, bitmap: np.ndarray, values: np.ndarray,
        offsets: Mapping[str, np.ndarray], max_nnz: int = 0,
    ) -> Self:  # fmt: skip
        stored = torch.from_numpy(values).view(bit_type(dtype))
        tensors = {name: torch.from_numpy(array) for name, array in offsets.items()}
        return cls(shape, dtype, layout, torch.from_numpy(bitmap.view(np.int64)), stored, tensors, max_nnz)

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix, written into ``out`` (contiguous, same type and shape) if given."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype)
        elif tuple(out.shape) != self.shape or out.dtype != self.dtype or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous {self.dtype} tensor of shape {self.shape}, "
                f"got {out.dtype} of shape {tuple(out.shape)}"
            )
        bits = _bit_matrix(out)
        values = _unsigned(self.values)
        if self.layout == "rows":
            decode_rows(_unsigned(self.bitmap), values, self.offsets["row_offset"].numpy(), bits, cpu_features())
        else:
            decode_tiles(_unsigned(self.bitmap), values, self._tile_offsets(), bits)
        return out

    def to_layout(self, layout: Layout) -> BitmapWeight:
        """The same entries in the other layout; ``self`` if it has it already.

        >>> BitmapWeight.from_dense(torch.eye(3)).to_layout("tca").layout
        'tca'
        """
        if _check_layout(layout) == self.layout:
            return self
        return type(self).from_dense(self.to_dense(), layout, preserve_signed_zero=True)

    def arrays(self) -> dict[str, Tensor]:
        """``bitmap``, ``values`` and the layout's offsets."""
        return {"bitmap": self.bitmap, "values": self.values, **self.offsets}

    def meta(self) -> dict[str, Scalar]:
        """``layout``, and ``max_nnz`` for tca."""
        return {"layout": self.layout, "max_nnz": self.max_nnz} if self.layout == "tca" else {"layout": self.layout}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays without a copy; ``ValueError`` unless bitmap, offsets and values agree entirely."""
        layout = _check_layout(meta.get("layout"))
        expected = {"bitmap": torch.int64, "values": bit_type(dtype), **_OFFSET_TYPES[layout]}
        if set(arrays) != set(expected):
            raise ValueError(
                f"a {layout} bitmap weight has {', '.join(expected)}; got {', '.join(arrays) or 'nothing'}"
            )
        for name, kind in expected.items():
            array = arrays[name]
            if array.dtype != kind or array.ndim != 1 or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous, one-dimensional and {kind}, "
                    f"got {array.dtype} of shape {tuple(array.shape)}"
                )
        offsets = {name: arrays[name] for name in _OFFSET_TYPES[layout]}
        weight = cls(shape, dtype, layout, arrays["bitmap"], arrays["values"], offsets, int(meta.get("max_nnz", 0)))
        bitmap, values = _unsigned(weight.bitmap), _unsigned(weight.values)
        if layout == "rows":
            check_rows(bitmap, values, offsets["row_offset"].numpy(), shape)
        else:
            check_tiles(bitmap, values, weight._tile_offsets(), shape)
        return weight

    def bind(self, threads: int = 1, features: frozenset[str] | None = None) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``; ``features`` masks the processor's, for tests."""
        present = cpu_features() if features is None else features
        if self.layout == "tca":
            return self._bind_tiles(threads, tiles_matvec if present >= FEATURES else tiles_plain)
        kernel = _rows_kernel(present, threads)
        bitmap, values, table = _unsigned(self.bitmap), kernel_view(self.values, self.dtype), self._table()
        row_offset, shares = self.offsets["row_offset"].numpy(), self._shares(threads)

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            kernel(bitmap, values, row_offset, x, out, table, shares)

        return matvec

    def _bind_tiles(self, threads: int, kernel: Any) -> Matvec:
        bitmap, values, table = _unsigned(self.bitmap), kernel_view(self.values, self.dtype), self._table()
        offsets = self._tile_offsets()
        starts = starts_of(offsets)
        panels = np.append(starts[:: words_of(self.shape[1])], starts[-1] + offsets.max_nnz)
        shares = row_shares(panels + 64 * np.arange(len(panels)), threads)

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            kernel(bitmap, values, starts, offsets.warp, x, out, table, shares)

        return matvec

    def matmul_small(
        self, x: np.ndarray, out: np.ndarray, threads: int = 1, features: frozenset[str] | None = None
    ) -> None:
        """``out = x @ W.T`` for a few rows: ``x`` float32 ``(n, in)``, ``out`` float32 ``(n, out)``."""
        present = cpu_features() if features is None else features
        if len(x) == 1 or self.layout == "tca" or not present >= FEATURES:
            matvec = self.bind(threads, features)
            for row in range(len(x)):
                matvec(x[row], out[row])
            return
        groups = -(-len(x) // 4)
        padded = np.zeros((4 * groups, 64 * words_of(self.shape[1])), np.float32)
        padded[: len(x), : self.shape[1]] = x
        product = np.empty((4 * groups, self.shape[0]), np.float32)
        rows_matmul(
            _unsigned(self.bitmap), kernel_view(self.values, self.dtype), self.offsets["row_offset"].numpy(),
            padded, product, self._table(), self._shares(threads),
        )  # fmt: skip
        out[:] = product[: len(x)]

    @property
    def density(self) -> float:
        """Share of entries that are stored."""
        if self.layout == "rows":
            stored = int(self.offsets["row_offset"][-1])
        else:
            stored = int(np.bitwise_count(_unsigned(self.bitmap)).sum(dtype=np.int64))
        return stored / (self.shape[0] * self.shape[1])

    def _table(self) -> np.ndarray:
        return shuffle_table(kernel_view(self.values[:0], self.dtype).dtype.name)

    def _shares(self, threads: int) -> np.ndarray:
        """Row boundaries that give threads equal numbers of values and words."""
        words = 4 * words_of(self.shape[1]) * np.arange(self.shape[0] + 1)
        return row_shares(self.offsets["row_offset"].numpy() + words, threads)

    def _tile_offsets(self) -> TileOffsets:
        gtile, warp, base = (self.offsets[name].numpy() for name in _OFFSET_TYPES["tca"])
        return TileOffsets(gtile, warp, base, self.max_nnz)


def _rows_kernel(present: frozenset[str], threads: int) -> Any:
    """The fastest matrix-vector kernel of the row layout for a processor with these features."""
    if present >= EXPAND_FEATURES:
        return rows_expanded if threads == 1 else rows_expanded_threaded
    if present >= FEATURES:
        return rows_matvec if threads == 1 else rows_matvec_threaded
    return rows_plain


def _check_layout(layout: object) -> Layout:
    for known in get_args(Layout):
        if layout == known:
            return cast(Layout, known)
    raise ValueError(f"layout must be one of {', '.join(_OFFSET_TYPES)}, got {layout!r}")


def _bit_matrix(dense: Tensor) -> np.ndarray:
    """The bit patterns of a contiguous matrix as unsigned integers, without a copy."""
    return _unsigned(dense.view(bit_type(dense.dtype)))


def _unsigned(bits: Tensor) -> np.ndarray:
    """A signed integer tensor as the unsigned NumPy array of the same bits."""
    array = bits.numpy()
    return array.view(f"u{array.itemsize}")
