"""The semirings of path problems: shortest (min, +), widest (max, min), reachable (or, and)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

INT_INFINITY = 2**30 - 1
"""What an unreachable vertex has in int32: twice it still fits, and minima with it saturate."""

KernelName = Literal["min_plus", "max_min"]


@dataclass(frozen=True)
class Semiring:
    """How weights along a path and paths side by side combine. kernel: the generated kernels that compute it."""

    name: str
    kernel: KernelName

    def zero(self, dtype: Any) -> Any:
        """No path: the neutral element of the choice between paths."""
        sign = 1 if self.kernel == "min_plus" else -1
        if np.issubdtype(dtype, np.integer):
            return np.dtype(dtype).type(sign * INT_INFINITY)
        return np.dtype(dtype).type(sign * np.inf)

    def one(self, dtype: Any) -> Any:
        """The empty path: the neutral element along a path."""
        return np.dtype(dtype).type(0) if self.kernel == "min_plus" else -self.zero(dtype)

    @property
    def reduce(self) -> np.ufunc:
        """The choice between paths."""
        return np.minimum if self.kernel == "min_plus" else np.maximum


_SEMIRINGS = {
    "min_plus": Semiring("min_plus", "min_plus"),
    "max_min": Semiring("max_min", "max_min"),
    "or_and": Semiring("or_and", "max_min"),
}


def named_semiring(name: str) -> Semiring:
    """One of "min_plus", "max_min", "or_and".

    Raises:
        ValueError: another name.
    """
    if name not in _SEMIRINGS:
        raise ValueError(f"semiring must be one of {', '.join(_SEMIRINGS)}, got {name!r}")
    return _SEMIRINGS[name]


ELEMENTS = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64", np.dtype(np.int32): "i32"}
"""The kernels' names of the number types."""
