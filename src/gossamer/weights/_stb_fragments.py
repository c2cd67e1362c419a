"""Binarised N:8 weights for tensor cores, at four bits and a table a weight: "code4" of :class:`STBWeight` on a GPU.

A record (:mod:`gossamer.weights._fragments`) covers a whole block of the quantiser, so that the values of its 16 rows come
with its codes, and no weight waits for a scale from elsewhere. ``kernels/stb_tile.cu`` shows the order, which is our own;
the quantiser is that of Dong et al., "STBLLM", ICLR 2025. 5.6 bits a weight are stored, in 0.55 bits as papers count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gossamer.weights._format import Scalar
from gossamer.weights._fragments import COLUMNS, ROWS, UNIT, FragmentWeight, check_dense
from gossamer.weights._fragments_gpu import Decoder
from gossamer.weights._stb import STBWeight
from gossamer.weights._stb_quantise import LEVELS, STBLevels, stb_quantize

_TYPES = (torch.float16, torch.bfloat16)
_FIRST_SALIENT = 7  # level
_CODE_OF_SALIENT = 3  # less in salient columns: 4 .. 7
_HEAD_BYTES, _VALUE_BYTES, _CODE_BYTES = COLUMNS // 8, 24 * ROWS, ROWS * COLUMNS // 2
_RECORD_BYTES = _HEAD_BYTES + _VALUE_BYTES + _CODE_BYTES


@dataclass(frozen=True, eq=False)
class FragmentSTBWeight(FragmentWeight):
    """A binarised 16-bit matrix of shape ``(out, in)`` for tensor cores; its tensors may live on a GPU.

    records: int16 ``(712 * strips * tiles,)``, the records one after another, all of one size.
    offsets: int32 ``(strips * tiles + 1,)``, where each begins, in units of 16 bytes.
    longest: units of a record.
    """

    name: ClassVar[str] = "stb-fragments"
    version: ClassVar[int] = 1
    decoder: ClassVar[Decoder] = Decoder("stb_tile.cu", registers={1: (56, 72), 2: (64, 96), 4: (80, 112)})

    shape: tuple[int, int]
    dtype: torch.dtype
    records: Tensor
    offsets: Tensor
    longest: int

    @classmethod
    def from_dense(cls, weight: Tensor, norms: Tensor | None = None, n: int = 4, **options: Any) -> Self:
        """Binarise ``weight``, float16 or bfloat16; this loses most of the precision. The result is on its device.

        norms, n: as :func:`stb_quantize` takes them.

        Raises:
            TypeError: ``weight`` is no tensor of one of the two types, or an option is unknown.
            ValueError: it is not a finite matrix, or ``norms`` or ``n`` does not fit.

        >>> weight = FragmentSTBWeight.from_dense(torch.randn(64, 512).half())
        >>> round(weight.stored_bits, 1), round(weight.density, 1)
        (5.6, 0.5)
        """
        if options:
            raise TypeError(f"FragmentSTBWeight takes norms and n, got {', '.join(options)}")
        check_dense(weight, _TYPES)
        return cls.from_levels(stb_quantize(weight.detach().cpu(), norms, n), weight.dtype).to(weight.device)

    @classmethod
    def from_levels(cls, levels: STBLevels, dtype: torch.dtype = torch.float16) -> Self:
        """Pack what a quantiser found; values are rounded to ``dtype``, float16 or bfloat16.

        Raises:
            ValueError: ``dtype`` is another, or a column of a block is salient in some rows only.
        """
        return cls._packed(levels.shape, levels.level, levels.table(), dtype)

    @classmethod
    def from_stb(cls, weight: STBWeight) -> Self:
        """The matrix of an :class:`STBWeight` of either 16-bit type, from any of its codes, on the CPU."""
        rows = weight.shape[0]
        return cls._packed(
            weight.shape, torch.from_numpy(weight._levels()[:rows]), weight._table()[:rows], weight.dtype
        )

    @classmethod
    def _packed(cls, shape: tuple[int, int], level: Tensor, table: Tensor, dtype: torch.dtype) -> Self:
        if dtype not in _TYPES:
            raise ValueError(f"dtype must be float16 or bfloat16, got {dtype}")
        strips, tiles = -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)
        levels = level.new_zeros(strips * ROWS, tiles * COLUMNS)
        levels[: shape[0]] = level[:, : tiles * COLUMNS]
        values = torch.zeros(strips * ROWS, tiles, LEVELS, dtype=dtype, device=level.device)
        values[: shape[0]] = table[:, :tiles].to(dtype)
        salient = (levels >= _FIRST_SALIENT).any(0)
        if bool(((levels > 0) & (levels < _FIRST_SALIENT) & salient).any()):
            raise ValueError("levels must be those of salient columns in all rows of a column or in none")
        records = torch.cat([_heads(salient, strips), _value_bytes(values), _codes(levels)], 2).flatten()
        longest = _RECORD_BYTES // UNIT
        offsets = torch.arange(0, longest * strips * tiles + 1, longest, dtype=torch.int64, device=level.device)
        return cls(shape, dtype, records.view(torch.int16), offsets.to(torch.int32), longest)

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix on the weight's device, written into ``out`` if given."""
        out = self.place_for(out)
        level, values = self._unpacked()
        cells = level.view(len(level), self.tiles, COLUMNS)
        dense = values.gather(2, cells.long()).flatten(1)
        return out.copy_(dense[: self.shape[0], : self.shape[1]])

    @property
    def density(self) -> float:
        """Share of entries that are kept."""
        level, _ = self._unpacked()
        return float((level[: self.shape[0], : self.shape[1]] > 0).double().mean())

    @property
    def stored_bits(self) -> float:
        """Bits a weight of everything that is stored."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

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
        """Wrap stored arrays without a copy; ``ValueError`` unless they agree with each other and the shape."""
        weight = cls(shape, dtype, arrays["records"], arrays["offsets"], int(meta["longest"]))
        weight.check_records(_RECORD_BYTES // UNIT)
        if dtype not in _TYPES or weight.longest != _RECORD_BYTES // UNIT:
            raise ValueError(f"dtype and longest do not fit a {cls.name} weight of shape {shape}")
        return weight

    def _unpacked(self) -> tuple[Tensor, Tensor]:
        """Levels ``(rows, columns)``, uint8, and values ``(rows, tiles, 11)``, both filled up."""
        records = self.records.view(torch.uint8).view(self.strips, self.tiles, _RECORD_BYTES)
        heads, values, codes = records.split([_HEAD_BYTES, _VALUE_BYTES, _CODE_BYTES], 2)
        bits = torch.arange(8, device=heads.device)
        salient = (heads[..., None] >> bits & 1).bool().view(self.strips, 1, -1)
        code = _levels(codes)
        of_salient = salient.expand(-1, ROWS, -1).reshape(code.shape) & (code > 0)
        level = torch.where(of_salient, code + _CODE_OF_SALIENT, code)
        return level, _values(values).view(self.dtype)


def _heads(salient: Tensor, strips: int) -> Tensor:
    """Bytes ``(strips, tiles, 16)``: a bit a column."""
    weights = 1 << torch.arange(8, device=salient.device)
    heads = (salient.view(-1, _HEAD_BYTES, 8) * weights).sum(2).to(torch.uint8)
    return heads.expand(strips, -1, -1)


def _value_bytes(values: Tensor) -> Tensor:
    """Bytes ``(strips, tiles, 384)`` of the values ``(rows, tiles, 11)``: by byte, then the salient ones."""
    rows, tiles, _ = values.shape
    low_high = values.contiguous().view(torch.uint8).view(rows // ROWS, ROWS, tiles, LEVELS, 2).permute(0, 2, 1, 4, 3)
    others = low_high.new_zeros(*low_high.shape[:4], 8)
    others[..., :_FIRST_SALIENT] = low_high[..., :_FIRST_SALIENT]
    return torch.cat([others.flatten(2), low_high[..., _FIRST_SALIENT:].flatten(2)], 2)


def _values(stored: Tensor) -> Tensor:
    """The inverse: the bits of the values, int16 ``(rows, tiles, 11)``."""
    strips, tiles, _ = stored.shape
    others, salient = stored.split([16 * ROWS, 8 * ROWS], 2)
    low_high = torch.cat(
        [others.reshape(strips, tiles, ROWS, 2, 8)[..., :_FIRST_SALIENT], salient.reshape(strips, tiles, ROWS, 2, 4)], 4
    )
    values = low_high.permute(0, 2, 1, 4, 3).contiguous().view(torch.int16)
    return values.view(strips * ROWS, tiles, LEVELS)


def _codes(levels: Tensor) -> Tensor:
    """Bytes ``(strips, tiles, 1024)`` of the levels of whole records."""
    rows, columns = levels.shape
    code = torch.where(levels >= _FIRST_SALIENT, levels - _CODE_OF_SALIENT, levels)
    pairs = code[:, 0::2] | code[:, 1::2] << 4
    #                        strip r g tile half q t byte  ->  strip tile half g t q r byte
    axes = pairs.view(rows // ROWS, 2, 8, columns // COLUMNS, 2, 2, 4, 4).permute(0, 3, 4, 2, 6, 5, 1, 7)
    return axes.reshape(rows // ROWS, columns // COLUMNS, _CODE_BYTES)


def _levels(codes: Tensor) -> Tensor:
    """The inverse, salient codes as they are."""
    strips, tiles, _ = codes.shape
    axes = codes.reshape(strips, tiles, 2, 8, 4, 2, 2, 4).permute(0, 6, 3, 1, 2, 5, 4, 7)
    pairs = axes.reshape(strips * ROWS, tiles * COLUMNS // 2)
    return torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)
