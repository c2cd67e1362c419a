"""What launches of this room's GPU kernels have in common: the type and alignment that a source is compiled for.

Sources stand in ``kernels``; ``prelude.cu`` comes first in all of them. Made things that belong to a pattern (schedules,
row numbers) are kept as long as the pattern's tensors live.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gossamer.core.nvrtc import Kernel, load_kernel

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_ADD_THREADS = 128
_LARGEST_INDEX = (1 << 31) - (1 << 13)
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


@cache
def source(*names: str) -> str:
    """The CUDA source of the named files, one after another, after the prelude."""
    folder = files("gossamer.sparse") / "kernels"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in ("prelude.cu", *names))


@cache
def kernel_of(names: tuple[str, ...], name: str, macros: tuple[tuple[str, int], ...], device: int) -> Kernel:
    """The kernel ``name`` of the files ``names``, compiled for ``device`` and kept."""
    return load_kernel(source(*names), name, macros, device)


def add_partials(partial: Tensor, out: Tensor, sums: Tensor) -> None:
    """Write the rows of ``out`` that several units of work summed up: ``sums`` says which rows of ``partial`` they are."""
    n = out.shape[1]
    macros = ("ALIGN", out.element_size()), ("LANES", 8), ("TYPE", TYPES[out.dtype])
    kernel = kernel_of(("add_partials.cu",), "add_partials", macros, out.device.index or 0)
    kernel.launch((len(sums), -(-n // _ADD_THREADS)), _ADD_THREADS, partial, out, sums, n)


def alignment(columns: int, *tensors: Tensor) -> int:
    """Bytes that every row of these contiguous tensors of ``columns`` columns is aligned to: 16, 8, 4 or 2."""
    size = tensors[0].element_size()
    bits = columns * size
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return max(size, min(16, bits & -bits)) if bits else 16


def kept(tensor: Tensor, key: Any, make: Callable[[], Any]) -> Any:
    """``make()``, once as long as ``tensor`` lives."""
    made = _kept.setdefault(tensor, {})
    if key not in made:
        made[key] = make()
    return made[key]


def narrow(indices: Tensor) -> Tensor:
    """Indices as contiguous int32; the copy, where one is needed, is kept.

    Raises:
        ValueError: there are more than int32 can count.
    """
    if indices.dtype == torch.int32 and indices.is_contiguous():
        return indices
    if indices.numel() > _LARGEST_INDEX:
        raise ValueError(f"the GPU kernels take fewer than 2^31 entries, got {indices.numel()}")
    return kept(indices, "int32", lambda: indices.to(torch.int32).contiguous())
