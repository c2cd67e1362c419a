"""Bit-exact weights into dense ones on a GPU, by kernels that memory bounds: what a prefill multiplies with.

The layout ``tbe`` needs the copy engine of compute capability 9.0, the 12-bit layouts any GPU from 8.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gossamer.core.nvrtc import Kernel
from gossamer.weights._gpu_source import aligned, kernel
from gossamer.weights._tbe_vector import TILE

_THREADS = 128
_TABLES, _PLANES = 2048, 3 * 512  # bytes of shared memory: tables, and the bit planes of a tile
_SHARED_BYTES, _MOST_RESIDENT = 227 << 10, 16
_SPARE = 16


@dataclass(frozen=True)
class TbePlan:
    """How ``tbe`` is decompressed: tiles on their way a block, and blocks a multiprocessor at most."""

    stages: int = 2
    resident: int = 10


def decompress_tbe(
    arrays: Mapping[str, Tensor], meta: Mapping[str, str | int], out: Tensor, plan: TbePlan | None = None
) -> None:
    """Write the bfloat16 patterns of a ``tbe`` matrix into ``out``, int16 ``(rows, columns)`` on the arrays' GPU."""
    plan = plan or TbePlan()
    rows, columns = out.shape
    across = -(-columns // TILE)
    tiles = -(-rows // TILE) * across
    coded = int(meta["max_coded"]) + _SPARE
    stage = _PLANES + coded + 2 * int(meta["max_full"])
    shared = _TABLES + plan.stages * (stage + 8)
    resident = max(1, min(plan.resident, _MOST_RESIDENT, _SHARED_BYTES // (shared + 1024)))
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    wide = int(columns % 8 == 0 and out.data_ptr() % 16 == 0)
    macros = (("STAGES", plan.stages), ("WIDE", wide))
    streams = [aligned(arrays[name]) for name in ("plane1", "plane2", "plane3", "coded", "full")]
    kernel("tbe_decompress.cu", "tbe_decompress", macros, torch.bfloat16, out.device).launch(
        min(tiles, processors * resident), _THREADS, *streams, arrays["offsets"], arrays["warps"], out,
        rows, columns, across, tiles, int(meta["base"]), coded, stage, shared_bytes=shared,
    )  # fmt: skip


def decompress_nib12(arrays: Mapping[str, Tensor], meta: Mapping[str, str | int], out: Tensor) -> None:
    """The same for ``nib12``."""
    rows, columns = out.shape
    blocks = -(-columns // TILE)
    pieces = 4 * rows * blocks
    plane, codes = aligned(arrays["plane"]), aligned(arrays["codes"])
    _twelve_bit("nib12_decompress", out).launch(
        -(-pieces // _THREADS), _THREADS,
        plane, codes, out, np.uint64(pieces), blocks, columns, int(meta["base"]),
    )  # fmt: skip
    _twelve_bit("put_escapes", out).launch(
        -(-rows // _THREADS), _THREADS, arrays["starts"], arrays["columns"], arrays["values"], out, rows, columns
    )


def decompress_fragments(records: Tensor, offsets: Tensor, base: int, out: Tensor) -> None:
    """The same for :class:`~gossamer.weights.FragmentLosslessWeight`."""
    rows, columns = out.shape
    tiles = -(-columns // 128)
    count = -(-rows // 16) * tiles
    _twelve_bit("fragment_decompress", out).launch(
        -(-32 * count // _THREADS), _THREADS, aligned(records), offsets, out, count, tiles, rows, columns, base
    )


def _twelve_bit(name: str, out: Tensor) -> Kernel:
    return kernel("nib12_decompress.cu", name, (), torch.bfloat16, out.device)
