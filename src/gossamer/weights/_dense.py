"""Dense weights behind the same contract as the compressed ones.

What a compressed format falls back to, and what it is measured against: the same bytes as ``torch.nn.Linear``, with a
matrix-vector product of our own that runs at the speed of memory.
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
from gossamer.weights._dense_matvec import dense_matvec
from gossamer.weights._format import FLOAT_TYPES, Matvec, Scalar, WeightFormat, check_matrix

_KERNEL_TYPES = {torch.bfloat16: np.uint16, torch.float16: np.int16, torch.float32: np.float32}
_STORED_TYPES = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def kernel_view(bits: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Stored bit patterns as the NumPy array that kernels take for ``dtype``; see :mod:`gossamer.core.jit`."""
    return bits.numpy().view(_KERNEL_TYPES[dtype])


def bit_type(dtype: torch.dtype) -> torch.dtype:
    """The integer type that stores the bit patterns of ``dtype``."""
    return _STORED_TYPES[dtype]


@dataclass(frozen=True, eq=False)
class DenseWeight(WeightFormat):
    """A dense matrix of shape ``(out, in)``, float16, bfloat16 or float32.

    values: the bit patterns row by row, ``(out * in,)``, int16 or int32.
    """

    name: ClassVar[str] = "dense"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    dtype: torch.dtype
    values: Tensor

    @classmethod
    def from_dense(cls, weight: Tensor, **options: Any) -> Self:
        """Copy ``weight`` bit by bit.

        Raises:
            TypeError: ``weight`` is no tensor of one of the three types, or an option is given (there are none).
            ValueError: ``weight`` is not a matrix on the CPU.

        >>> DenseWeight.from_dense(torch.eye(2)).linear(torch.tensor([[3.0, 4.0]]))
        tensor([[3., 4.]])
        """
        if options:
            raise TypeError(f"DenseWeight takes no options, got {', '.join(options)}")
        check_matrix(weight, tuple(FLOAT_TYPES.values()))
        bits = weight.detach().contiguous().view(_STORED_TYPES[weight.dtype]).reshape(-1)
        copy = np.empty(bits.numel(), bits.numpy().dtype)  # numpy asks the system for large pages, torch does not
        copy[:] = bits.numpy()
        return cls((weight.shape[0], weight.shape[1]), weight.dtype, torch.from_numpy(copy))

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The matrix: a view of the stored bits, or a copy in ``out`` (same type and shape)."""
        dense = self.values.view(self.dtype).view(self.shape)
        if out is None:
            return dense
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out must be {self.dtype} of shape {self.shape}, got {out.dtype} {tuple(out.shape)}")
        return out.copy_(dense)

    def arrays(self) -> dict[str, Tensor]:
        """``values``."""
        return {"values": self.values}

    def meta(self) -> dict[str, Scalar]:
        """Nothing."""
        return {}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap ``values`` without a copy; ``ValueError`` if type or size do not fit."""
        values = arrays.get("values")
        if set(arrays) != {"values"} or values is None:
            raise ValueError(f"a dense weight has one array, values; got {', '.join(sorted(arrays)) or 'none'}")
        expected = _STORED_TYPES[dtype]
        if values.dtype != expected or values.shape != (shape[0] * shape[1],) or not values.is_contiguous():
            raise ValueError(
                f"values must be {expected} of shape ({shape[0] * shape[1]},) for a {dtype} matrix {shape}, "
                f"got {values.dtype} of shape {tuple(values.shape)}"
            )
        return cls(shape, dtype, values)

    def bind(self, threads: int = 1, features: frozenset[str] | None = None) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``; ``features`` masks the processor's, for tests."""
        present = cpu_features() if features is None else features
        values = kernel_view(self.values, self.dtype)
        shares = row_shares(np.arange(self.shape[0] + 1), threads)
        wide = self.dtype != torch.float16 or "f16c" in present or "neon" in present

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            dense_matvec(values, x, out, shares, wide)

        return matvec
