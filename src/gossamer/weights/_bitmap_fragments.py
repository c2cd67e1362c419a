"""Bitmap weights in the order in which tensor cores take them: small in memory, decoded in registers on a GPU.

The matrix is cut into records of 16 rows x 128 columns, strip by strip. A record is 256 bytes of mask, 128 bytes that
say where each mask word's values start, and then its stored values, filled up to 16 bytes, in the order in which the
lanes of a warp need them for ``mma.m16n8k16`` (the picture is in ``kernels/bitmap_fragments.cu``). It is one contiguous
copy, whatever its density, and needs no other's.

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
from torch.nn import functional as F

from gossamer.weights import _bitmap_fragments_gpu as gpu
from gossamer.weights._format import Matvec, Scalar, WeightFormat

ROWS, COLUMNS = 16, 128
_MASK_BYTES = ROWS * COLUMNS // 8
_HEAD_BYTES = _MASK_BYTES + ROWS * COLUMNS // 16
_UNIT = 16
_CHUNK = 1 << 24
_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class FragmentBitmapWeight(WeightFormat):
    """A 16-bit matrix of shape ``(out, in)`` without its zeros, for tensor cores; its tensors may live on a GPU.

    records: int16 ``(8 * units,)``, the records one after another.
    offsets: int32 ``(strips * tiles + 1,)``, where each begins, in units of 16 bytes.
    longest: units of the longest record; sizes the kernel's buffers.
    """

    name: ClassVar[str] = "bitmap-fragments"
    version: ClassVar[int] = 1

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
        (0.015625, 916, True)
        """
        if options:
            raise TypeError(f"FragmentBitmapWeight takes preserve_signed_zero, got {', '.join(options)}")
        if not isinstance(weight, Tensor) or weight.dtype not in _TYPES:
            raise TypeError(
                f"weight must be a float16 or bfloat16 tensor, got {getattr(weight, 'dtype', type(weight))}"
            )
        if weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(f"weight must be a matrix (out, in) without empty dimensions, got {tuple(weight.shape)}")
        kept = -1 if preserve_signed_zero else 0x7FFF
        bits = weight.detach().contiguous().view(torch.int16)
        parts = [_encode(chunk, kept) for chunk in bits.split(_strips_at_once(weight.shape[1]) * ROWS)]
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
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.records.device)
        bits = out.view(torch.int16)
        strips = _strips_at_once(self.shape[1])
        for start in range(0, self.shape[0], strips * ROWS):
            chunk = bits[start : start + strips * ROWS]
            _decode(self.records, self.offsets, start // ROWS, chunk)
        return out

    def clone(self) -> Self:
        """The same weight in memory of its own."""
        return type(self)(self.shape, self.dtype, self.records.clone(), self.offsets.clone(), self.longest)

    def to(self, device: str | torch.device) -> Self:
        """The same weight on another device."""
        return type(self)(self.shape, self.dtype, self.records.to(device), self.offsets.to(device), self.longest)

    @property
    def strips(self) -> int:
        """Strips of 16 rows."""
        return -(-self.shape[0] // ROWS)

    @property
    def tiles(self) -> int:
        """Records of a strip."""
        return -(-self.shape[1] // COLUMNS)

    @property
    def padded_columns(self) -> int:
        """Columns, filled up to whole records."""
        return COLUMNS * self.tiles

    @property
    def density(self) -> float:
        """Share of entries that are stored."""
        starts = self.offsets[:-1].long() * (_UNIT // 2)
        masks = self.records[starts[:, None] + torch.arange(_MASK_BYTES // 2, device=starts.device)]
        bits = (masks.flatten().int()[:, None] >> torch.arange(16, device=starts.device)) & 1
        return int(bits.sum()) / (self.shape[0] * self.shape[1])

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
        lengths = weight.offsets.long().diff()
        if (
            dtype not in _TYPES
            or len(lengths) != weight.strips * weight.tiles
            or int(weight.offsets[0]) != 0
            or int(weight.offsets[-1]) * (_UNIT // 2) != len(weight.records)
            or int(lengths.min()) < _HEAD_BYTES // _UNIT
            or int(lengths.max()) != weight.longest
        ):
            raise ValueError(f"the arrays do not describe a bitmap weight in fragment order of shape {shape}")
        return weight

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``(..., in)`` on the weight's device; the result has the dtype of ``x``.

        On a GPU of compute capability 9.0, up to 32 rows of ``x`` are multiplied by the weight as it is stored, with
        float32 sums in a fixed order; more rows, other devices and gradients use the decoded matrix.

        Raises:
            ValueError: the last dimension of ``x`` is not ``in``, or ``x`` is on another device.
            TypeError: ``x`` is not floating point.
        """
        self.check_input(x)
        rows = x.numel() // self.shape[1]
        if x.requires_grad and torch.is_grad_enabled() or not self.kernel_runs(rows):
            return F.linear(x, self.to_dense().to(x.dtype), bias)
        flat = x.detach().reshape(rows, self.shape[1]).to(self.dtype)
        y = _linear(flat, self.records, self.offsets, self.shape[0], self.longest).to(x.dtype)
        y = y.reshape(*x.shape[:-1], self.shape[0])
        return y if bias is None else y + bias

    def kernel_runs(self, rows: int) -> bool:
        """Whether :meth:`linear` multiplies so many rows without decoding the matrix into memory."""
        device = self.records.device
        if device.type != "cuda" or not 0 < rows <= gpu.MAX_N:
            return False
        return torch.cuda.get_device_capability(device) >= gpu.COMPUTE_CAPABILITY

    def check_input(self, x: Tensor) -> None:
        """Refuse activations that this weight cannot multiply; see :meth:`linear`."""
        if x.ndim == 0 or x.shape[-1] != self.shape[1]:
            raise ValueError(f"x must have {self.shape[1]} features in its last dimension, got shape {tuple(x.shape)}")
        if x.device != self.records.device:
            raise ValueError(f"x must be on the weight's device {self.records.device}, got {x.device}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"x must be floating point, got {x.dtype}")

    def bind(self, threads: int = 1) -> Matvec:
        """``f(x, out)`` for ``out = W @ x`` on a CPU, through the layout that is made for one."""
        from gossamer.weights._bitmap import BitmapWeight

        return BitmapWeight.from_dense(self.to_dense().cpu(), preserve_signed_zero=True).bind(threads)


@torch.library.custom_op("gossamer::bitmap_fragments_linear", mutates_args=())
def _linear(x: Tensor, records: Tensor, offsets: Tensor, out_features: int, longest: int) -> Tensor:
    """The kernel as an operator that ``torch.compile`` and CUDA graphs can hold: ``x`` is ``(n, in)``."""
    weight = FragmentBitmapWeight((out_features, x.shape[1]), x.dtype, records, offsets, longest)
    return gpu.multiply(weight, x)


@_linear.register_fake
def _linear_shape(x: Tensor, records: Tensor, offsets: Tensor, out_features: int, longest: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _strips_at_once(columns: int) -> int:
    """How many strips to encode together, so that the scratch memory stays small."""
    return max(1, _CHUNK // (ROWS * columns))


def _tiles(bits: Tensor) -> Tensor:
    """``(strips, tiles, 2048)``: the entries of each record in the order of its mask bits, zeros outside the matrix."""
    rows, columns = bits.shape
    strips, tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    padded = torch.nn.functional.pad(bits, (0, tiles * COLUMNS - columns, 0, strips * ROWS - rows))
    # row = 8 r + 2 group + u, column = 32 quarter + 8 t + 4 k + 2 h + e; a group's lanes are 4 u + t
    axes = padded.view(strips, 2, 4, 2, tiles, 4, 4, 2, 2, 2)
    #        strip  r group u  tile  quarter  t  k  h  e   ->   strip tile  quarter  k  h group u  r  t  e
    return axes.permute(0, 4, 5, 7, 8, 2, 3, 1, 6, 9).reshape(strips, tiles, ROWS * COLUMNS)


def _untiled(entries: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`_tiles`."""
    strips, tiles, _ = entries.shape
    axes = entries.view(strips, tiles, 4, 2, 2, 4, 2, 2, 4, 2).permute(0, 7, 5, 6, 1, 2, 8, 3, 4, 9)
    return axes.reshape(strips * ROWS, tiles * COLUMNS)[:rows, :columns]


def _encode(bits: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Records (int16) and their lengths in units of whole strips."""
    entries = _tiles(bits).flatten(0, 1)
    stored = (entries & kept) != 0
    lengths = _HEAD_BYTES // _UNIT + (2 * stored.sum(1) + _UNIT - 1) // _UNIT
    starts = (lengths.cumsum(0) - lengths) * (_UNIT // 2)
    records = torch.zeros(int(lengths.sum()) * (_UNIT // 2), dtype=torch.int16, device=bits.device)
    weights = 1 << torch.arange(16, device=bits.device)
    halves = (stored.view(-1, 16, 4, 2, 16) * weights).sum(-1).transpose(1, 2).flatten(1)  # words as (group, step)
    counts = stored.view(-1, 64, 32).sum(2)
    begins = (_HEAD_BYTES + 2 * (counts.cumsum(1) - counts)).view(-1, 16, 4).transpose(1, 2).flatten(1)
    head = torch.cat([torch.where(halves < 1 << 15, halves, halves - (1 << 16)), begins], 1)
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
    starts = offsets[first_strip * tiles : (first_strip + strips) * tiles].long() * (_UNIT // 2)
    places = starts[:, None] + torch.arange(_MASK_BYTES // 2, device=out.device)
    words = records[places].view(-1, 4, 16, 2).transpose(1, 2).flatten(1).int()  # halves in the order of the values
    stored = ((words[..., None] >> torch.arange(16, device=out.device)) & 1).flatten(1).bool()
    rank = stored.cumsum(1) - 1
    last = len(records) - 1
    values = records[(starts[:, None] + _HEAD_BYTES // 2 + rank).clamp(0, last)]
    entries = torch.where(stored, values, 0)
    out.copy_(_untiled(entries.view(strips, tiles, -1), rows, columns))
