"""``CompressedLinear``: a drop-in for ``torch.nn.Linear`` whose weight stays compressed in memory.

The stored arrays are buffers of the module, so ``state_dict``, safetensors and transformers' loaders treat them
like any other tensor, with what they mean as extra state beside them; the :class:`WeightFormat` is a view over them and is
rebuilt when they are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.weights._auto import kernel_pays
from gossamer.weights._format import WeightFormat, describe, from_description

BACKENDS = ("auto", "kernel", "panel")


class CompressedLinear(nn.Module):
    """``y = x @ W.T + bias`` with ``W`` held in a :class:`WeightFormat`.

    Args:
        weight: the compressed ``(out, in)`` matrix.
        bias: ``(out,)`` or None.
        backend: "kernel" multiplies on the compressed weight, "panel" decodes it into a scratch matrix that is
            freed after the product, "auto" takes whichever was measured faster for this shape, format and number
            of rows on this machine (measured once, remembered on disk). No backend keeps a dense copy.

    Raises:
        ValueError: ``backend`` is none of these, or ``bias`` does not have ``out`` entries.

    >>> import torch; from gossamer.weights import BitmapWeight, CompressedLinear
    >>> dense = torch.nn.Linear(64, 8, bias=False)
    >>> layer = CompressedLinear(BitmapWeight.from_dense(dense.weight.data))
    >>> x = torch.ones(2, 64)
    >>> torch.allclose(layer(x), dense(x), atol=1e-5)
    True
    """

    def __init__(self, weight: WeightFormat, bias: Tensor | None = None, backend: str = "auto") -> None:
        super().__init__()
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
        self._set_up(describe(weight), backend)
        for name, array in weight.arrays().items():
            self.register_buffer(name, array)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    @classmethod
    def unfilled(
        cls, description: Mapping[str, Any], arrays: Mapping[str, tuple[int, str]], bias: torch.dtype | None
    ) -> Self:
        """A layer whose arrays (name -> length and integer dtype) and bias are allocated but not yet loaded.

        Used by checkpoint loaders, which fill the buffers by name; under ``torch.device("meta")`` nothing is allocated.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_up(dict(description), "auto")
        for name, (length, dtype) in arrays.items():
            layer.register_buffer(name, torch.empty(length, dtype=getattr(torch, dtype)))
        empty = None if bias is None else torch.empty(layer.out_features, dtype=bias)
        layer.bias = None if empty is None else nn.Parameter(empty, requires_grad=False)
        return layer

    def _set_up(self, description: dict[str, Any], backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.description = description
        self.out_features, self.in_features = description["shape"]
        self.backend = backend
        self._view: WeightFormat | None = None
        self._view_of: tuple[int, ...] = ()

    def get_extra_state(self) -> Tensor:
        """What arrays alone do not tell (format, shape, bases of codes): JSON as bytes, a part of ``state_dict``."""
        return torch.frombuffer(bytearray(json.dumps(self.description, sort_keys=True).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what belongs to arrays that are being loaded.

        Raises:
            ValueError: they are of another format or shape than this layer's.
        """
        description = json.loads(bytes(state.cpu().numpy()))
        for key in ("format", "shape", "dtype"):
            if description.get(key) != self.description[key]:
                raise ValueError(
                    f"state has {key} {description.get(key)!r}, this layer {self.description[key]!r}; "
                    "make the layer from a weight like the one that was saved"
                )
        self.description = description
        self._view = None

    @property
    def weight_format(self) -> WeightFormat:
        """The compressed weight: a view over this module's buffers."""
        arrays = dict(self.named_buffers(recurse=False))
        identity = tuple(array.data_ptr() for array in arrays.values())
        if self._view is None or identity != self._view_of:
            self._view, self._view_of = from_description(self.description, arrays), identity
        return self._view

    @property
    def weight(self) -> Tensor:
        """The dense ``(out, in)`` matrix for code that reads ``layer.weight``: decoded anew, kept by nobody."""
        return self.weight_format.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``, in the dtype of ``x``."""
        weight = self.weight_format
        weight.check_input(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        rows = x.numel() // self.in_features
        if self.backend == "kernel" or self.backend == "auto" and kernel_pays(weight, rows):
            return weight.linear(x, bias)
        return F.linear(x, weight.to_dense().to(x.dtype), bias)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        format_name = self.description["format"]
        return f"in_features={self.in_features}, out_features={self.out_features}, format={format_name}"
