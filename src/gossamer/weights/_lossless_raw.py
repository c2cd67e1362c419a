"""The ``raw`` layout: the bf16 bit patterns as they are, for a matrix that no other layout would shrink."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.weights._dense import DenseWeight
from gossamer.weights._lossless_arrays import as_array, as_tensor


@dataclass(frozen=True, eq=False)
class Raw:
    """A bf16 matrix of shape ``(rows, columns)``, row after row. ``bits``: uint16 ``(rows * columns,)``."""

    layout: ClassVar[str] = "raw"

    shape: tuple[int, int]
    bits: np.ndarray

    @classmethod
    def from_bits(cls, bits: np.ndarray) -> Self:
        """Copy bf16 bit patterns, uint16 ``(rows, columns)``."""
        return cls((bits.shape[0], bits.shape[1]), bits.reshape(-1).copy())

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], meta: Mapping[str, str | int]) -> Self:
        """From stored arrays, without a copy; ``ValueError`` where they contradict the shape."""
        return cls(shape, as_array(arrays, "bits", np.uint16, shape[0] * shape[1]))

    def arrays(self) -> dict[str, np.ndarray]:
        """The stored array by name."""
        return {"bits": self.bits}

    def meta(self) -> dict[str, str | int]:
        """The layout's name."""
        return {"layout": self.layout}

    def to_bits(self, out: np.ndarray) -> None:
        """Write the bf16 bit patterns into ``out``, uint16 ``(rows, columns)``."""
        out[:] = self.bits.reshape(self.shape)

    def product(self, count: int, threads: int, features: frozenset[str]) -> Callable[[np.ndarray, np.ndarray], None]:
        """``f(x, out)``: ``out = x @ W.T``, ``x`` float32 ``(count, columns)``, ``out`` float32 ``(count, rows)``."""
        weight = DenseWeight(self.shape, torch.bfloat16, as_tensor(self.bits))
        if count > 1:
            return lambda x, out: weight.matmul_small(x, out, threads)
        matvec = weight.bind(threads, features)
        return lambda x, out: matvec(x[0], out[0])
