"""Bitmap weights times eight vectors on one core against torch: float32, 50 % zeros."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean
from gossamer.weights import BitmapWeight

SHAPES = ((4096, 4096), (11008, 4096), (14336, 4096))


@claim(
    "cpu-bitmap-fp32-n8",
    text="bitmap fp32 product with eight vectors at 50 % sparsity against torch F.linear, one thread",
    system=["SpInfer"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=1.3,
    better="higher",
    summary=geometric_mean,
    sources=("weights/_bitmap.py", "weights/_bitmap_[!f]*.py", "core/jit.py"),
)
def eight_vectors_against_torch_fp32(bench: Bench) -> Iterator[Row]:
    """Bound by arithmetic rather than by bytes: each decoded weight serves eight vectors."""
    for number, shape in enumerate(SHAPES):
        generator = torch.Generator().manual_seed(number)
        dense = torch.randn(shape, generator=generator) * 0.02
        dense.masked_fill_(torch.rand(shape, generator=generator) < 0.5, 0)
        bitmap = BitmapWeight.from_dense(dense)
        x = torch.randn(8, shape[1], generator=generator)
        out = np.empty((8, shape[0]), np.float32)
        ours, peer = [], []
        for _ in range(copies_past_cache(bitmap.nbytes)):
            arrays = {name: torch.from_numpy(array.numpy().copy()) for name, array in bitmap.arrays().items()}
            copy = BitmapWeight.from_arrays(arrays, bitmap.shape, bitmap.dtype, bitmap.meta())
            ours.append(partial(copy.matmul_small, x.numpy(), out))
            peer.append(partial(F.linear, x, torch.from_numpy(dense.numpy().copy())))
        yield bench.compare(shape, ours, peer)
