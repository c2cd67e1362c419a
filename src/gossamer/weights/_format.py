"""The contract of a compressed weight matrix.

A format is a value: a frozen dataclass that holds the stored arrays of one ``(out, in)`` matrix, turns back into
the dense matrix, multiplies without doing so, and writes itself to a file. Whole models (``gossamer.compress``)
and layers (:class:`~gossamer.weights.CompressedLinear`) know formats only through this class.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.core.files import load_arrays, save_arrays

Matvec = Callable[[np.ndarray, np.ndarray], None]
Scalar = str | int

FLOAT_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SMALL_N = 8
"""Up to so many rows of activations are multiplied by a format's own kernel; more go through a decoded panel."""


class WeightFormat(ABC):
    """One compressed weight matrix of shape ``(out, in)``.

    Subclasses are frozen dataclasses with at least the fields ``shape`` and ``dtype`` (of the dense matrix), set
    ``name`` and ``version``, and are found again by :func:`format_named`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    shape: tuple[int, int]
    dtype: torch.dtype

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            _FORMATS[cls.name] = cls

    @classmethod
    @abstractmethod
    def from_dense(cls, weight: Tensor, **options: Any) -> Self:
        """Compress a dense ``(out, in)`` matrix."""

    @abstractmethod
    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix, written into ``out`` if given."""

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """The stored arrays: one-dimensional, of integer dtypes (floating values as bit patterns)."""

    @abstractmethod
    def meta(self) -> dict[str, Scalar]:
        """What the arrays, the shape and the dtype do not tell, as JSON scalars."""

    @classmethod
    @abstractmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """The inverse of :meth:`arrays` and :meth:`meta`; ``ValueError`` if they contradict each other."""

    @abstractmethod
    def bind(self, threads: int = 1) -> Matvec:
        """A function ``f(x, out)`` for ``out = W @ x``, with every choice made beforehand.

        ``x``: float32 ``(in,)`` and ``out``: float32 ``(out,)``, both contiguous. A call costs microseconds of Python.
        """

    def matmul_small(self, x: np.ndarray, out: np.ndarray, threads: int = 1) -> None:
        """``out = x @ W.T`` for a few rows: ``x`` float32 ``(n, in)``, ``out`` float32 ``(n, out)``."""
        matvec = self.bind(threads)
        for row in range(len(x)):
            matvec(x[row], out[row])

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the dense matrix takes."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def density(self) -> float:
        """Share of entries that are not zero."""
        return float((self.to_dense() != 0).double().mean())

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``(..., in)`` on the weight's device; the result has the dtype of ``x``.

        On a CPU, up to ``SMALL_N`` rows use the format's own kernel (float32 sums), more decode the matrix into a scratch
        panel that is freed afterwards.

        Raises:
            ValueError: the last dimension of ``x`` is not ``in``, or ``x`` is on another device.
            TypeError: ``x`` is not floating point.
        """
        self.check_input(x, bias)
        rows = x.numel() // self.shape[1]
        if x.requires_grad and torch.is_grad_enabled() or not 0 < rows <= SMALL_N or self.device.type != "cpu":
            return F.linear(x, self.to_dense().to(x.dtype), bias)
        flat = x.detach().reshape(rows, self.shape[1]).to(torch.float32).contiguous()
        out = torch.empty(rows, self.shape[0])
        self.matmul_small(flat.numpy(), out.numpy(), torch.get_num_threads())
        if bias is not None:
            out += bias
        return out.to(x.dtype).reshape(*x.shape[:-1], self.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the stored arrays are."""
        return next(iter(self.arrays().values())).device

    def check_input(self, x: Tensor, bias: Tensor | None = None) -> None:
        """Refuse activations that this weight cannot multiply, and a bias that does not fit; see :meth:`linear`."""
        check_tensors(x, bias, self.shape[0])
        if x.ndim == 0 or x.shape[-1] != self.shape[1]:
            raise ValueError(f"x must have {self.shape[1]} features in its last dimension, got shape {tuple(x.shape)}")
        device = self.device
        if x.device != device:
            raise ValueError(f"x must be on the weight's device {device}, got {x.device}")
        if not x.dtype.is_floating_point:
            raise TypeError(f"x must be floating point, got {x.dtype}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one checksummed safetensors file, atomically."""
        save_arrays(path, self.arrays(), {"gossamer_weight": json.dumps(describe(self))})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> WeightFormat:
        """Read a file that :meth:`save` wrote. On a subclass, the file must hold that format.

        Raises:
            ValueError: the file is damaged, holds another format, or a newer version of it.
        """
        arrays, metadata = load_arrays(path)
        if "gossamer_weight" not in metadata:
            raise ValueError(f"{os.fspath(path)} holds no single compressed weight")
        weight = from_description(json.loads(metadata["gossamer_weight"]), arrays)
        if not isinstance(weight, cls):
            raise ValueError(f"{os.fspath(path)} holds a {weight.name!r} weight, not {cls.__name__}")
        return weight


_FORMATS: dict[str, type[WeightFormat]] = {}


def format_named(name: str) -> type[WeightFormat]:
    """The format class called ``name``.

    >>> import gossamer.weights
    >>> format_named("bitmap").__name__
    'BitmapWeight'
    """
    if name not in _FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known are {', '.join(sorted(_FORMATS))}")
    return _FORMATS[name]


def describe(weight: WeightFormat) -> dict[str, Any]:
    """Everything about ``weight`` but its arrays, as JSON: what :func:`from_description` needs beside them."""
    return {
        "format": weight.name,
        "version": weight.version,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "meta": weight.meta(),
    }


def from_description(description: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> WeightFormat:
    """Rebuild a weight from :func:`describe` and its arrays."""
    cls = format_named(description["format"])
    if description["version"] > cls.version:
        raise ValueError(
            f"the file holds version {description['version']} of format {cls.name!r}, "
            f"this Gossamer reads up to {cls.version}: upgrade it"
        )
    if description["dtype"] not in FLOAT_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(FLOAT_TYPES)}, the file says {description['dtype']!r}")
    out_features, in_features = description["shape"]
    return cls.from_arrays(arrays, (out_features, in_features), FLOAT_TYPES[description["dtype"]], description["meta"])


def check_tensors(x: object, bias: object, out_features: int) -> None:
    """Refuse what is no tensor, and a bias that does not have one entry an output."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if bias is not None and (not isinstance(bias, Tensor) or tuple(bias.shape) != (out_features,)):
        given = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor of shape ({out_features},), got {given}")


def check_matrix(weight: Tensor, dtypes: tuple[torch.dtype, ...], anywhere: bool = False) -> None:
    """Refuse what no format can hold: ``TypeError`` for a wrong type, ``ValueError`` for a wrong shape.

    anywhere: the matrix need not be on the CPU.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    if weight.dtype not in dtypes:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"weight must be one of {accepted}, got {weight.dtype}; convert it with weight.to(...)")
    if weight.layout != torch.strided:
        raise TypeError(f"weight must be a dense tensor, got layout {weight.layout}; convert it with weight.to_dense()")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be a matrix (out, in) without empty dimensions, got shape {tuple(weight.shape)}")
    if weight.device.type == "meta":
        raise ValueError("weight must hold values, got a tensor on the meta device")
    if weight.device.type != "cpu" and not anywhere:
        raise ValueError(f"weight must be on the CPU, got {weight.device}; move it with weight.cpu()")
