"""Binarised 4:8 weights on one core against torch bf16: decode (one vector)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, copies_past_cache, geometric_mean
from gossamer.weights import STBLevels, STBWeight, stb_quantize

SHAPES = ((4096, 4096), (11008, 4096))
SOURCES = ("weights/_stb*.py", "core/jit.py")


@claim(
    "cpu-stb-gemv",
    text="binarised 4:8 matrix-vector product (code4, 5.4 stored bits) against torch bf16 F.linear, one thread",
    system=["STBLLM"],
    peer="torch.nn.functional.linear",
    peer_package="torch",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def stb_gemv(bench: Bench) -> Iterator[Row]:
    """The other codes, whose bits must be put together first, are measured beside it."""
    for code in ("code4", "lean", "faithful"):
        for shape in SHAPES if code == "code4" else SHAPES[:1]:
            weight = STBWeight.from_levels(_levels(shape, symmetric=code == "lean"), code)
            bits = f"{code}, {weight.nominal_bits:.2f} nominal and {weight.stored_bits:.2f} stored bits a weight"
            x = torch.randn(1, shape[1], generator=torch.Generator().manual_seed(9))
            out, dense = np.empty(shape[0], np.float32), weight.to_dense().bfloat16()
            ours, peer = [], []
            for _ in range(copies_past_cache(weight.nbytes)):
                arrays = {name: array.clone() for name, array in weight.arrays().items()}
                copy = STBWeight.from_arrays(arrays, weight.shape, weight.dtype, weight.meta())
                ours.append(partial(copy.bind(), x[0].numpy(), out))
                peer.append(partial(F.linear, x.bfloat16(), dense.clone()))
            yield bench.compare(shape, ours, peer, counted=code == "code4", note=bits)


def _levels(shape: tuple[int, int], symmetric: bool) -> STBLevels:
    """Levels of a normal matrix: 64 rows are binarised and repeated, which is all the same to a product."""
    times = -(-shape[0] // 64)
    rows = torch.randn(64, shape[1], generator=torch.Generator().manual_seed(0)) * 0.02
    one = stb_quantize(rows, symmetric=symmetric, thresholds=8)
    repeated = (
        tensor.repeat(times, *[1] * (tensor.ndim - 1))[: shape[0]] for tensor in (one.level, one.mean, one.scale)
    )
    return STBLevels(shape, one.n, *repeated)
