"""Bitmap weights from and to the ``sparse-bitmask`` format of the package ``compressed-tensors`` (up to its 0.10 line).

A matrix called NAME is four tensors there: ``NAME.shape`` int64 ``(2,)``; ``NAME.compressed``, the non-zero values, row
after row; ``NAME.bitmask`` uint8 ``(out, ceil(in / 8))``, a bit per entry, the lowest first; and ``NAME.row_offsets``
int64 ``(out,)``, where each row's values begin. Ours has the same bits in 64-bit words, so nothing is decoded. Later
versions of the package have dropped the format; checkpoints in it remain.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gossamer.core.files import atomic_write
from gossamer.weights._bitmap import BitmapWeight
from gossamer.weights._dense import bit_type
from gossamer.weights._format import FLOAT_TYPES

PARTS = ("shape", "compressed", "bitmask", "row_offsets")
FORMAT = "sparse-bitmask"
_SPARE = 32  # zeros that a bitmap weight has after its last value


def to_bitmask(weight: BitmapWeight) -> dict[str, Tensor]:
    """The four tensors of ``weight``, without their common name.

    >>> parts = to_bitmask(BitmapWeight.from_dense(torch.eye(3)))
    >>> parts["bitmask"].tolist(), parts["row_offsets"].tolist()
    ([[1], [2], [4]], [0, 1, 2])
    """
    rows = weight.to_layout("rows")
    out_features, in_features = rows.shape
    words = rows.bitmap.numpy().reshape(out_features, -1)
    offsets = rows.offsets["row_offset"]
    return {
        "shape": torch.tensor(rows.shape),
        "compressed": rows.values[: int(offsets[-1])].clone().view(rows.dtype),
        "bitmask": torch.from_numpy(words.view(np.uint8)[:, : -(-in_features // 8)].copy()),
        "row_offsets": offsets[:-1].clone(),
    }


def from_bitmask(parts: Mapping[str, Tensor]) -> BitmapWeight:
    """The weight that four such tensors hold.

    Raises:
        ValueError: one is missing, has another type or size, or they contradict each other.
    """
    missing = [name for name in PARTS if name not in parts]
    if missing:
        raise ValueError(f"a {FORMAT} matrix needs {', '.join(PARTS)}; {', '.join(missing)} is missing")
    shape, values, bitmask, starts = (parts[name] for name in PARTS)
    if shape.numel() != 2 or values.dtype not in FLOAT_TYPES.values():
        raise ValueError(
            f"shape must be of two numbers and compressed one of {', '.join(FLOAT_TYPES)}, "
            f"got {shape.tolist()} and {values.dtype}"
        )
    rows, columns = (int(size) for size in shape)
    if bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (rows, -(-columns // 8)) or starts.shape != (rows,):
        raise ValueError(
            f"bitmask must be uint8 {(rows, -(-columns // 8))} and row_offsets of {rows} entries, "
            f"got {bitmask.dtype} {tuple(bitmask.shape)} and {tuple(starts.shape)}"
        )
    words = np.zeros((rows, -(-columns // 64) * 8), np.uint8)
    words[:, : bitmask.shape[1]] = bitmask.numpy()
    stored = torch.zeros(values.numel() + _SPARE, dtype=bit_type(values.dtype))
    stored[: values.numel()] = values.contiguous().view(bit_type(values.dtype))
    arrays = {
        "bitmap": torch.from_numpy(words.view(np.int64).reshape(-1)),
        "values": stored,
        "row_offset": torch.cat([starts.long(), torch.tensor([values.numel()])]),
    }
    return BitmapWeight.from_arrays(arrays, (rows, columns), values.dtype, {"layout": "rows"})


def save_bitmask(path: str | os.PathLike[str], weights: Mapping[str, BitmapWeight | Tensor]) -> None:
    """Write a safetensors file with bitmap weights in the ``sparse-bitmask`` format and other tensors as they are.

    A model's ``config.json`` must then say so: ``{"quantization_config": {"sparsity_config": {"format":
    "sparse-bitmask"}}}`` is what the package reads.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if isinstance(weight, BitmapWeight):
            tensors |= {f"{name}.{part}": tensor for part, tensor in to_bitmask(weight).items()}
        else:
            tensors[name] = weight.contiguous()
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def load_bitmask(path: str | os.PathLike[str]) -> dict[str, BitmapWeight | Tensor]:
    """Read such a file, bitmap weights undecoded; ``ValueError`` if one of them is damaged."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    weights: dict[str, BitmapWeight | Tensor] = {}
    for name in [name.removesuffix(".bitmask") for name in tensors if name.endswith(".bitmask")]:
        weights[name] = from_bitmask({part: tensors.pop(key) for part in PARTS if (key := f"{name}.{part}") in tensors})
    return {**weights, **tensors}
