"""Inverse p-th roots of symmetric positive semi-definite matrices: by eigenvalues, or by products alone.

The coupled Newton iteration (Guo and Higham, SIAM J. Matrix Anal. Appl. 2006; used for Shampoo by Anil et al., 2020) needs
only products, which a GPU does at full speed for many matrices at a time; on a CPU eigenvalues are faster.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not in its __all__

_MOST_STEPS = 100
_FLOOR = 1e-12


def inverse_roots(
    matrices: Tensor, root: int, damping: float, method: Literal["auto", "eigen", "newton"] = "auto"
) -> Tensor:
    """``(S + (damping * largest eigenvalue of S + 1e-12) I) ** (-1 / root)`` of each matrix in ``(count, d, d)``.

    matrices: the lower triangles count. root: at least 1. method: "auto" is "newton" on a GPU, else "eigen".
    Roots are made in float32 or wider; "newton" falls back to eigenvalues for matrices whose iteration does not converge.

    Raises:
        ValueError: ``matrices`` is not a batch of square matrices, or ``root`` is less than 1.

    >>> inverse_roots(torch.diag(torch.tensor([1.0, 16.0]))[None], 4, 1e-9)[0].diagonal().mul(8).round().tolist()
    [8.0, 4.0]
    """
    if matrices.dim() != 3 or matrices.shape[1] != matrices.shape[2]:
        raise ValueError(f"matrices must have shape (count, d, d), got {tuple(matrices.shape)}")
    if root < 1:
        raise ValueError(f"root must be at least 1, got {root}")
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    if method == "newton" or (method == "auto" and wide.is_cuda):
        return _newton(_full(wide), root, damping)
    return _eigen(wide, root, damping)


def _full(lower: Tensor) -> Tensor:
    return lower.tril() + lower.tril(-1).mT


def _eigen(matrices: Tensor, root: int, damping: float) -> Tensor:
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except LinAlgError:
        values, vectors = (part.to(matrices.dtype) for part in torch.linalg.eigh(matrices.double()))
    values.clamp_(min=0)
    values += damping * values[:, -1:] + _FLOOR
    return vectors * values.pow(-1 / root).unsqueeze(1) @ vectors.mT


def _newton(matrices: Tensor, root: int, damping: float) -> Tensor:
    size = matrices.shape[-1]
    eye = torch.eye(size, dtype=matrices.dtype, device=matrices.device)
    damped = matrices + (damping * _largest(matrices) + _FLOOR).view(-1, 1, 1) * eye
    tolerance = 1e-6 if matrices.dtype == torch.float32 else 1e-12
    z = (1 + root) / (2 * torch.linalg.matrix_norm(damped)).view(-1, 1, 1)
    x, m = z.pow(1 / root) * eye, z * damped
    best, least = x, torch.full((len(matrices),), float("inf"), dtype=m.dtype, device=m.device)
    for _ in range(_MOST_STEPS):
        t = (1 + 1 / root) * eye - m / root
        x, m = x @ t, torch.linalg.matrix_power(t, root) @ m
        error = (m - eye).abs().amax((1, 2))
        better = error < least
        best = torch.where(better.view(-1, 1, 1), x, best)
        # Rounding ends the descent before the tolerance where the condition number is high.
        going = better & (error > tolerance)
        least = torch.minimum(error, least)
        if not going.any():
            break
    failed = ~(least < 1e-2)  # NaN too
    if failed.any():
        best = best.clone()
        best[failed] = _eigen(matrices[failed], root, damping)
    return best


def _largest(matrices: Tensor) -> Tensor:
    """The largest eigenvalue of each, by power iteration to about a percent."""
    vector = matrices.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-1) + 1e-30
    value = vector.new_zeros(len(matrices))
    for _ in range(30):
        vector = vector / torch.linalg.vector_norm(vector, dim=1, keepdim=True).clamp(min=1e-30)
        image = matrices @ vector
        value = torch.linalg.vector_norm(image, dim=1).squeeze(-1)
        vector = image
    return value
