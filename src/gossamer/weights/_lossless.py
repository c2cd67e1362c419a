"""Bit-exact compressed bf16 weights.

Nothing is rounded or dropped: every one of the 65,536 bf16 bit patterns comes back as it was, so that a model's
answers do not change. What shrinks is the exponent, whose eight bits carry less than three in trained weights
("ZipServ", ASPLOS 2026). Two layouts:

* ``nib12``, 12.0 bits a weight: made for products on a CPU, which take as many bytes less from memory;
* ``tbe``, 11.3 bits a weight on trained weights: the published layout, smaller, slower to multiply with on a CPU.

A matrix that would not shrink (random bits, or so narrow that the padding costs more) is kept as it is: layout
``raw``. So no weight ever takes more than 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.core.hardware import cpu_features
from gossamer.weights._format import Matvec, Scalar, WeightFormat, check_matrix
from gossamer.weights._lossless_arrays import as_tensor
from gossamer.weights._lossless_device import OnDevice, dense_of
from gossamer.weights._lossless_raw import Raw
from gossamer.weights._nib12_layout import Nib12
from gossamer.weights._tbe_layout import Tbe

LAYOUTS = ("nib12", "tbe")
_BATCHES = (8, 4, 2, 1)
_STORED: dict[str, type[Nib12] | type[Tbe] | type[Raw]] = {kind.layout: kind for kind in (Nib12, Tbe, Raw)}


@dataclass(frozen=True, eq=False)
class LosslessWeight(WeightFormat):
    """A bf16 matrix of shape ``(out, in)``, compressed without loss.

    stored: the arrays, in one of the layouts :class:`Nib12`, :class:`Tbe` and :class:`Raw`; on a GPU, :class:`OnDevice`.

    Products are sums in float32 of the exact weights with float32 activations, NaN and infinities included, in an
    order of their own: they differ from a dense product by rounding only.
    """

    name: ClassVar[str] = "lossless"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    stored: Nib12 | Tbe | Raw | OnDevice
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def from_dense(cls, weight: Tensor, layout: str = "nib12") -> Self:  # type: ignore[override]
        """Compress ``weight``, bf16 ``(out, in)`` on the CPU, in ``layout`` "nib12" or "tbe".

        Raises:
            TypeError: ``weight`` is not bf16.
            ValueError: it is not a non-empty matrix on the CPU, or ``layout`` is neither of the two.

        >>> weight = torch.randn(256, 256, dtype=torch.float64).to(torch.bfloat16)
        >>> compressed = LosslessWeight.from_dense(weight)
        >>> torch.equal(compressed.to_dense(), weight), round(compressed.bits_per_weight)
        (True, 12)
        """
        check_matrix(weight, (torch.bfloat16,))
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        bits = weight.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
        encoded = Nib12.from_bits(bits) if layout == "nib12" else Tbe.from_bits(bits)
        rows, columns = bits.shape
        return cls((rows, columns), Raw.from_bits(bits) if encoded is None else encoded)

    @property
    def layout(self) -> str:
        """How the matrix is stored: "nib12", "tbe", or "raw" where it would not shrink."""
        return self.stored.layout

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, everything included, for each weight of the matrix."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense bf16 matrix on the weight's device, written into ``out`` if given: contiguous bf16 ``(out, in)``."""
        if out is None:
            if isinstance(self.stored, OnDevice):
                return dense_of(self.stored)
            out = torch.empty(self.shape, dtype=self.dtype)
        elif out.shape != self.shape or out.dtype != self.dtype or not out.is_contiguous():
            raise ValueError(f"out must be contiguous bfloat16 {self.shape}, got {out.dtype} {tuple(out.shape)}")
        if isinstance(self.stored, OnDevice):
            if out.device != self.stored.device:
                raise ValueError(f"out must be on the weight's device {self.stored.device}, got {out.device}")
            self.stored.to_dense(out)
            return out
        self.stored.to_bits(out.detach().view(torch.int16).numpy().view(np.uint16))
        return out

    def arrays(self) -> dict[str, Tensor]:
        """The arrays of the layout, see ``stored``."""
        if isinstance(self.stored, OnDevice):
            return self.stored.arrays()
        return {name: as_tensor(array) for name, array in self.stored.arrays().items()}

    def to(self, device: str | torch.device, copy: bool = False) -> Self:
        """The same weight on another device, or ``copy`` of it; a GPU decompresses it as fast as its memory goes."""
        arrays = {name: array.to(device, copy=copy) for name, array in self.arrays().items()}
        if torch.device(device).type == "cpu":
            return self.from_arrays(arrays, self.shape, self.dtype, self.meta())
        return type(self)(self.shape, OnDevice(self.shape, arrays, self.meta()))

    def meta(self) -> dict[str, Scalar]:
        """The layout's name and its scalars."""
        return self.stored.meta()

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """The inverse of :meth:`arrays` and :meth:`meta`, without a copy.

        Raises:
            ValueError: the arrays contradict each other, the shape or ``meta``. Whatever is accepted can be decoded
                and multiplied without reading outside of any array.
        """
        layout = meta.get("layout")
        if layout not in _STORED:
            raise ValueError(f"layout must be one of {', '.join(_STORED)}, got {layout!r}")
        if dtype != torch.bfloat16:
            raise ValueError(f"dtype must be bfloat16, got {dtype}")
        if min(shape) < 1:
            raise ValueError(f"shape must be positive, got {shape}")
        here = {name: array.cpu() for name, array in arrays.items()}
        stored = _STORED[str(layout)].from_arrays(here, shape, meta)
        unknown = set(arrays) - set(stored.arrays())
        if unknown:
            raise ValueError(f"layout {layout!r} has no arrays named {', '.join(sorted(unknown))}")
        if any(array.is_cuda for array in arrays.values()):
            return cls(shape, OnDevice(shape, dict(arrays), stored.meta()))
        return cls(shape, stored)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias``; on a GPU by the dense product of the decompressed matrix, bit for bit."""
        if not isinstance(self.stored, OnDevice):
            return super().linear(x, bias)
        self.check_input(x, bias)
        return F.linear(x, self.to_dense().to(x.dtype), bias)

    def bind(self, threads: int = 1, features: frozenset[str] | None = None) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``; ``features`` masks the processor's, for tests."""
        product = self._product(1, threads, features)

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            product(x.reshape(1, -1), out.reshape(1, -1))

        return matvec

    def matmul_small(
        self, x: np.ndarray, out: np.ndarray, threads: int = 1, features: frozenset[str] | None = None
    ) -> None:
        """``out = x @ W.T`` for ``x`` float32 ``(n, in)`` and ``out`` float32 ``(n, out)``.

        One pass over the weights takes 8, 4, 2 or 1 rows of ``x``: code is compiled for these only.
        """
        start = 0
        while start < len(x):
            count = next(batch for batch in _BATCHES if batch <= len(x) - start)
            self._product(count, threads, features)(x[start : start + count], out[start : start + count])
            start += count

    def _product(self, count: int, threads: int, features: frozenset[str] | None) -> Matvec:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        if isinstance(self.stored, OnDevice):
            return self.to("cpu")._product(count, threads, features)
        return self.stored.product(count, threads, cpu_features() if features is None else features)
