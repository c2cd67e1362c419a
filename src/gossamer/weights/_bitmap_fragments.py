"""Bitmap weights for tensor cores: the zeros of a pruned matrix cost one bit, on a GPU and while it multiplies.

A record (:mod:`gossamer.weights._fragments`) is 256 bytes of mask, 128 bytes that say where each mask word's values
start, and then its stored values, filled up to 16 bytes; ``kernels/bitmap_tile.cu`` shows the order.

The published layout for tensor cores (Fan et al., "SpInfer", EuroSys 2025; :class:`BitmapWeight` with ``layout="tca"``)
costs a lane one 64-bit popcount per two weights and reads mask, values and offsets from three streams; this order is
our own and holds the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.weights._format import Scalar
from gossamer.weights._fragments import (
    COLUMNS,
    ROWS,
    UNIT,
    FragmentWeight,
    check_dense,
    strips_at_once,
    tiled,
    untiled,
)
from gossamer.weights._fragments_gpu import Decoder

_MASK_BYTES = ROWS * COLUMNS // 8
_HEAD_BYTES = _MASK_BYTES + ROWS * COLUMNS // 16
_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class FragmentBitmapWeight(FragmentWeight):
    """A 16-bit matrix of shape ``(out, in)`` without its zeros, for tensor cores; its tensors may live on a GPU.

    records: int16 ``(8 * units,)``, the records one after another.
    offsets: int32 ``(strips * tiles + 1,)``, where each begins, in units of 16 bytes.
    longest: units of the longest record; sizes the kernel's buffers.
    """

    name: ClassVar[str] = "bitmap-fragments"
    version: ClassVar[int] = 1
    decoder: ClassVar[Decoder] = Decoder("bitmap_tile.cu", registers={1: (48, 64), 2: (56, 72), 4: (80, 96)})

    shape: tuple[int, int]
    dtype: torch.dtype
    records: Tensor
    offsets: Tensor
    longest: int

    @classmethod
    def from_dense(cls, weight: Tensor, preserve_signed_zero: bool = False, **options: Any) -> Self:
        """Drop the zeros of ``weight``, float16 or bfloat16, on any device; the result stays on that device.

        preserve_signed_zero: store -0.0 as an entry, else it becomes 0.0.

        Raises:
            TypeError: ``weight`` is no tensor of one of the two types, or an option is unknown.
            ValueError: ``weight`` is no matrix.

        >>> weight = FragmentBitmapWeight.from_dense(torch.eye(64, dtype=torch.bfloat16))
        >>> weight.density, weight.nbytes, torch.equal(weight.to_dense(), torch.eye(64, dtype=torch.bfloat16))
        (0.015625, 1684, True)
        """
        if options:
            raise TypeError(f"FragmentBitmapWeight takes preserve_signed_zero, got {', '.join(options)}")
        bits = check_dense(weight, _TYPES)
        kept = -1 if preserve_signed_zero else 0x7FFF
        parts = [_encode(bits[rows], kept) for rows in strips_at_once(*bits.shape)]
        records = torch.cat([records for records, _ in parts])
        lengths = torch.cat([lengths for _, lengths in parts])
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=weight.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if int(offsets[-1]) >= 1 << 31:
            raise ValueError(f"weight of shape {tuple(weight.shape)} takes more than 32 GiB; split it by rows")
        shape = (weight.shape[0], weight.shape[1])
        return cls(shape, weight.dtype, records, offsets.to(torch.int32), int(lengths.max()))

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix on the weight's device, written into ``out`` if given."""
        out = self.place_for(out)
        bits = out.view(torch.int16)
        for rows in strips_at_once(*self.shape):
            _decode(self.records, self.offsets, rows.start // ROWS, bits[rows])
        return out

    @property
    def density(self) -> float:
        """Share of entries that are stored."""
        starts = self.offsets[:-1].long() * (UNIT // 2)
        masks = self.records[starts[:, None] + torch.arange(_MASK_BYTES // 2, device=starts.device)]
        return int(_popcounts(masks.int() & 0xFFFF).sum()) / (self.shape[0] * self.shape[1])

    def arrays(self) -> dict[str, Tensor]:
        """``records`` and ``offsets``."""
        return {"records": self.records, "offsets": self.offsets}

    def meta(self) -> dict[str, Scalar]:
        """``longest``."""
        return {"longest": self.longest}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays without a copy; ``ValueError`` unless masks, offsets and records agree."""
        weight = cls(shape, dtype, arrays["records"], arrays["offsets"], int(meta["longest"]))
        if dtype not in _TYPES:
            raise ValueError(f"dtype must be float16 or bfloat16, got {dtype}")
        weight.check_records(_HEAD_BYTES // UNIT)
        _check_heads(weight.records, weight.offsets)
        return weight


def _popcounts(halves: Tensor) -> Tensor:
    """Set bits of 16-bit numbers (int32), without a scratch array of sixteen times their size."""
    counts = torch.zeros_like(halves)
    for bit in range(16):
        counts += halves >> bit & 1
    return counts


def _starts(counts: Tensor) -> Tensor:
    """Where each mask word's values begin in its record, as stored, from the counts in the order of the values."""
    return (_HEAD_BYTES + 2 * (counts.cumsum(1) - counts)).view(-1, 16, 4).transpose(1, 2).flatten(1)


def _check_heads(records: Tensor, offsets: Tensor) -> None:
    """``ValueError`` unless masks, starts and lengths agree: the kernel reads where they say."""
    heads = records[offsets[:-1].long()[:, None] * (UNIT // 2) + torch.arange(_HEAD_BYTES // 2, device=records.device)]
    masks, starts = heads[:, : _MASK_BYTES // 2].int() & 0xFFFF, heads[:, _MASK_BYTES // 2 :].int() & 0xFFFF
    counts = _popcounts(masks).view(-1, 4, 16, 2).sum(-1).transpose(1, 2).flatten(1)  # in the order of the values
    lengths = (_HEAD_BYTES + 2 * counts.sum(1) + UNIT - 1) // UNIT
    if not torch.equal(lengths, offsets.long().diff()) or not torch.equal(starts.long(), _starts(counts)):
        raise ValueError("masks, starts and lengths of the records contradict each other")


def _encode(bits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Records (int16) and their lengths in units of whole strips."""
    entries = tiled(bits).flatten(1)
    stored = (entries & kept) != 0
    lengths = _HEAD_BYTES // UNIT + (2 * stored.sum(1) + UNIT - 1) // UNIT
    starts = (lengths.cumsum(0) - lengths) * (UNIT // 2)
    records = torch.zeros(int(lengths.sum()) * (UNIT // 2), dtype=torch.int16, device=bits.device)
    weights = 1 << torch.arange(16, device=bits.device)
    halves = (stored.view(-1, 16, 4, 2, 16) * weights).sum(-1).transpose(1, 2).flatten(1)  # words as (group, step)
    counts = stored.view(-1, 64, 32).sum(2)
    head = torch.cat([torch.where(halves < 1 << 15, halves, halves - (1 << 16)), _starts(counts)], 1)
    places = starts[:, None] + torch.arange(_HEAD_BYTES // 2, device=bits.device)
    records[places] = head.to(torch.int16)
    record, entry = stored.nonzero(as_tuple=True)
    rank = stored.cumsum(1)[record, entry] - 1
    records[starts[record] + _HEAD_BYTES // 2 + rank] = entries[record, entry]
    return records, lengths


def _decode(records: Tensor, offsets: Tensor, first_strip: int, out: Tensor) -> None:
    """Write the rows of some strips into ``out`` (int16)."""
    rows, columns = out.shape
    strips, tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    starts = offsets[first_strip * tiles : (first_strip + strips) * tiles].long() * (UNIT // 2)
    places = starts[:, None] + torch.arange(_MASK_BYTES // 2, device=out.device)
    words = records[places].view(-1, 4, 16, 2).transpose(1, 2).flatten(1).int()  # halves in the order of the values
    stored = ((words[..., None] >> torch.arange(16, device=out.device)) & 1).flatten(1).bool()
    rank = stored.cumsum(1) - 1
    last = len(records) - 1
    values = records[(starts[:, None] + _HEAD_BYTES // 2 + rank).clamp(0, last)]
    entries = torch.where(stored, values, 0)
    out.copy_(untiled(entries, rows, columns))
