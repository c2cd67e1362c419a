"""SparseGPT: prune a linear layer and let the kept weights make up for the error.

Columns are handled from left to right. Each pruned weight ``w`` leaves the output error ``w / d``, which is removed
as well as possible through the columns to its right (optimal brain surgeon); ``d`` and the corrections all come from
one Cholesky factor of the inverse Hessian (Frantar & Alistarh, ICML 2023). Corrections inside a block of columns are
applied at once, those to the right of it when the block is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.compress._masks import check_divides, keep_n_of_m, keep_per_layer

BLOCK = 128
DAMPING = 0.01
_DAMPING_STEP, _MOST_DAMPING = 10.0, 10.0


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    sparsity: float = 0.5,
    n_of_m: tuple[int, int] | None = None,
    block: int = BLOCK,
    damping: float = DAMPING,
    keep: Tensor | None = None,
) -> Tensor:
    """The pruned and corrected ``weight``, ``(out, in)`` float32.

    Args:
        weight: ``(out, in)``, left as it is.
        hessian: ``(in, in)``, the Hessian of the layer's squared output error, ``2/n · XᵀX``; its scale is free.
            Inputs that are always zero get zero weights.
        sparsity: pruned in every block of columns: ``int(out * columns * sparsity)``, chosen among all rows together.
        n_of_m: instead of ``sparsity``: keep N of every M consecutive inputs, chosen when the update reaches them.
        block: columns per block; rounded down to a multiple of M where ``n_of_m`` is given.
        keep: bool ``(out, in)``, instead of both: what another score keeps, which is only corrected.
        damping: added to the diagonal, as a share of its mean; raised tenfold as long as the factorisation fails.

    Raises:
        ValueError: shapes do not fit, ``sparsity`` is outside [0, 1], M does not divide the inputs, or the Hessian is
            not finite or not positive semi-definite.

    >>> w, x = torch.tensor([[1.0, 1.1]]), torch.ones(4, 2)
    >>> sparsegpt(w, x.t() @ x / 2)  # the same input twice: the kept weight takes over nearly all of the other
    tensor([[0.0000, 2.0901]])
    """
    _check(weight, hessian, sparsity, n_of_m, block)
    if keep is not None and (keep.shape != weight.shape or keep.dtype != torch.bool):
        raise ValueError(f"keep must be bool of shape {tuple(weight.shape)}, got {keep.dtype} {tuple(keep.shape)}")
    if n_of_m is not None:
        block = max(block // n_of_m[1], 1) * n_of_m[1]
    kept = weight.detach().float().clone(memory_format=torch.contiguous_format)
    dead = hessian.diagonal() == 0
    kept[:, dead] = 0.0
    factor = inverse_factor(hessian, damping)
    for start in range(0, kept.shape[1], block):
        columns = slice(start, min(start + block, kept.shape[1]))
        given = None if keep is None else keep[:, columns]
        errors = _solve_block(kept[:, columns], factor[columns, columns], sparsity, n_of_m, given)
        kept[:, columns.stop :] -= errors @ factor[columns, columns.stop :]
    return kept


def inverse_factor(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """Upper Cholesky factor ``U`` of the inverse of the damped Hessian, ``H⁻¹ = UᵀU``, ``(in, in)`` float32.

    Row ``i`` of ``U``, divided by ``U[i, i]``, is row ``i`` of the inverse of ``H[i:, i:]`` divided by its corner.
    Zeros on the diagonal of ``hessian`` (inputs that never fire) count as ones.
    """
    base = hessian.detach().float().clone()
    diagonal = base.diagonal()
    diagonal[diagonal == 0] = 1.0
    scale = float(diagonal.mean())
    while damping <= _MOST_DAMPING:
        damped = base.clone()
        damped.diagonal().add_(damping * scale)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return upper
        damping = max(damping, 1e-6) * _DAMPING_STEP
    raise ValueError("the Hessian cannot be factorised even with heavy damping: it is not positive semi-definite")


def _solve_block(
    weight: Tensor, factor: Tensor, sparsity: float, n_of_m: tuple[int, int] | None, given: Tensor | None
) -> Tensor:
    """Prune ``weight`` ``(out, columns)`` in place; return the errors that the columns to its right must absorb."""
    diagonal = factor.diagonal()
    errors = torch.zeros_like(weight)
    keep = torch.ones_like(weight, dtype=torch.bool) if given is None else given
    if n_of_m is None and given is None:
        keep = keep_per_layer((weight / diagonal).square(), sparsity)
    for column in range(weight.shape[1]):
        if n_of_m is not None and given is None and column % n_of_m[1] == 0:
            window = slice(column, column + n_of_m[1])
            keep[:, window] = keep_n_of_m((weight[:, window] / diagonal[window]).square(), *n_of_m)
        errors[:, column] = torch.where(keep[:, column], 0.0, weight[:, column]) / diagonal[column]
        weight[:, column:] -= errors[:, column, None] * factor[column, column:]
        weight[:, column].masked_fill_(~keep[:, column], 0.0)
    return errors


def _check(weight: Tensor, hessian: Tensor, sparsity: float, n_of_m: tuple[int, int] | None, block: int) -> None:
    if weight.ndim != 2 or tuple(hessian.shape) != (weight.shape[1], weight.shape[1]):
        raise ValueError(
            f"need a weight (out, in) and a hessian (in, in), got {tuple(weight.shape)} and {tuple(hessian.shape)}"
        )
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity}")
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if n_of_m is not None:
        check_divides(weight.shape[1], *n_of_m)
    if not bool(hessian.isfinite().all()):
        raise ValueError("the Hessian holds values that are not finite: the model overflows on the calibration text")
