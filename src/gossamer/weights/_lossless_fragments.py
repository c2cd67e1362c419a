"""Bit-exact bfloat16 weights for tensor cores at 12 bits: sign, mantissa, and the exponent as one of sixteen codes.

Exponents of trained weights crowd into a few values (Fan et al., "ZipServ", ASPLOS 2026, store the seven commonest in
three bits; the fixed 12-bit form follows public formats of that kind). A record (:mod:`gossamer.weights._fragments`) is
2048 bytes of mantissas and signs, then 1024 bytes of codes; ``kernels/nib12_tile.cu`` shows the order. The entries whose
exponents lie outside the window of sixteen, one in a thousand, are stored beside, row by row; their codes say
``2 ** (base - 127)``, and a product adds what they differ by.
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
_RECORD_BYTES = ROWS * COLUMNS * 3 // 2
_CODE_BYTES = ROWS * COLUMNS // 2


@dataclass(frozen=True, eq=False)
class FragmentLosslessWeight(FragmentWeight):
    """A bfloat16 matrix of shape ``(out, in)`` in 12 bits an entry, for tensor cores; its tensors may live on a GPU.

    records: int16 ``(1536 * records,)``. offsets: int32 ``(strips * tiles + 1,)``, units of 16 bytes.
    escape_rows: int32 ``(out + 1,)``, where each row's escapes begin; escape_columns: int32; escape_values: int16, the
        entries' bits. longest: 192, units of a record. base: the least exponent with a code.
    """

    name: ClassVar[str] = "lossless-fragments"
    version: ClassVar[int] = 1
    decoder: ClassVar[Decoder] = Decoder("nib12_tile.cu", registers={1: (56, 64), 2: (56, 72), 4: (72, 80)})

    shape: tuple[int, int]
    dtype: torch.dtype
    records: Tensor
    offsets: Tensor
    escape_rows: Tensor
    escape_columns: Tensor
    escape_values: Tensor
    longest: int
    base: int

    @classmethod
    def from_dense(cls, weight: Tensor, **options: Any) -> Self:
        """Encode ``weight``, bfloat16, on any device; the result stays on that device.

        Raises:
            TypeError: ``weight`` is no bfloat16 tensor, or an option is given.
            ValueError: ``weight`` is no matrix.

        >>> weight = torch.randn(64, 256).bfloat16()
        >>> stored = FragmentLosslessWeight.from_dense(weight)
        >>> torch.equal(stored.to_dense(), weight), round(stored.nbytes / stored.dense_nbytes, 2)
        (True, 0.76)
        """
        if options:
            raise TypeError(f"FragmentLosslessWeight takes no options, got {', '.join(options)}")
        bits = check_dense(weight, (torch.bfloat16,))
        base = _densest_window(bits)
        parts = [_encode(bits[rows], base) for rows in strips_at_once(*bits.shape)]
        escaped = [(bits[rows], _outside(bits[rows], base)) for rows in strips_at_once(*bits.shape)]
        counts = torch.cat([outside.sum(1) for _, outside in escaped])
        escape_rows = torch.zeros(len(bits) + 1, dtype=torch.int32, device=bits.device)
        escape_rows[1:] = counts.cumsum(0)
        units = _RECORD_BYTES // UNIT
        records = torch.cat(parts)
        if records.numel() * 2 // UNIT >= 1 << 31:
            raise ValueError(f"weight of shape {tuple(weight.shape)} takes more than 32 GiB; split it by rows")
        offsets = units * torch.arange(records.numel() * 2 // _RECORD_BYTES + 1, dtype=torch.int32, device=bits.device)
        columns = torch.cat([outside.nonzero()[:, 1].int() for _, outside in escaped])
        values = torch.cat([chunk[outside] for chunk, outside in escaped])
        shape = (weight.shape[0], weight.shape[1])
        return cls(shape, torch.bfloat16, records, offsets, escape_rows, columns, values, units, base)

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix on the weight's device, written into ``out`` if given."""
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.records.device)
        bits = out.view(torch.int16)
        if out.is_cuda and out.is_contiguous() and out.data_ptr() % 16 == 0:
            with torch.cuda.device(out.device):
                decompress_fragments(self.records, self.base, self.escapes, bits)
            return out
        words = _RECORD_BYTES // 2 * self.tiles
        for rows in strips_at_once(*self.shape):
            strips = slice(rows.start // ROWS * words, -(-rows.stop // ROWS) * words)
            bits[rows] = untiled(_decode(self.records[strips], self.base), rows.stop - rows.start, self.shape[1])
        rows_of = torch.repeat_interleave(torch.arange(self.shape[0], device=bits.device), self.escape_rows.diff())
        bits[rows_of, self.escape_columns.long()] = self.escape_values
        return out

    @property
    def constant(self) -> int:
        """The base."""
        return self.base

    @property
    def escapes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three escape arrays."""
        return self.escape_rows, self.escape_columns, self.escape_values

    def arrays(self) -> dict[str, Tensor]:
        """Records, offsets and escapes."""
        names = ("records", "offsets", "escape_rows", "escape_columns", "escape_values")
        return {name: getattr(self, name) for name in names}

    def meta(self) -> dict[str, Scalar]:
        """``longest`` and ``base``."""
        return {"longest": self.longest, "base": self.base}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays without a copy; ``ValueError`` unless they agree with each other and the shape."""
        weight = cls(shape, dtype, **arrays, longest=int(meta["longest"]), base=int(meta["base"]))
        weight.check_records(_RECORD_BYTES // UNIT)
        counts, columns = weight.escape_rows.long().diff(), weight.escape_columns
        if (
            len(counts) != shape[0]
            or int(weight.escape_rows[0]) != 0
            or int(counts.min()) < 0
            or int(weight.escape_rows[-1]) != len(columns)
            or len(columns) != len(weight.escape_values)
            or len(columns)
            and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]
            or not 0 <= weight.base <= 255 - WINDOW
        ):
            raise ValueError(f"the escapes do not fit a {cls.name} weight of shape {shape}")
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


def _encode(bits: Tensor, base: int) -> Tensor:
    """Records (int16) of whole strips."""
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
    return torch.where(words < 1 << 15, words, words - (1 << 16)).to(torch.int16).flatten()


def _decode(records: Tensor, base: int) -> Tensor:
    """The entries (int16) of whole strips, in the axes of :func:`tiled`."""
    words = records.view(-1, _RECORD_BYTES // 2).int() & 0xFFFF
    pairs = words[:, : -_CODE_BYTES // 2].reshape(-1, 4, 32, 2, 2, 2).permute(0, 1, 3, 4, 5, 2)
    low_bytes = torch.stack([pairs & 0xFF, pairs >> 8], -1)  # record quarter k h r lane e
    codes = words[:, -_CODE_BYTES // 2 :].reshape(-1, 2, 32, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
    shifts = torch.tensor([0, 4, 8, 12], device=records.device).view(2, 2, 1, 1)
    code = codes.reshape(-1, 4, 2, 1, 1, 32, 2) >> shifts & 0xF
    entries = (low_bytes.flip(-1) & 1) << 15 | (base + code) << 7 | low_bytes >> 1
    entries = torch.where(entries < 1 << 15, entries, entries - (1 << 16)).to(torch.int16)
    return entries.view(-1, 4, 2, 2, 2, 4, 2, 4, 2).permute(0, 1, 2, 3, 5, 6, 4, 7, 8)
