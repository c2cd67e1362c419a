"""Bit-exact bfloat16 weights for tensor cores at 12 bits: sign, mantissa, and the exponent as one of sixteen codes.

Exponents of trained weights crowd into a few values (Fan et al., "ZipServ", ASPLOS 2026, store the seven commonest in
three bits; the fixed 12-bit form follows public formats of that kind). A record (:mod:`gossamer.weights._fragments`) is
2048 bytes of mantissas and signs, 1024 bytes of codes, and then the entries whose exponents lie outside the window of
sixteen, one in thousands: they are coded as ``2 ** (base - 127)``, and a product adds what they differ by (so that an
infinite activation may come out as NaN where such an entry is smaller than that).
``kernels/nib12_tile.cu`` shows the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.weights._decompress_gpu import decompress_fragments
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

WINDOW = 16
_CODED_BYTES = ROWS * COLUMNS * 3 // 2
_CODE_BYTES = ROWS * COLUMNS // 2
_NOWHERE = ROWS * COLUMNS
"""Places of a record from here on are no entry's: they fill up its last unit."""


@dataclass(frozen=True, eq=False)
class FragmentLosslessWeight(FragmentWeight):
    """A bfloat16 matrix of shape ``(out, in)`` in 12 bits an entry, for tensor cores; its tensors may live on a GPU.

    records: int16 ``(8 * units,)``, the records one after another.
    offsets: int32 ``(strips * tiles + 1,)``, where each begins, in units of 16 bytes.
    longest: units of the longest record. base: the least exponent with a code.
    """

    name: ClassVar[str] = "lossless-fragments"
    version: ClassVar[int] = 2
    decoder: ClassVar[Decoder] = Decoder("nib12_tile.cu", registers={1: (56, 64), 2: (64, 64), 4: (64, 80)})

    shape: tuple[int, int]
    dtype: torch.dtype
    records: Tensor
    offsets: Tensor
    longest: int
    base: int

    @classmethod
    def from_dense(cls, weight: Tensor, **options: Any) -> Self:
        """Encode ``weight``, bfloat16, on any device; the result stays on that device.

        Raises:
            TypeError: ``weight`` is no bfloat16 tensor, or an option is given.
            ValueError: ``weight`` is no matrix, or so many exponents lie outside any window of sixteen (as with many zeros
                among other values) that it would take more memory than the dense one.

        >>> weight = torch.randn(64, 256).bfloat16()
        >>> stored = FragmentLosslessWeight.from_dense(weight)
        >>> torch.equal(stored.to_dense(), weight), round(stored.nbytes / stored.dense_nbytes, 2)
        (True, 0.75)
        """
        if options:
            raise TypeError(f"FragmentLosslessWeight takes no options, got {', '.join(options)}")
        bits = check_dense(weight, (torch.bfloat16,))
        base = _densest_window(bits)
        parts = [_encode(bits[rows], base) for rows in strips_at_once(*bits.shape)]
        records = torch.cat([records for records, _ in parts])
        lengths = torch.cat([lengths for _, lengths in parts])
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=bits.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        if int(offsets[-1]) >= 1 << 31:
            raise ValueError(f"weight of shape {tuple(weight.shape)} takes more than 32 GiB; split it by rows")
        if records.numel() > len(lengths) * ROWS * COLUMNS:
            raise ValueError(
                "weight would take more memory than dense: too few of its exponents lie within sixteen neighbours; keep it "
                "dense or, if it has many zeros, use FragmentBitmapWeight or SparseLosslessWeight"
            )
        shape = (weight.shape[0], weight.shape[1])
        return cls(shape, torch.bfloat16, records, offsets.to(torch.int32), int(lengths.max()), base)

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix on the weight's device, written into ``out`` if given."""
        out = self.place_for(out)
        bits = out.view(torch.int16)
        if out.is_cuda and out.is_contiguous() and out.data_ptr() % 16 == 0:
            with torch.cuda.device(out.device):
                decompress_fragments(self.records, self.offsets, self.base, bits)
            return out
        coded = torch.arange(_CODED_BYTES // 2, device=bits.device)
        for rows in strips_at_once(*self.shape):
            strips = range(rows.start // ROWS, -(-rows.stop // ROWS))
            starts = self.offsets[strips.start * self.tiles : strips.stop * self.tiles].long() * (UNIT // 2)
            entries = _decode(self.records[starts[:, None] + coded], self.base)
            bits[rows] = untiled(entries, rows.stop - rows.start, self.shape[1])
        record, places, values = self._escapes()
        rows_of = ROWS * (record // self.tiles) + places // COLUMNS
        bits[rows_of, COLUMNS * (record % self.tiles) + places % COLUMNS] = values
        return out

    def _escapes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Record, place in it and bits of every entry without a code."""
        lengths = self.offsets.long().diff() * (UNIT // 4) - _CODED_BYTES // 4  # in words
        record = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        place_in_list = torch.arange(len(record), device=lengths.device) - (lengths.cumsum(0) - lengths)[record]
        start = self.offsets[record].long() * (UNIT // 4) + _CODED_BYTES // 4
        words = self.records.view(-1, 2)[start + place_in_list]
        places = words[:, 0].long() & 0xFFFF
        listed = places < _NOWHERE
        return record[listed], places[listed], words[listed, 1]

    @property
    def escaped(self) -> int:
        """Entries without a code."""
        return len(self._escapes()[0])

    @property
    def constant(self) -> int:
        """The base."""
        return self.base

    def arrays(self) -> dict[str, Tensor]:
        """``records`` and ``offsets``."""
        return {"records": self.records, "offsets": self.offsets}

    def meta(self) -> dict[str, Scalar]:
        """``longest`` and ``base``."""
        return {"longest": self.longest, "base": self.base}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays without a copy; ``ValueError`` unless they agree with each other and the shape."""
        weight = cls(shape, dtype, **arrays, longest=int(meta["longest"]), base=int(meta["base"]))
        weight.check_records(_CODED_BYTES // UNIT)
        record, places, _ = weight._escapes()
        rows_of, columns = ROWS * (record // weight.tiles) + places // COLUMNS, places % COLUMNS
        inside = (rows_of < shape[0]) & (COLUMNS * (record % weight.tiles) + columns < shape[1])
        if dtype != torch.bfloat16 or not 0 <= weight.base <= 255 - WINDOW or not bool(inside.all()):
            raise ValueError(f"dtype, base and escapes do not fit a {cls.name} weight of shape {shape}")
        return weight


def _exponents(bits: Tensor) -> Tensor:
    return bits.int() >> 7 & 0xFF


def _outside(bits: Tensor, base: int) -> Tensor:
    exponents = _exponents(bits)
    return (exponents < base) | (exponents >= base + WINDOW)


def _densest_window(bits: Tensor) -> int:
    """The least exponent of the sixteen neighbours, infinities' not among them, that cover most entries."""
    counts = torch.zeros(255, dtype=torch.int64, device=bits.device)
    for rows in strips_at_once(*bits.shape):
        counts += torch.bincount(_exponents(bits[rows]).flatten(), minlength=256)[:255]
    return int(counts.unfold(0, WINDOW, 1).sum(1).argmax())


def _encode(bits: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """Records (int16) and their lengths in units of whole strips."""
    coded = _encode_coded(bits, base)
    row, column = _outside(bits, base).nonzero(as_tuple=True)
    record = row // ROWS * -(-bits.shape[1] // COLUMNS) + column // COLUMNS
    record, order = record.sort(stable=True)
    row, column = row[order], column[order]
    counts = torch.bincount(record, minlength=len(coded))
    lengths = _CODED_BYTES // UNIT + -(-4 * counts // UNIT)
    starts = (lengths.cumsum(0) - lengths) * (UNIT // 2)
    records = torch.full((int(lengths.sum()) * (UNIT // 2),), -1, dtype=torch.int16, device=bits.device)
    records[starts[:, None] + torch.arange(coded.shape[1], device=bits.device)] = coded
    place_in_list = torch.arange(len(record), device=bits.device) - (counts.cumsum(0) - counts)[record]
    listed = starts[record] + _CODED_BYTES // 2 + 2 * place_in_list
    records[listed] = (row % ROWS * COLUMNS + column % COLUMNS).to(torch.int16)
    records[listed + 1] = bits[row, column]
    return records, lengths


def _encode_coded(bits: Tensor, base: int) -> Tensor:
    """What every record begins with: int16 ``(records, 1536)``."""
    # record quarter k h group u r t e -> record quarter k h r lane e
    entries = tiled(bits).permute(0, 1, 2, 3, 6, 4, 5, 7, 8).reshape(-1, 4, 2, 2, 2, 32, 2).int()
    exponents = entries >> 7 & 0xFF
    inside = (exponents >= base) & (exponents < base + WINDOW)
    code = torch.where(inside, exponents - base, 0)
    sign = torch.where(inside, entries >> 15 & 1, 0)
    mantissa = torch.where(inside, entries & 0x7F, 0)
    low_bytes = mantissa << 1 | sign.flip(-1)
    pairs = low_bytes[..., 0] | low_bytes[..., 1] << 8  # record quarter k h r lane
    pairs = pairs.permute(0, 1, 5, 2, 3, 4).reshape(len(entries), -1)
    shifts = torch.tensor([0, 4, 8, 12], device=bits.device).view(2, 2, 1, 1)
    codes = (code << shifts).sum((3, 4))  # record quarter k lane e
    codes = codes.view(-1, 2, 2, 2, 32, 2).permute(0, 1, 4, 2, 3, 5).reshape(len(entries), -1)
    words = torch.cat([pairs, codes], 1)
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16)


def _decode(records: Tensor, base: int) -> Tensor:
    """The entries (int16) of records ``(records, 1536)`` without their escapes, in the axes of :func:`tiled`."""
    words = records.int() & 0xFFFF
    pairs = words[:, : -_CODE_BYTES // 2].reshape(-1, 4, 32, 2, 2, 2).permute(0, 1, 3, 4, 5, 2)
    low_bytes = torch.stack([pairs & 0xFF, pairs >> 8], -1)  # record quarter k h r lane e
    codes = words[:, -_CODE_BYTES // 2 :].reshape(-1, 2, 32, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
    shifts = torch.tensor([0, 4, 8, 12], device=records.device).view(2, 2, 1, 1)
    code = codes.reshape(-1, 4, 2, 1, 1, 32, 2) >> shifts & 0xF
    entries = (low_bytes.flip(-1) & 1) << 15 | (base + code) << 7 | low_bytes >> 1
    entries = torch.where(entries < 1 << 15, entries, entries - (1 << 16)).to(torch.int16)
    return entries.view(-1, 4, 2, 2, 2, 4, 2, 4, 2).permute(0, 1, 2, 3, 5, 6, 4, 7, 8)
