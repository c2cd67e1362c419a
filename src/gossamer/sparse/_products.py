"""The products that users call. They check, ask the planner, and record gradients where any are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.sparse._gpu_planner import sampled
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._ops import edge_softmax_op, run_sddmm, sddmm_op, spmm_op, transposed_pattern
from gossamer.sparse._planner import pattern_arrays, run, spmm_plan


def spmm(matrix: SparseMatrix, dense: Tensor, *, backend: str = "auto") -> Tensor:
    """``matrix @ dense``, summed in float32 (float64 for float64), in the type of the operands.

    dense: ``(k, n)`` or ``(k,)``, of the values' type and on their device. Differentiable in ``matrix.values`` and in
    ``dense``: with gradients wanted (or under ``torch.compile``) our kernel computes the product; otherwise ``backend``
    is "auto" (:func:`~gossamer.sparse.spmm_plan` decides), "rows", "torch", "scipy", "dense", or another way that a plan
    names.

    Raises:
        TypeError: ``dense`` is no tensor of the values' type.
        ValueError: its first dimension is not ``k``, it is elsewhere, or ``backend`` is unknown.

    >>> import torch
    >>> a = SparseMatrix.from_coo([0, 1, 1], [0, 0, 2], [1.0, 2.0, 3.0], (2, 3))
    >>> spmm(a, torch.ones(3, 2)).tolist()
    [[1.0, 1.0], [5.0, 5.0]]
    """
    _check_dense("dense", dense, matrix, matrix.shape[1], (1, 2))
    if dense.ndim == 1:
        return spmm(matrix, dense.unsqueeze(1), backend=backend).squeeze(1)
    tracing = torch.compiler.is_compiling()
    wanted = torch.is_grad_enabled() and (dense.requires_grad or matrix.values.requires_grad)
    if tracing or wanted:
        spare = _transpose_if(matrix, tracing or dense.requires_grad)
        return spmm_op(matrix.indptr, matrix.indices, matrix.values, *spare, dense)
    return run(matrix, dense, spmm_plan(matrix, dense.shape[1], backend).backend)


def sddmm(pattern: SparseMatrix, x: Tensor, y: Tensor) -> SparseMatrix:
    """``x @ y.T`` where ``pattern`` has entries, and only there; the pattern's own values play no part.

    x: ``(m, d)``. y: ``(k, d)``, both of one floating type on the pattern's device. Differentiable in both. Memory:
    one value per entry; the dense product is never formed.

    Raises:
        TypeError, ValueError: as :func:`spmm`.

    >>> import torch
    >>> pattern = SparseMatrix.from_coo([0, 1], [1, 0], shape=(2, 2))
    >>> sddmm(pattern, torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]])).values.tolist()
    [5.0, 6.0]
    """
    _check_dense("x", x, pattern, pattern.shape[0], (2,), dtype=y.dtype)
    _check_dense("y", y, pattern, pattern.shape[1], (2,), dtype=x.dtype)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have as many features, got {x.shape[1]} and {y.shape[1]}")
    tracing = torch.compiler.is_compiling()
    wanted = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if tracing or wanted:
        spare = _transpose_if(pattern, True)
        return pattern.with_values(sddmm_op(pattern.indptr, pattern.indices, *spare, x, y))
    if pattern.device.type == "cuda":
        return pattern.with_values(sampled(pattern, x.detach(), y.detach()))
    return pattern.with_values(run_sddmm(*pattern_arrays(pattern), x, y))


def edge_softmax(matrix: SparseMatrix) -> SparseMatrix:
    """Softmax over the stored entries of each row (what attention on a graph needs). Differentiable in the values.

    >>> import torch
    >>> edge_softmax(SparseMatrix.from_coo([0, 0, 1], [0, 1, 1])).values.tolist()
    [0.5, 0.5, 1.0]
    """
    return matrix.with_values(edge_softmax_op(matrix.indptr, matrix.values))


def _transpose_if(matrix: SparseMatrix, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern, or empty tensors where no gradient will ask for it."""
    if needed:
        return transposed_pattern(matrix)
    nothing = matrix.indices.new_empty(0)
    return nothing, nothing, matrix.indices.new_empty(0, dtype=torch.int64)


def _check_dense(
    name: str, dense: Tensor, matrix: SparseMatrix, rows: int, ndim: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if not isinstance(dense, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(dense).__name__}")
    wanted = dtype or matrix.dtype
    if dense.dtype != wanted or not dense.dtype.is_floating_point:
        raise TypeError(f"{name} must be {wanted} like the other operand, got {dense.dtype}")
    if dense.layout != torch.strided:
        raise TypeError(f"{name} must be dense, got layout {dense.layout}")
    if dense.ndim not in ndim or dense.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows for a sparse matrix {matrix.shape}, got {tuple(dense.shape)}")
    if dense.device != matrix.device:
        raise ValueError(f"{name} must be on {matrix.device} like the sparse matrix, got {dense.device}")
