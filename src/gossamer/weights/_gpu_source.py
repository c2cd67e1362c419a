"""The CUDA sources of this room: ``kernels/machine.cu``, the words they are written in, then one kernel file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from gossamer.core.nvrtc import Kernel, load_kernel

Macros = tuple[tuple[str, int], ...]


@cache
def source(name: str) -> str:
    """The whole text for the kernels in ``kernels/name``."""
    folder = files("gossamer.weights") / "kernels"
    return "".join((folder / part).read_text(encoding="utf-8") for part in ("machine.cu", name))


def kernel(file: str, name: str, macros: Macros, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel ``name`` of ``kernels/file`` for one GPU; 16-bit numbers are ``dtype``."""
    chosen = (*macros, ("BFLOAT16", int(dtype == torch.bfloat16)))
    return load_kernel(source(file), name, chosen, device.index or 0)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it does not begin at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
