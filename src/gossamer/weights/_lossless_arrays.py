"""Stored arrays of the lossless layouts: from tensors with checks, and back to tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_SIGNED = {np.dtype(np.uint16): np.int16, np.dtype(np.uint64): np.int64}


def as_tensor(array: np.ndarray) -> Tensor:
    """The same memory as a tensor; uint16 and uint64 as int16 and int64, which safetensors and torch know fully."""
    return torch.from_numpy(array.view(_SIGNED.get(array.dtype, array.dtype)))


def as_array(arrays: Mapping[str, Tensor], name: str, dtype: type[np.generic], size: int | None = None) -> np.ndarray:
    """The same memory as a NumPy array of ``dtype``, after checks.

    Raises:
        ValueError: the array is missing, not on the CPU, not one-dimensional and contiguous, of another integer
            type, or not of ``size`` entries.
    """
    if name not in arrays:
        raise ValueError(f"array {name!r} is missing; there are {', '.join(sorted(arrays)) or 'none'}")
    tensor, wanted = arrays[name], np.dtype(dtype)
    stored = np.dtype(_SIGNED.get(wanted, wanted))
    if str(tensor.dtype) != f"torch.{stored.name}":
        raise ValueError(f"array {name!r} must be {stored.name}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device.type != "cpu":
        raise ValueError(f"array {name!r} must be on the CPU, got {tensor.device}; move it with .cpu()")
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(f"array {name!r} must be one-dimensional and contiguous, got shape {tuple(tensor.shape)}")
    if size is not None and tensor.numel() != size:
        raise ValueError(f"array {name!r} must have {size} entries for this shape, got {tensor.numel()}")
    return tensor.detach().numpy().view(wanted)
