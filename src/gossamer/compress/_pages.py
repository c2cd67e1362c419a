"""Weights side by side in large memory pages.

Decoding reads every weight once per token, and a processor's prefetchers stop at the end of each page. In pages of
4 KiB that costs a compressed kernel, which computes while it reads, several per cent of its speed. NumPy asks the
system for large pages whenever an array is large; torch's and safetensors' many small allocations never get them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

_LINE = 64
"""Bytes of a cache line, at which every tensor starts."""


def gather_weights(model: nn.Module) -> None:
    """Move all parameters and buffers of ``model`` on the CPU into one block of memory; their values do not change.

    At no time is there more than one tensor twice: each one's old memory is free once it has moved, unless somebody
    else holds it, like a :class:`Decoder` made before.

    >>> layer = nn.Linear(3, 2)
    >>> before = layer.weight.clone()
    >>> gather_weights(layer)
    >>> torch.equal(layer.weight, before)
    True
    """
    tensors = [tensor for tensor in [*model.parameters(), *model.buffers()] if tensor.device.type == "cpu"]
    starts = np.cumsum([0, *(-(-_nbytes(tensor) // _LINE) * _LINE for tensor in tensors)])
    room = np.empty(int(starts[-1]) + _LINE, np.uint8)
    block = torch.from_numpy(room)[-room.ctypes.data % _LINE :]
    owners = _buffers_of(model)
    for tensor, start in zip(tensors, starts.tolist(), strict=False):
        place = block[start : start + _nbytes(tensor)].view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        if isinstance(tensor, nn.Parameter):
            tensor.data = place
        for module, name in owners.get(id(tensor), ()):
            module._buffers[name] = place  # a loaded buffer may be a view, which would keep the whole file mapped


def _buffers_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Who holds which buffer, by the buffer's id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            owners.setdefault(id(buffer), []).append((module, name))
    return owners


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
