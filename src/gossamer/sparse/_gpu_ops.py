"""The operators of ``_ops`` on CUDA tensors: registered when that module is imported, compiled when first called.

Everything runs on torch's current stream. What belongs to a pattern (its schedule, the rows of its entries) is made in
the first call and kept with the pattern's tensors, so that later calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.sparse._entries_gpu import entries_sddmm, rows_of
from gossamer.sparse._gpu_launch import TYPES, kernel_of, narrow
from gossamer.sparse._rows_gpu import rows_spmm

_THREADS = 256
_SOFTMAX = ("softmax_rows.cu",)


def run_spmm(
    indptr: Tensor, indices: Tensor, values: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, dense: Tensor
) -> Tensor:
    """Sparse times dense."""
    return rows_spmm(indptr, indices, values.detach().to(dense.dtype), dense.detach())


def run_sddmm(
    indptr: Tensor, indices: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """Dot products where the pattern asks for them."""
    return entries_sddmm(indptr, indices, x.detach(), y.detach())


def run_softmax(indptr: Tensor, values: Tensor) -> Tensor:
    """Softmax over the entries of each row."""
    return _launch_softmax("softmax_rows", indptr, values)


def run_softmax_gradient(indptr: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
    """``shares * (gradient - sum over the row of shares * gradient)``."""
    return _launch_softmax("softmax_gradient", indptr, shares, gradient.to(shares.dtype))


def run_transpose(indptr: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern, and the place in this one that each of its entries comes from (int64)."""
    order = torch.argsort(indices, stable=True)
    t_indptr = torch.zeros(columns + 1, dtype=torch.int64, device=indices.device)
    torch.cumsum(torch.bincount(indices, minlength=columns), 0, out=t_indptr[1:])
    rows = rows_of(indptr, len(indices))[order]
    return t_indptr.to(indptr.dtype), rows.to(indices.dtype), order


def _launch_softmax(name: str, indptr: Tensor, *values: Tensor) -> Tensor:
    arrays = [array.detach().contiguous() for array in values]
    out = torch.empty_like(arrays[0])
    rows = len(indptr) - 1
    if len(out):
        macros = ("TYPE", TYPES[out.dtype]), ("ALIGN", out.element_size()), ("LANES", 8)
        kernel = kernel_of(_SOFTMAX, name, macros, out.device.index or 0)
        kernel.launch(-(-rows // (_THREADS // 32)), _THREADS, narrow(indptr), *arrays, out, rows)
    return out
