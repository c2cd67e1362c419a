"""B in the order in which kernels read it: strip by strip, each ``(k, width)``, padded with zeros to whole vectors."""

from __future__ import annotations

import numpy as np

from gossamer.codegen import Strip
from gossamer.core.jit import aligned_bytes


def padded_width(strip: Strip, lanes: int) -> int:
    """Columns of a strip in memory."""
    return strip.vectors * lanes


def strip_starts(strips: tuple[Strip, ...], lanes: int, k: int) -> list[int]:
    """Where every strip begins, in numbers, and the end of the last."""
    starts = [0]
    for strip in strips:
        starts.append(starts[-1] + k * padded_width(strip, lanes))
    return starts


def pack(b: np.ndarray, strips: tuple[Strip, ...], lanes: int) -> np.ndarray:
    """``b``, ``(k, n)`` or a stack ``(items, k, n)``, packed: ``(items, numbers)``, aligned to 64 bytes."""
    stack = b[None] if b.ndim == 2 else b
    items, k, _ = stack.shape
    starts = strip_starts(strips, lanes, k)
    size = -(-starts[-1] * b.itemsize // 64) * 64
    packed = aligned_bytes(items * size).view(b.dtype).reshape(items, size // b.itemsize)
    for strip, start in zip(strips, starts, strict=False):
        width = padded_width(strip, lanes)
        target = packed[:, start : start + k * width].reshape(items, k, width)
        target[:, :, : strip.columns] = stack[:, :, strip.start : strip.start + strip.columns]
    return packed
