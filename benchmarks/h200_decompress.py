"""Decompression of bit-exact weights on one GPU: bytes of bfloat16 written per second.

Times are CUDA-graph replays; weights and results rotate over copies that exceed the L2 cache four times. No peer runs in
the same process: the published kernel was measured at 1.48 TB/s on this kind of machine. A plain copy stands beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gossamer.core.measure import Bench, Row, claim, geometric_mean
from gossamer.weights import FragmentLosslessWeight, LosslessWeight

SHAPES = ((8192, 8192), (28672, 4096), (28672, 8192), (8192, 28672))
SOURCES = (
    "weights/_decompress_gpu.py", "weights/_tbe_layout.py", "weights/_gpu_source.py", "core/nvrtc.py",
    "weights/kernels/machine.cu", "weights/kernels/tbe_decompress.cu", "weights/kernels/nib12_decompress.cu",
)  # fmt: skip
_L2_BYTES = 60 << 20


@claim(
    "h200-decompress",
    text="decompression of bit-exact bf16 weights (layout tbe, 11.3 bits) on an H200: terabytes written per second",
    system=["ZipServ"],
    peer="none in the same run (the published kernel: 1.48 TB/s); a device copy beside it",
    unit="TB/s",
    bar=1.8,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def decompress(bench: Bench) -> Iterator[Row]:
    for shape in SHAPES:
        dense = normal(shape)
        cpu = dense.cpu()
        stored: dict[str, LosslessWeight | FragmentLosslessWeight] = {
            "tbe": LosslessWeight.from_dense(cpu, "tbe").to("cuda"),
            "nib12": LosslessWeight.from_dense(cpu, "nib12").to("cuda"),
            "fragments": FragmentLosslessWeight.from_dense(dense),
        }
        for name, weight in stored.items():
            assert torch.equal(weight.to_dense().view(torch.int16), dense.view(torch.int16)), (name, shape)
            copies = max(2, math.ceil(4.2 * _L2_BYTES / dense.nbytes))
            weights = [weight, *(_clone(weight) for _ in range(copies - 1))]
            outs = [torch.empty_like(dense) for _ in range(copies)]
            with bench.cuda_graphs():
                seconds = bench.seconds([partial(each.to_dense, out) for each, out in zip(weights, outs, strict=True)])
            rates = [dense.nbytes / time * 1e-12 for time in seconds]
            moved = (dense.nbytes + weight.nbytes) / sorted(seconds)[len(seconds) // 2] * 1e-12
            note = f"{8 * weight.nbytes / dense.numel():.2f} bits a weight; {moved:.2f} TB/s read and written"
            yield bench.value(f"{name} {shape[0]}x{shape[1]}", rates, "TB/s", counted=name == "tbe", note=note)
        outs = [torch.empty_like(dense) for _ in range(copies)]
        with bench.cuda_graphs():
            seconds = bench.seconds([partial(out.copy_, dense) for out in outs])
        rates = [dense.nbytes / time * 1e-12 for time in seconds]
        yield bench.value(f"copy {shape[0]}x{shape[1]}", rates, "TB/s", counted=False, note="a dense copy, for scale")


def normal(shape: tuple[int, int]) -> Tensor:
    """Normal weights with a deviation of 0.02, as trained ones have it."""
    return (torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1234)) * 0.02).bfloat16()


def _clone(weight: LosslessWeight | FragmentLosslessWeight) -> LosslessWeight | FragmentLosslessWeight:
    if isinstance(weight, FragmentLosslessWeight):
        return weight.clone()
    return weight.to("cuda", copy=True)
