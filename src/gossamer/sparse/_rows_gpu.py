"""Sparse times dense on a GPU's CUDA cores, from compressed rows: ``kernels/spmm_rows.cu`` and its launch.

What bounds such a product on large GPUs is the L2 cache: every entry gathers a row of the dense operand from there. The
kernel therefore works on tiles of 128 bytes of columns, one tile of the whole matrix after the other, so that what is
gathered stays in L2, and lets rows that are neighbours in the matrix meet in one multiprocessor, whose own cache then
serves rows of the dense operand that they share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sparse._gpu_launch import TYPES, add_partials, alignment, kept, kernel_of, narrow
from gossamer.sparse._rows_schedule import LONGEST, SEGMENT, WINDOW, RowsSchedule

FILES = ("spmm_rows.cu",)
_LARGEST_GRID_Y = 65_535


@dataclass(frozen=True)
class RowsVariant:
    """A variant of the kernel.

    lanes: of a group, 16 bytes of columns each. threads: of a block. unroll: gathered rows in flight a lane.
    rounds: rows that a group takes. longest, segment, window: see :class:`RowsSchedule`.
    """

    lanes: int = 16
    threads: int = 256
    unroll: int = 4
    rounds: int = 1
    longest: int = LONGEST
    segment: int = SEGMENT
    window: int = WINDOW

    def macros(self, dtype: torch.dtype, align: int) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "TYPE": TYPES[dtype], "ALIGN": align, "LANES": self.lanes, "THREADS": self.threads,
            "UNROLL": self.unroll, "ROUNDS": self.rounds,
        }  # fmt: skip


DEFAULT = RowsVariant()


def rows_spmm(indptr: Tensor, indices: Tensor, values: Tensor, dense: Tensor, variant: RowsVariant = DEFAULT) -> Tensor:
    """``A @ dense`` for ``A`` in CSR and ``dense`` ``(k, n)``, all on one GPU, of one type; summed in float32 or float64.

    The same bits come out every time. The pattern's schedule is made in the first call, which therefore must not be
    captured in a CUDA graph.
    """
    n = dense.shape[1]
    dense, values = dense.contiguous(), values.contiguous()
    out = torch.empty(len(indptr) - 1, n, dtype=dense.dtype, device=dense.device)
    if not out.numel():
        return out
    schedule = schedule_of(indptr, variant)
    align = alignment(n, dense, out)
    macros = tuple(variant.macros(dense.dtype, align).items())
    device = dense.device.index or 0
    kind = torch.float64 if dense.dtype == torch.float64 else torch.float32
    partial = torch.empty(schedule.partials, n, dtype=kind, device=dense.device)
    tile = variant.lanes * 16 // dense.element_size()
    tiles = -(-n // tile)
    if tiles > _LARGEST_GRID_Y:
        raise ValueError(f"dense must have at most {_LARGEST_GRID_Y * tile} columns, got {n}")
    short, long = len(schedule.order), len(schedule.segments)
    blocks = long + -(-short // (variant.threads // variant.lanes * variant.rounds))
    kernel_of(FILES, "spmm_rows", macros, device).launch(
        (blocks, tiles), variant.threads,
        narrow(indptr), narrow(indices), values, dense, out, partial, schedule.order, schedule.segments, short, long, n,
    )  # fmt: skip
    if schedule.partials:
        add_partials(partial, out, schedule.sums)
    return out


def schedule_of(indptr: Tensor, variant: RowsVariant = DEFAULT) -> RowsSchedule:
    """The schedule of a pattern, made once."""
    settings = variant.longest, variant.segment, variant.window
    made: RowsSchedule = kept(indptr, ("schedule", *settings), lambda: RowsSchedule.build(indptr, *settings))
    return made
