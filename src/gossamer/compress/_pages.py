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
    for tensor, start in zip(tensors, starts.tolist(), strict=False):
        place = block[start : start + _nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.data)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
