"""Symmetric matrices at half their price: updates and inverses that touch one triangle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not in its __all__

_BLOCK = 256


def zero_gram(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero matrix ``(size, size)`` whose rows begin at multiples of 16 entries: products into it are twice as fast."""
    return torch.zeros(size, -(-size // 16) * 16, dtype=dtype, device=device)[:, :size]


def add_gram_(total: Tensor, rows: Tensor, scale: float = 1.0) -> None:
    """``total += scale * rows^T rows`` in the lower triangle of ``total`` (with blocks that cross the diagonal, whole).

    total: ``(d, d)``, any view whose rows are contiguous. rows: ``(r, d)`` of the same dtype.
    """
    size = rows.shape[1]
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        total[start:end, :end].addmm_(rows[:, start:end].T, rows[:, :end], alpha=scale)


def mirror_(matrix: Tensor) -> Tensor:
    """Copy the lower triangle of ``(d, d)`` onto the upper one, in place."""
    size = len(matrix)
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        corner = matrix[start:end, start:end]
        corner.copy_(corner.tril() + corner.tril(-1).T)
        matrix[:start, start:end] = matrix[start:end, :start].T
    return matrix


def damped_inverses(matrices: Sequence[Tensor], damping: Sequence[float], names: Sequence[str]) -> list[Tensor]:
    """``(S + damping I)^-1`` of each symmetric matrix whose lower triangle is given; the matrices are overwritten.

    By Cholesky decomposition, in float32 or wider; in float64 where that fails. On a GPU those of one size together, where
    one alone leaves most of it idle; on a CPU each in its own memory.

    Raises:
        ValueError: a matrix is not positive definite even so; its name is given.
    """
    out: list[Tensor] = [torch.empty(0)] * len(matrices)
    for indices in _batches(matrices):
        wide = [matrices[i].to(torch.promote_types(matrices[i].dtype, torch.float32)) for i in indices]
        for i, matrix in zip(indices, wide, strict=True):
            matrix.diagonal().add_(damping[i])
        batch = wide[0] if len(wide) == 1 else torch.stack(wide)
        del wide
        factor, failed = torch.linalg.cholesky_ex(batch)
        if failed.any():
            factor, failed = torch.linalg.cholesky_ex(batch.double())
            if failed.any():
                which = [names[i] for i, bad in zip(indices, failed.reshape(-1).tolist(), strict=True) if bad]
                raise ValueError(f"the damped curvature of {', '.join(which)} is not positive definite; raise damping")
        inverse = torch.cholesky_inverse(factor, out=batch if factor.dtype == batch.dtype else None).to(batch.dtype)
        for i, one in zip(indices, [inverse] if len(indices) == 1 else inverse.unbind(), strict=True):
            out[i] = one
    return out


def eigen(matrices: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues (not below 0) and eigenvectors of positive semi-definite matrices whose lower triangle is given.

    In float64 where the float32 iteration does not converge.
    """
    out: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(matrices)
    for indices in _batches(matrices):
        wide = [matrices[i].to(torch.promote_types(matrices[i].dtype, torch.float32)) for i in indices]
        batch = torch.stack(wide)
        try:
            values, vectors = torch.linalg.eigh(batch)
        except LinAlgError:
            values, vectors = (part.to(batch.dtype) for part in torch.linalg.eigh(batch.double()))
        for number, i in enumerate(indices):
            out[i] = values[number].clamp(min=0), vectors[number]
    return out


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices to be worked on together."""
    together: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        key = (len(matrix),) if matrix.is_cuda else (len(matrix), i)
        together.setdefault(key, []).append(i)
    return list(together.values())
