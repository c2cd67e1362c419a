"""The GPU kernel of :class:`FragmentBitmapWeight`: which variant to run, and running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from gossamer.core.nvrtc import Kernel, load_kernel
from gossamer.weights._bitmap_fragments import COLUMNS, FragmentBitmapWeight

MAX_N = 64
"""More rows of activations than this are multiplied by the decoded matrix."""


_THREADS = 256


@dataclass(frozen=True)
class FragmentPlan:
    """A variant of the kernel.

    strips: strips of 16 rows a warp. stages: records in flight a warp. warps: a block. splits: of the columns each
    summed apart and added by a second kernel.
    """

    strips: int
    stages: int
    warps: int
    splits: int
    chunk: int = 8


@cache
def source() -> str:
    """The CUDA source."""
    return (files("gossamer.weights") / "kernels" / "bitmap_fragments.cu").read_text(encoding="utf-8")


def shared_bytes(weight: FragmentBitmapWeight, n: int, plan: FragmentPlan) -> int:
    """Shared memory of a block."""
    return x_bytes(weight, n, plan) + plan.warps * plan.stages * (plan.strips * _slot_bytes(weight) + 16)


def x_bytes(weight, n, plan):
    split = -(-weight.tiles // plan.splits)
    chunk = min(plan.chunk, split)
    return (1 if chunk >= split else 2) * chunk * 2048 * _blocks(n)


EXTRA = ()
def multiply(weight: FragmentBitmapWeight, x: Tensor, plan: FragmentPlan) -> Tensor:
    """``x @ W.T`` for ``x`` of shape ``(n, in)``, n up to ``MAX_N``, with the dtype and on the GPU of the weight."""
    n, rows = x.shape[0], weight.shape[0]
    columns = COLUMNS * weight.tiles
    if x.shape[1] != columns:
        x = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    x = x.contiguous()
    y = torch.empty((n, rows), dtype=x.dtype, device=x.device)
    partial = torch.empty((plan.splits, n, rows) if plan.splits > 1 else 0, dtype=torch.float32, device=x.device)
    grid = (-(-weight.strips // (plan.strips * plan.warps)), plan.splits)
    linear, add = _kernels(_blocks(n), plan.strips, plan.stages, weight.dtype == torch.bfloat16, x.device.index or 0, EXTRA)
    linear.launch(
        grid, 32 * plan.warps, weight.records, weight.offsets, x, y, partial,
        n, rows, weight.strips, weight.tiles, -(-weight.tiles // plan.splits), plan.chunk, x_bytes(weight, n, plan), _slot_bytes(weight),
        shared_bytes=shared_bytes(weight, n, plan),
    )  # fmt: skip
    if plan.splits > 1:
        add.launch(-(-y.numel() // _THREADS), _THREADS, partial, y, y.numel(), plan.splits)
    return y


def _slot_bytes(weight: FragmentBitmapWeight) -> int:
    """Room for one record in shared memory; a pair's second load may read two bytes past the last value."""
    return 16 * weight.longest + 16


def _blocks(n: int) -> int:
    """The kernel's tile of activations, in eights: 1, 2, 4 or 8."""
    return 1 << max(0, (-(-n // 8) - 1).bit_length())


@cache
def _kernels(blocks: int, strips: int, stages: int, bfloat16: bool, device: int, extra=()) -> tuple[Kernel, Kernel]:
    macros = (("BLOCKS", blocks), ("STRIPS", strips), ("STAGES", stages), ("BFLOAT16", int(bfloat16)), *extra)
    return load_kernel(source(), "bitmap_linear", macros, device), load_kernel(source(), "add_splits", macros, device)
