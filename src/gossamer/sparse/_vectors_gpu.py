"""Products with ME-BCRS matrices on a GPU's tensor cores: ``kernels/spmm_vectors.cu``, ``sddmm_vectors.cu``, their launch.

float16 and bfloat16 are multiplied as they are, float32 as tf32 (rounded to nearest, 10 bits behind the point); sums are in
float32 always. An infinity in the dense operand reaches only rows with an entry in its row, as in a product without
padding. Needs compute capability 8.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from gossamer.sparse._gpu_launch import TYPES, add_partials, alignment, kept, kernel_of
from gossamer.sparse._mebcrs import MEBCRS

SPMM, SDDMM = ("mma.cu", "spmm_vectors.cu"), ("mma.cu", "sddmm_vectors.cu")
_HEIGHT = 8
_SDDMM_THREADS = 128


@dataclass(frozen=True)
class VectorsVariant:
    """A variant of the product's kernel.

    threads: of a block. tiles: of 128 bytes of columns that a warp multiplies. unroll: blocks in flight, with
    ``unroll * width`` at most 32. blocks: of a part of a window at most.
    """

    threads: int = 128
    tiles: int = 1
    unroll: int = 2
    blocks: int = 32

    def macros(self, dtype: torch.dtype, align: int) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "TYPE": TYPES[dtype], "ALIGN": align, "LANES": 8, "THREADS": self.threads, "TILES": self.tiles,
            "UNROLL": self.unroll,
        }  # fmt: skip


DEFAULT = VectorsVariant()


@dataclass(frozen=True, eq=False)
class VectorsWork:
    """What the warps of a product do.

    parts: int32 ``(parts, 5)``: window, first vector, end, and for windows with several parts where the sums of the
        window's row p go: row ``partial + p * stride`` of the partial sums; else -1. Empty windows have a part too.
    sums: int32 ``(rows, 3)``, as in :class:`~gossamer.sparse._rows_schedule.RowsSchedule`.
    partials: partial rows in all.
    """

    parts: Tensor
    sums: Tensor
    partials: int

    @classmethod
    def build(cls, matrix: MEBCRS, blocks: int) -> Self:
        """Cut the windows into parts of at most ``blocks`` blocks."""
        pointers = matrix.row_pointers.to(torch.int64)
        device = pointers.device
        length = blocks * matrix.width
        counts = ((pointers.diff() + length - 1) // length).clamp(min=1)
        window = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
        number = torch.arange(len(window), device=device) - (counts.cumsum(0) - counts)[window]
        begin = pointers[:-1][window] + number * length
        end = torch.minimum(begin + length, pointers[1:][window])
        cut = torch.where(counts > 1, counts, 0)
        first = _HEIGHT * (cut.cumsum(0) - cut)
        partial = torch.where(cut[window] > 0, first[window] + number, -1)
        parts = torch.stack([window, begin, end, partial, counts[window]], 1)
        rows = torch.arange(matrix.shape[0], device=device)
        rows = rows[cut[rows // _HEIGHT] > 0]
        stride = counts[rows // _HEIGHT]
        sums = torch.stack([rows, first[rows // _HEIGHT] + rows % _HEIGHT * stride, stride], 1)
        return cls(parts.to(torch.int32).contiguous(), sums.to(torch.int32).contiguous(), _HEIGHT * int(cut.sum()))


def vectors_spmm(matrix: MEBCRS, dense: Tensor, variant: VectorsVariant = DEFAULT) -> Tensor:
    """``A @ dense`` for ``dense`` ``(k, n)`` of the values' type on the same GPU; the same bits every time.

    The first call for a pattern deals out the work and must not be captured in a CUDA graph.

    Raises:
        ValueError: windows are not 8 rows high, or the operand does not fit.
    """
    _check(matrix, dense, matrix.shape[1])
    n = dense.shape[1]
    dense = dense.contiguous()
    out = torch.empty(matrix.shape[0], n, dtype=dense.dtype, device=dense.device)
    if not out.numel():
        return out
    work = work_of(matrix, variant.blocks)
    device = dense.device.index or 0
    macros = tuple(variant.macros(dense.dtype, alignment(n, dense, out)).items())
    partial = torch.empty(work.partials, n, dtype=torch.float32, device=dense.device)
    columns = variant.tiles * 128 // dense.element_size()
    kernel_of(SPMM, "spmm_vectors", macros, device).launch(
        (-(-len(work.parts) // (variant.threads // 32)), -(-n // columns)), variant.threads,
        matrix.column_index, matrix.values, masks_of(matrix), work.parts, dense, out, partial, len(work.parts),
        matrix.shape[0], n,
    )  # fmt: skip
    if work.partials:
        add_partials(partial, out, work.sums)
    return out


def vectors_sddmm(matrix: MEBCRS, x: Tensor, y: Tensor) -> MEBCRS:
    """``x[row] . y[column]`` of every entry as a matrix of the same pattern; filling stays zero.

    x: ``(m, d)``, y: ``(k, d)``, of the values' type on the same GPU.
    """
    _check(matrix, x, matrix.shape[0])
    _check(matrix, y, matrix.shape[1])
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have as many features, got {x.shape[1]} and {y.shape[1]}")
    values = torch.zeros_like(matrix.values) if not x.shape[1] else torch.empty_like(matrix.values)
    if not values.numel() or not x.shape[1]:
        return replace(matrix, values=values)
    x, y = _aligned(x), _aligned(y)
    macros = {"TYPE": TYPES[x.dtype], "ALIGN": 16, "LANES": 4, "THREADS": _SDDMM_THREADS}
    work = sixteens_of(matrix)
    kernel_of(SDDMM, "sddmm_vectors", tuple(macros.items()), x.device.index or 0).launch(
        -(-len(work) // (_SDDMM_THREADS // 32)), _SDDMM_THREADS,
        matrix.column_index, masks_of(matrix), work, x, y, values, len(work), matrix.shape[0], x.shape[1],
    )  # fmt: skip
    return replace(matrix, values=values)


def work_of(matrix: MEBCRS, blocks: int) -> VectorsWork:
    """The work of a pattern, dealt out once."""
    made: VectorsWork = kept(matrix.column_index, ("work", blocks), lambda: VectorsWork.build(matrix, blocks))
    return made


def masks_of(matrix: MEBCRS) -> Tensor:
    """Which rows of its window a vector has entries in: uint8 ``(vectors,)``, bit p for row p; made once."""

    def make() -> Tensor:
        row, vector = matrix.places()
        masks = torch.zeros(len(matrix.column_index), dtype=torch.int32, device=row.device)
        masks.index_add_(0, vector, (1 << row % _HEIGHT).to(torch.int32))
        return masks.to(torch.uint8)

    made: Tensor = kept(matrix.column_index, "masks", make)
    return made


def sixteens_of(matrix: MEBCRS) -> Tensor:
    """Window, first vector, and the window's first vector and end, for every 16 vectors of a window: int32 ``(..., 4)``."""

    def make() -> Tensor:
        pointers = matrix.row_pointers.to(torch.int64)
        counts = (pointers.diff() + 15) // 16
        window = torch.repeat_interleave(torch.arange(len(counts), device=pointers.device), counts)
        number = torch.arange(len(window), device=pointers.device) - (counts.cumsum(0) - counts)[window]
        begin = pointers[:-1][window]
        return torch.stack([window, begin + 16 * number, begin, pointers[1:][window]], 1).to(torch.int32).contiguous()

    made: Tensor = kept(matrix.column_index, "sixteens", make)
    return made


def _aligned(features: Tensor) -> Tensor:
    """Features whose rows begin at multiples of 16 bytes."""
    missing = -features.shape[1] % (16 // features.element_size())
    features = torch.nn.functional.pad(features, (0, missing)) if missing else features.contiguous()
    return features.clone() if features.data_ptr() % 16 else features


def _check(matrix: MEBCRS, dense: Tensor, rows: int) -> None:
    if matrix.height != _HEIGHT:
        raise ValueError(f"matrix must have windows of {_HEIGHT} rows, got {matrix.height}")
    if dense.dtype != matrix.values.dtype:
        raise TypeError(f"operand must be {matrix.values.dtype} like the values, got {dense.dtype}")
    if dense.ndim != 2 or dense.shape[0] != rows:
        raise ValueError(f"operand must be a matrix of {rows} rows, got shape {tuple(dense.shape)}")
    if dense.device != matrix.values.device or not dense.is_cuda:
        raise ValueError(f"operand must be on the GPU of the matrix, got {dense.device} and {matrix.values.device}")
