"""Binarised N:8 weights in the bits that they really take.

"Below one bit" counts signs only: at 4:8, half a bit a weight. To multiply, one also needs which inputs are kept, the
region of each, and the scales; all of that is stored here, and both numbers are always told: ``nominal_bits`` as
papers count, ``stored_bits`` as the file does (Dong et al., "STBLLM", ICLR 2025, for the quantiser; the
container is ours). Three codes hold the same matrix:

* ``faithful``: bit planes, a mean and a scale in float16 for every row, block and region: about 3.8 bits a weight at 4:8;
* ``lean``: the same planes, no means, scales of 8 bits under one float16 a row: about 2.7 bits;
* ``code4``: four bits a weight that look up 11 float16 values of the row and block: 5.4 bits, the fastest to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.core.hardware import cpu_features
from gossamer.core.jit import row_shares
from gossamer.weights._dense import DenseWeight
from gossamer.weights._format import FLOAT_TYPES, Matvec, Scalar, WeightFormat, check_matrix
from gossamer.weights._stb_loops import FEATURES, codes_matvec, planes_matvec, salient_nibbles, spread_tables
from gossamer.weights._stb_planes import (
    TILE,
    from_groups,
    pack_planes,
    padded_shape,
    pattern_bits,
    stream_bytes,
    to_groups,
    unpack_planes,
)
from gossamer.weights._stb_quantise import BLOCK, GROUP, LEVELS, SCALES, STBLevels, stb_quantize, values_of

CODES = ("faithful", "lean", "code4")
_SIGNED = {np.dtype(np.uint32): np.dtype(np.int32)}
_PLANES = ("pattern", "signs", "low", "high")


@dataclass(frozen=True, eq=False)
class STBWeight(WeightFormat):
    """A binarised matrix of shape ``(out, in)``; of every 8 inputs of a row, ``n`` are kept.

    Rows are filled up to 64, columns to blocks of 128; panels are runs of 64 rows. ``stored`` holds
    flat tensors, on any device:

    faithful, lean: ``pattern``, ``signs``, ``low``, ``high``, the streams of :mod:`gossamer.weights._stb_planes`;
        ``salient`` uint8 ``(columns / 8,)``, a bit per column.
    faithful: ``scales`` float16 bits (int16) ``(panels, blocks, 64, 10)``: five means, then five scales, of the regions and
        of the two orders of salient columns.
    lean: ``scales`` uint8 ``(panels, blocks, 64, 5)``, in units of ``supers``, float16 bits ``(rows,)``.
    code4: ``index`` int32 (bits of uint32) ``(groups,)``, the level of input ``j`` of a group in bits ``4 j``;
        ``table`` float16 bits ``(panels, blocks, 64, 11)``, the value of each level.
    """

    name: ClassVar[str] = "stb"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    dtype: torch.dtype
    n: int
    code: str
    stored: Mapping[str, Tensor]

    @classmethod
    def from_dense(cls, weight: Tensor, code: str = "faithful", norms: Tensor | None = None, n: int = 4) -> Self:  # type: ignore[override]
        """Binarise ``weight``; see :func:`stb_quantize` for ``norms`` and ``n``. This loses most of the precision.

        Raises:
            TypeError: ``weight`` is no tensor of one of the three types.
            ValueError: it is not a finite matrix on the CPU, or ``code``, ``n`` or ``norms`` does not fit.

        >>> weight = STBWeight.from_dense(torch.randn(64, 512), "lean")
        >>> round(weight.nominal_bits, 1), round(weight.stored_bits, 1)
        (0.5, 2.7)
        """
        check_matrix(weight, tuple(FLOAT_TYPES.values()))
        return cls.from_levels(stb_quantize(weight, norms, n, symmetric=code == "lean"), code, weight.dtype)

    @classmethod
    def from_levels(cls, levels: STBLevels, code: str = "faithful", dtype: torch.dtype = torch.float32) -> Self:
        """Pack what a quantiser found; "lean" needs levels without means.

        Raises:
            ValueError: ``code`` is unknown, or "lean" and the levels have means.
        """
        if code not in CODES:
            raise ValueError(f"code must be one of {', '.join(CODES)}, got {code!r}")
        if code == "lean" and bool(levels.mean.any()):
            raise ValueError("code 'lean' stores no means: quantise with symmetric=True")
        rows, columns = padded_shape(levels.shape)
        level = np.zeros((rows, columns), np.uint8)
        level[: levels.shape[0]] = levels.level.numpy()
        level[levels.shape[0] :] = np.arange(columns) % GROUP >= GROUP - levels.n  # rows beyond the matrix: any pattern
        if code == "code4":
            nibbles = to_groups(level).astype(np.uint32) << (4 * np.arange(GROUP, dtype=np.uint32))
            stored = {"index": nibbles.sum(1, dtype=np.uint32), "table": _panels(levels.table().half(), rows)}
            return cls(levels.shape, dtype, levels.n, code, _tensors(stored))
        stored = pack_planes(level, levels.n)
        stored["salient"] = np.packbits((level >= 7).any(0), bitorder="little")
        if code == "faithful":
            stored["scales"] = _panels(torch.cat([levels.mean, levels.scale], 2), rows)
        else:
            stored["scales"], stored["supers"] = _lean_scales(levels.scale, rows)
        return cls(levels.shape, dtype, levels.n, code, _tensors(stored))

    @property
    def nominal_bits(self) -> float:
        """Bits a weight as papers count: signs of kept weights, two for those of salient columns."""
        level = self._levels()[: self.shape[0], : self.shape[1]]
        return self.n / GROUP * (1 + int((level >= 7).sum()) / max(1, int((level > 0).sum())))

    @property
    def stored_bits(self) -> float:
        """Bits a weight of everything that is stored."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def density(self) -> float:
        """Share of entries that are kept."""
        return float((self._levels()[: self.shape[0], : self.shape[1]] > 0).mean())

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix, rounded to the type, written into ``out`` (same type and shape) if given."""
        dense = values_of(torch.from_numpy(self._levels()), self._table(), self.shape).to(self.dtype)
        if out is None:
            return dense
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out must be {self.dtype} of shape {self.shape}, got {out.dtype} {tuple(out.shape)}")
        return out.copy_(dense)

    def arrays(self) -> dict[str, Tensor]:
        """The stored arrays."""
        return dict(self.stored)

    def meta(self) -> dict[str, Scalar]:
        """``n`` and ``code``."""
        return {"n": self.n, "code": self.code}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays, on any device, without a copy; ``ValueError`` if they contradict each other."""
        code, n = str(meta.get("code")), meta.get("n")
        if code not in CODES:
            raise ValueError(f"code must be one of {', '.join(CODES)}, got {code!r}")
        if not isinstance(n, int) or not 1 <= n < GROUP:
            raise ValueError(f"n must be in 1..{GROUP - 1}, got {n!r}")
        sizes = _sizes(shape, n, code)
        if set(arrays) != set(sizes):
            raise ValueError(f"a weight of code {code!r} has {', '.join(sizes)}; got {', '.join(arrays) or 'nothing'}")
        for name, (kind, size) in sizes.items():
            array = arrays[name]
            if array.dtype != kind or array.shape != (size,) or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {kind} of shape ({size},) for a matrix {shape}, "
                    f"got {array.dtype} of shape {tuple(array.shape)}"
                )
        weight = cls(shape, dtype, n, code, {name: arrays[name] for name in sizes})
        level = weight._levels()
        if (level >= LEVELS).any() or (np.count_nonzero(level.reshape(-1, GROUP), axis=1) != n).any():
            raise ValueError(f"array 'index' must keep {n} of every {GROUP} inputs at levels below {LEVELS}")
        return weight

    def bind(self, threads: int = 1, features: frozenset[str] | None = None) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``; ``features`` masks the processor's, for tests."""
        present = cpu_features() if features is None else features
        if not present >= FEATURES:
            dense = values_of(torch.from_numpy(self._levels()), self._table(), self.shape)
            return DenseWeight.from_dense(dense).bind(threads)
        columns = padded_shape(self.shape)[1]
        shares = row_shares(np.arange(-(-self.shape[0] // TILE) + 1), threads)
        product = self._product()

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            padded = x if len(x) == columns else np.concatenate([x, np.zeros(columns - len(x), np.float32)])
            product(padded, out, shares)

        return matvec

    def _product(self) -> Any:
        stored = self._arrays()
        if self.code == "code4":
            index, table = stored["index"], stored["table"]
            return lambda x, out, shares: codes_matvec(index, table, x, out, shares)
        planes = [stored[name] for name in _PLANES]
        salient = salient_nibbles(np.unpackbits(stored["salient"], bitorder="little"))
        scales, supers = stored["scales"], stored.get("supers", np.empty(0, np.int16))
        n, bits, tables = self.n, pattern_bits(self.n), spread_tables(self.n)
        return lambda x, out, shares: planes_matvec(*planes, salient, scales, supers, n, bits, *tables, x, out, shares)

    def _arrays(self) -> dict[str, np.ndarray]:
        """The stored arrays for the processor: the same memory if they are there already."""
        return {name: array.detach().cpu().numpy() for name, array in self.stored.items()}

    def _levels(self) -> np.ndarray:
        """uint8, rows and columns filled up."""
        shape, stored = padded_shape(self.shape), self._arrays()
        if self.code == "code4":
            index = stored["index"].view(np.uint32)
            return from_groups(
                ((index[:, None] >> (4 * np.arange(GROUP, dtype=np.uint32))) & 15).astype(np.uint8), shape
            )
        salient = np.unpackbits(stored["salient"], bitorder="little").astype(bool)
        return unpack_planes({name: stored[name] for name in _PLANES}, salient, self.n, shape)

    def _table(self) -> Tensor:
        """The value of every level, float32 ``(rows, blocks, 11)``."""
        (rows, columns), stored = padded_shape(self.shape), self._arrays()
        blocks = columns // BLOCK
        name, count = ("table", LEVELS) if self.code == "code4" else ("scales", SCALES if self.code == "lean" else 10)
        cells = stored[name].reshape(rows // TILE, blocks, TILE, count).transpose(0, 2, 1, 3)
        numbers = np.ascontiguousarray(cells).reshape(rows, blocks, count)
        if self.code == "code4":
            return torch.from_numpy(numbers.view(np.float16).astype(np.float32))
        if self.code == "lean":
            supers = stored["supers"].view(np.float16).astype(np.float32)
            scale = torch.from_numpy(numbers.astype(np.float32) * supers[:, None, None])
            mean = torch.zeros_like(scale)
        else:
            mean, scale = torch.from_numpy(numbers.view(np.float16).astype(np.float32)).split(SCALES, 2)
        return STBLevels(self.shape, self.n, torch.empty(0), mean, scale).table()


def _sizes(shape: tuple[int, int], n: int, code: str) -> dict[str, tuple[torch.dtype, int]]:
    """Type and number of entries of every stored array."""
    rows, columns = padded_shape(shape)
    groups, cells = rows * columns // GROUP, rows * columns // BLOCK
    if code == "code4":
        return {"index": (torch.int32, groups), "table": (torch.int16, cells * LEVELS)}
    sizes: dict[str, tuple[torch.dtype, int]] = {"pattern": (torch.uint8, stream_bytes(groups * pattern_bits(n)))}
    sizes |= {name: (torch.uint8, stream_bytes(groups * n)) for name in _PLANES[1:]}
    sizes["salient"] = (torch.uint8, columns // GROUP)
    if code == "faithful":
        return {**sizes, "scales": (torch.int16, cells * 2 * SCALES)}
    return {**sizes, "scales": (torch.uint8, cells * SCALES), "supers": (torch.int16, rows)}


def _panels(numbers: Tensor, rows: int) -> np.ndarray:
    """``(out, blocks, k)`` as ``(panels, blocks, 64, k)``, float16 as its bits; zeros beyond the matrix."""
    array = numbers.numpy()
    padded = np.zeros((rows, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    cut = padded.reshape(rows // TILE, TILE, *array.shape[1:]).transpose(0, 2, 1, 3)
    cut = np.ascontiguousarray(cut)
    return cut.view(np.int16) if cut.dtype == np.float16 else cut


def _lean_scales(scale: Tensor, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales in 255ths of the largest of their row, and that unit as float16 bits."""
    largest = scale.float().flatten(1).amax(1)
    supers = (largest / 255).half()
    supers = torch.where(
        supers.float() * 255 < largest, torch.nextafter(supers, torch.full_like(supers, 65504)), supers
    )
    units = (scale.float() / supers.float().clamp_min(1e-30)[:, None, None]).round().clamp(0, 255).to(torch.uint8)
    padded = np.zeros(rows, np.float16)
    padded[: len(supers)] = supers.numpy()
    return _panels(units, rows), padded.view(np.int16)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Flat tensors over the same memory; uint32 as int32."""
    return {
        name: torch.from_numpy(array.reshape(-1).view(_SIGNED.get(array.dtype, array.dtype)))
        for name, array in arrays.items()
    }
