"""The products as torch operators: differentiable, traceable by ``torch.compile``, on CPUs and GPUs.

Three operators of the namespace ``gossamer_sparse`` take plain tensors; ``_products`` gives them their public face.
On CUDA tensors ``_gpu_ops`` runs them.

- ``spmm(indptr, indices, values, t_indptr, t_indices, t_order, dense) -> (m, n)``; the transposed pattern may be empty
  tensors where no gradient for ``dense`` is asked.
- ``sddmm(indptr, indices, t_indptr, t_indices, t_order, x, y) -> (nnz,)``.
- ``edge_softmax(indptr, values) -> (nnz,)``.

Gradients: with ``C = A B``, ``dB = A^T dC`` and ``dvalues = sddmm(dC, B)``; with ``s = sddmm(X, Y)``, ``dX = S Y`` and
``dY = S^T X`` where ``S`` holds ``ds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.hardware import cpu_features
from gossamer.sparse import _csr_loops as loops
from gossamer.sparse import _gpu_ops as gpu
from gossamer.sparse._sddmm_kernel import sddmm_rows
from gossamer.sparse._softmax_kernel import softmax_backward, softmax_rows
from gossamer.sparse._spmm_kernel import spmm_rows

if TYPE_CHECKING:
    from gossamer.sparse._matrix import SparseMatrix


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """What sums over values of ``dtype`` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_array(tensor: Tensor) -> np.ndarray:
    """A tensor as the contiguous array that kernels read: half types as bit patterns, or as float32.

    float16 is widened beforehand where the processor cannot convert it.
    """
    tensor = plain(tensor)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        if not cpu_features() & {"f16c", "fullfp16"}:
            return tensor.float().numpy()
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


def plain(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` contiguous, without gradient, of type ``dtype``; itself where it is all that: calls cost microseconds."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def run_spmm(indptr: np.ndarray, indices: np.ndarray, values: Tensor, dense: Tensor) -> Tensor:
    """The CPU product, without any check or record for gradients."""
    kind = sum_type(dense.dtype)
    threads = torch.get_num_threads()
    rows = len(indptr) - 1
    out = torch.empty(rows + (threads if threads > 1 else 0), dense.shape[1], dtype=kind)
    spmm_rows(indptr, indices, plain(values, kind).numpy(), kernel_array(dense), out.numpy(), threads)
    if threads > 1:
        out = out[:rows]
    return out if kind == dense.dtype else out.to(dense.dtype)


def run_sddmm(indptr: np.ndarray, indices: np.ndarray, x: Tensor, y: Tensor) -> Tensor:
    """The CPU dot products of a pattern, without any check or record for gradients."""
    out = torch.empty(len(indices), dtype=sum_type(x.dtype))
    sddmm_rows(indptr, indices, kernel_array(x), kernel_array(y), out.numpy(), torch.get_num_threads())
    return out if out.dtype == x.dtype else out.to(x.dtype)


@torch.library.custom_op("gossamer_sparse::spmm", mutates_args=(), device_types="cpu")
def spmm_op(
    indptr: Tensor, indices: Tensor, values: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, dense: Tensor
) -> Tensor:
    """Sparse times dense."""
    return run_spmm(indptr.numpy(), indices.numpy(), values, dense)


@spmm_op.register_fake
def _(
    indptr: Tensor, indices: Tensor, values: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, dense: Tensor
) -> Tensor:
    return dense.new_empty(indptr.shape[0] - 1, dense.shape[1])


def _spmm_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _spmm_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, values, t_indptr, t_indices, t_order, dense = ctx.saved_tensors
    for_values = for_dense = None
    if ctx.needs_input_grad[2]:
        for_values = sddmm_op(indptr, indices, t_indptr, t_indices, t_order, gradient, dense).to(values.dtype)
    if ctx.needs_input_grad[6]:
        back = torch.empty_like(t_order).scatter_(0, t_order, torch.arange(len(t_order), device=t_order.device))
        for_dense = spmm_op(t_indptr, t_indices, values[t_order], indptr, indices, back, gradient)
    return None, None, for_values, None, None, None, for_dense


spmm_op.register_autograd(_spmm_backward, setup_context=_spmm_context)


@torch.library.custom_op("gossamer_sparse::sddmm", mutates_args=(), device_types="cpu")
def sddmm_op(
    indptr: Tensor, indices: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    """Dot products where the pattern asks for them."""
    return run_sddmm(indptr.numpy(), indices.numpy(), x, y)


@sddmm_op.register_fake
def _(
    indptr: Tensor, indices: Tensor, t_indptr: Tensor, t_indices: Tensor, t_order: Tensor, x: Tensor, y: Tensor
) -> Tensor:
    return x.new_empty(indices.shape[0])


def _sddmm_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, t_indptr, t_indices, t_order, x, y = ctx.saved_tensors
    for_x = for_y = None
    if ctx.needs_input_grad[5]:
        for_x = spmm_op(indptr, indices, gradient, t_indptr, t_indices, t_order, y)
    if ctx.needs_input_grad[6]:
        back = torch.empty_like(t_order).scatter_(0, t_order, torch.arange(len(t_order), device=t_order.device))
        for_y = spmm_op(t_indptr, t_indices, gradient[t_order], indptr, indices, back, x)
    return None, None, None, None, None, for_x, for_y


sddmm_op.register_autograd(_sddmm_backward, setup_context=_spmm_context)


@torch.library.custom_op("gossamer_sparse::edge_softmax", mutates_args=(), device_types="cpu")
def edge_softmax_op(indptr: Tensor, values: Tensor) -> Tensor:
    """Softmax over the entries of each row."""
    scores = values.detach().to(sum_type(values.dtype))
    out = torch.empty_like(scores)
    softmax_rows(indptr.numpy(), scores.numpy(), out.numpy())
    return out.to(values.dtype)


@edge_softmax_op.register_fake
def _(indptr: Tensor, values: Tensor) -> Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("gossamer_sparse::edge_softmax_backward", mutates_args=(), device_types="cpu")
def edge_softmax_backward_op(indptr: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
    """``shares * (gradient - sum over the row of shares * gradient)``."""
    kind = sum_type(shares.dtype)
    out = torch.empty(len(shares), dtype=kind)
    arrays = shares.detach().to(kind).numpy(), gradient.detach().to(kind).contiguous().numpy(), out.numpy()
    softmax_backward(indptr.numpy(), *arrays)
    return out.to(shares.dtype)


@edge_softmax_backward_op.register_fake
def _(indptr: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(shares)


def _softmax_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _softmax_gradient(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
    return None, edge_softmax_backward_op(*ctx.saved_tensors, gradient)


edge_softmax_op.register_autograd(_softmax_gradient, setup_context=_softmax_context)


@torch.library.custom_op("gossamer_sparse::transpose", mutates_args=(), device_types="cpu")
def transpose_op(indptr: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern, and the place in this one that each of its entries comes from (int64)."""
    t_indptr = torch.zeros(columns + 1, dtype=indptr.dtype)
    t_indices = torch.empty_like(indices)
    order = torch.empty(len(indices), dtype=torch.int64)
    arrays = t_indptr.numpy(), t_indices.numpy(), order.numpy()
    loops.transpose_rows(indptr.numpy(), indices.numpy(), columns, *arrays)
    return t_indptr, t_indices, order


@transpose_op.register_fake
def _(indptr: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    order = indices.new_empty(indices.shape[0], dtype=torch.int64)
    return indptr.new_empty(columns + 1), torch.empty_like(indices), order


spmm_op.register_kernel("cuda", gpu.run_spmm)
sddmm_op.register_kernel("cuda", gpu.run_sddmm)
edge_softmax_op.register_kernel("cuda", gpu.run_softmax)
edge_softmax_backward_op.register_kernel("cuda", gpu.run_softmax_gradient)
transpose_op.register_kernel("cuda", gpu.run_transpose)


def transposed_pattern(matrix: SparseMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern and its order, computed once per pattern."""
    known: tuple[Tensor, Tensor, Tensor] | None = matrix._memo.get("transposed")
    if known is not None:
        return known
    made = transpose_op(matrix.indptr, matrix.indices, matrix.shape[1])
    if not torch.compiler.is_compiling():
        matrix._memo["transposed"] = made
    return made
