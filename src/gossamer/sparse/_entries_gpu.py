"""Sampled products (SDDMM) on a GPU's CUDA cores: ``kernels/sddmm_entries.cu`` and its launch.

Entries, not rows, are dealt out to the lanes, so that hubs of a graph cost no more than their share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.sparse._gpu_launch import TYPES, alignment, kept, kernel_of, narrow

FILES = ("sddmm_entries.cu",)


@dataclass(frozen=True)
class EntriesVariant:
    """threads: of a block. rounds: eights of entries that eight lanes take. features_outer: features are the outer loop."""

    threads: int = 256
    rounds: int = 1
    features_outer: bool = False

    def macros(self, dtype: torch.dtype, align: int) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "TYPE": TYPES[dtype], "ALIGN": align, "LANES": 8, "THREADS": self.threads, "ROUNDS": self.rounds,
            "FEATURES_OUTER": int(self.features_outer),
        }  # fmt: skip


DEFAULT = EntriesVariant()


def entries_sddmm(indptr: Tensor, indices: Tensor, x: Tensor, y: Tensor, variant: EntriesVariant = DEFAULT) -> Tensor:
    """``x[row] . y[column]`` of every entry ``(nnz,)`` in CSR order, on one GPU, summed in float32 or float64.

    The same bits come out every time. The first call for a pattern lists its rows; it must not be captured in a graph.
    """
    count, d = len(indices), x.shape[1]
    if not count or not d:
        return torch.zeros(count, dtype=x.dtype, device=x.device)
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty(count, dtype=x.dtype, device=x.device)
    macros = tuple(variant.macros(x.dtype, alignment(d, x, y)).items())
    kernel = kernel_of(FILES, "sddmm_entries", macros, x.device.index or 0)
    blocks = -(-count // (variant.threads * variant.rounds))
    kernel.launch(blocks, variant.threads, rows_of(indptr, count), narrow(indices), x, y, out, count, d)
    return out


def rows_of(indptr: Tensor, count: int) -> Tensor:
    """The row of every entry, int32 ``(nnz,)``, made once."""

    def list_rows() -> Tensor:
        rows = torch.arange(len(indptr) - 1, dtype=torch.int32, device=indptr.device)
        return torch.repeat_interleave(rows, indptr.diff().long(), output_size=count)

    made: Tensor = kept(indptr, "rows", list_rows)
    return made
