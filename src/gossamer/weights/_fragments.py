"""Weights in the order in which tensor cores take them: decoded in registers on a GPU, never unpacked in memory.

The matrix is cut into records of 16 rows x 128 columns, strip by strip, in the order in which the lanes of a warp need
them for ``mma.m16n8k16`` (the picture is in ``kernels/fragment_prelude.cu``). A record is one contiguous copy and needs
no other's. What is inside a record is up to the format. The order is our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.weights import _fragments_gpu as gpu
from gossamer.weights._format import Matvec, WeightFormat, check_matrix, check_tensors, format_named

ROWS, COLUMNS = 16, 128
UNIT = 16
"""Records are multiples of so many bytes."""
_ENTRIES_AT_ONCE = 1 << 24


class FragmentWeight(WeightFormat):
    """A 16-bit matrix of shape ``(out, in)`` in records; its tensors may live on a GPU.

    Beside ``shape`` and ``dtype``, subclasses have the fields ``records`` (int16, all records one after another),
    ``offsets`` (int32 ``(strips * tiles + 1,)``, where each begins, in units of 16 bytes) and ``longest`` (units of the
    longest record), and name their ``decoder``.
    """

    decoder: ClassVar[gpu.Decoder]
    records: Tensor
    offsets: Tensor
    longest: int

    def clone(self) -> Self:
        """The same weight in memory of its own."""
        return self._map(Tensor.clone)

    def to(self, device: str | torch.device) -> Self:
        """The same weight on another device."""
        return self._map(lambda array: array.to(device))

    def place_for(self, out: Tensor | None) -> Tensor:
        """``out``, checked, or room for the dense matrix on the weight's device.

        Raises:
            ValueError: ``out`` is not contiguous or has another shape, type or device.
        """
        device = self.records.device
        if out is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        fits = tuple(out.shape) == self.shape and out.dtype == self.dtype and out.device == device
        if not fits or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous {self.dtype} tensor of shape {self.shape} on {device}, "
                f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
            )
        return out

    def _map(self, change: Any) -> Self:
        arrays: Any = {name: change(array) for name, array in self.arrays().items()}
        return replace(self, **arrays)  # type: ignore[type-var]  # every subclass is a dataclass

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
    def constant(self) -> int:
        """What the decoder is told beside the records."""
        return 0

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``(..., in)`` on the weight's device; the result has the dtype of ``x``.

        On a GPU of compute capability 9.0, up to 32 rows of ``x`` of the weight's own type are multiplied by the weight as
        it is stored, with float32 sums in a fixed order; more rows, other types and devices, and gradients use the decoded
        matrix.

        Raises:
            ValueError: the last dimension of ``x`` is not ``in``, or ``x`` is on another device.
            TypeError: ``x`` is not floating point.
        """
        self.check_input(x, bias)
        rows = x.numel() // self.shape[1]
        wanted = x.requires_grad and torch.is_grad_enabled()
        if wanted or x.dtype != self.dtype or not self.kernel_runs(rows):
            return F.linear(x, self.to_dense().to(x.dtype), bias)
        flat = x.detach().reshape(rows, self.shape[1])
        meta = self.meta()
        names, values = list(meta), [int(value) for value in meta.values()]
        y = _linear(flat, list(self.arrays().values()), self.name, self.shape[0], ",".join(names), values)
        y = y.reshape(*x.shape[:-1], self.shape[0])
        return y if bias is None else y + bias

    def kernel_runs(self, rows: int) -> bool:
        """Whether :meth:`linear` multiplies so many rows without decoding the matrix into memory."""
        device = self.records.device
        if device.type != "cuda" or not 0 < rows <= gpu.MAX_N or self.records.data_ptr() % UNIT:
            return False
        return torch.cuda.get_device_capability(device) >= gpu.COMPUTE_CAPABILITY

    def check_input(self, x: Tensor, bias: Tensor | None = None) -> None:
        """Refuse activations that this weight cannot multiply, and a bias that does not fit; see :meth:`linear`."""
        check_tensors(x, bias, self.shape[0])
        if x.ndim == 0 or x.shape[-1] != self.shape[1]:
            raise ValueError(f"x must have {self.shape[1]} features in its last dimension, got shape {tuple(x.shape)}")
        if x.device != self.records.device:
            raise ValueError(f"x must be on the weight's device {self.records.device}, got {x.device}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"x must be floating point, got {x.dtype}")

    def bind(self, threads: int = 1) -> Matvec:
        """``f(x, out)`` for ``out = W @ x`` on a CPU, through a layout that is made for one."""
        from gossamer.weights._bitmap import BitmapWeight

        return BitmapWeight.from_dense(self.to_dense().cpu(), preserve_signed_zero=True).bind(threads)

    def check_records(self, shortest: int) -> None:
        """``ValueError`` unless records and offsets agree with the shape; ``shortest``: units of the least record."""
        for name, kind in (("records", torch.int16), ("offsets", torch.int32)):
            array: Tensor = getattr(self, name)
            if array.dtype != kind or array.ndim != 1 or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be a contiguous vector of {kind}, got {array.dtype} {tuple(array.shape)}"
                )
        lengths = self.offsets.long().diff()
        if (
            len(lengths) != self.strips * self.tiles
            or int(self.offsets[0]) != 0
            or int(self.offsets[-1]) * (UNIT // 2) != len(self.records)
            or int(lengths.min()) < shortest
            or int(lengths.max()) != self.longest
        ):
            raise ValueError(f"the arrays do not describe a {self.name} weight of shape {self.shape}")


@torch.library.custom_op("gossamer::fragment_linear", mutates_args=())
def _linear(
    x: Tensor, arrays: Sequence[Tensor], name: str, out_features: int, meta_names: str, meta_values: Sequence[int]
) -> Tensor:
    """The kernel as an operator that ``torch.compile`` and CUDA graphs can hold: ``x`` is ``(n, in)``."""
    kind: Any = format_named(name)
    fields: Mapping[str, int] = dict(zip(meta_names.split(","), meta_values, strict=True))
    weight: FragmentWeight = kind((out_features, x.shape[1]), x.dtype, *arrays, **fields)
    with torch.cuda.device(x.device):
        return gpu.multiply(weight, x)


@_linear.register_fake
def _linear_shape(
    x: Tensor, arrays: Sequence[Tensor], name: str, out_features: int, meta_names: str, meta_values: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def check_dense(weight: Tensor, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """``weight`` as bit patterns (int16), on its device; ``TypeError`` and ``ValueError`` for what cannot be stored."""
    check_matrix(weight, dtypes, anywhere=True)
    return weight.detach().contiguous().view(torch.int16)


def strips_at_once(rows: int, columns: int) -> Iterator[slice]:
    """Slices of whole strips of rows, so few that scratch memory stays small."""
    step = ROWS * max(1, _ENTRIES_AT_ONCE // (ROWS * columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def tiled(bits: Tensor) -> Tensor:
    """``(strips * tiles, quarter 4, k 2, h 2, group 4, u 2, r 2, t 4, e 2)``: the entries of each record, zeros outside.

    The entry stands in row ``8 r + 2 group + u`` and column ``32 quarter + 8 t + 4 k + 2 h + e``; the lanes of a group
    are ``4 u + t``.
    """
    rows, columns = bits.shape
    strips, tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    padded = F.pad(bits, (0, tiles * COLUMNS - columns, 0, strips * ROWS - rows))
    axes = padded.view(strips, 2, 4, 2, tiles, 4, 4, 2, 2, 2)
    #        strip r group u tile quarter t k h e  ->  strip tile quarter k h group u r t e
    return axes.permute(0, 4, 5, 7, 8, 2, 3, 1, 6, 9).flatten(0, 1)


def untiled(entries: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`tiled`."""
    strips, tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    axes = entries.reshape(strips, tiles, 4, 2, 2, 4, 2, 2, 4, 2).permute(0, 7, 5, 6, 1, 2, 8, 3, 4, 9)
    return axes.reshape(strips * ROWS, tiles * COLUMNS)[:rows, :columns]
