"""Vector-wise N:M products on one GPU against dense cuBLAS: float32, bfloat16 on tensor cores, and decoding.

Times are CUDA-graph replays. Peers multiply the same pruned matrix stored dense. In float32, TF32 is off, and the
activations are given feature by feature to both (as the published kernel takes them: no copy is made); rows in torch's
usual order, where ours turns the activations first, stand beside. In bfloat16 the activations are in torch's order, and
turning them is counted. Decoding rotates over copies that exceed the L2 cache four times and reports the compressed bytes
read per second against the speed of a device copy, measured in the same run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.core.measure import Bench, Row, claim, geometric_mean
from gossamer.weights import NMPattern, NMWeight
from gossamer.weights._fragments_gpu import dense_linear

PUBLISHED = ((512, 4096, 4096), (512, 11008, 4096), (2048, 4096, 11008), (2048, 11008, 4096))
"""Tokens, outputs, inputs: the products on which the official kernel was measured on this kind of machine."""
LARGE = ((4096, 4096, 4096), (4096, 11008, 4096), (4096, 4096, 11008), (4096, 8192, 8192))
DECODE = ((28672, 4096), (4096, 14336), (5120, 13824), (28672, 8192), (8192, 28672), (8192, 8192))
KEPT = {50: 16, 75: 8, 87: 4}
SOURCES = ("weights/_nm*.py", "weights/_measured.py", "weights/_gpu_source.py", "weights/kernels/nm_*.cu",
           "weights/kernels/machine.cu", "core/nvrtc.py")  # fmt: skip
_L2_BYTES = 60 << 20


def _floats(percent: int, bar: float) -> None:
    """Register the float32 claim for one sparsity."""

    @claim(
        f"h200-nm-fp32-{percent}",
        text=f"N:M {KEPT[percent]}:32 fp32 product (L = 32) against dense cuBLAS without TF32 on an H200",
        system=["NM-SpMM"], peer="torch.nn.functional.linear, TF32 off", peer_package="torch", unit="ratio", bar=bar,
        better="higher", summary=geometric_mean, sources=SOURCES,
    )  # fmt: skip
    def measure(bench: Bench) -> Iterator[Row]:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            for tokens, rows, columns in (*PUBLISHED, *LARGE[:3]):
                weight, dense = pruned((rows, columns), NMPattern(KEPT[percent], 32), torch.float32)
                for order, counted in (("features first", True), ("tokens first", False)):
                    x = torch.randn(columns, tokens, device="cuda").t()
                    x = x if counted else x.contiguous()
                    row = _race(bench, weight, dense, x)
                    plan = weight.on_gpu.floats_plan(tokens)
                    case = f"{tokens} tokens {rows}x{columns}, {order}"
                    yield replace(row, case=case, counted=counted, note=f"{_rate(row, tokens, weight)}; {plan}")
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


for _percent, _bar in ((50, 1.8), (75, 3.4), (87, 5.8)):
    _floats(_percent, _bar)


def _tiles(percent: int, bar: float) -> None:
    """Register the bfloat16 claim for one sparsity."""

    @claim(
        f"h200-nm-bf16-{percent}",
        text=f"N:M {KEPT[percent]}:32 bf16 product (L = 128) of 4096 tokens against dense cuBLAS on an H200",
        system=["NM-SpMM"], peer="torch.nn.functional.linear, the faster of cuBLAS and cuBLASLt", peer_package="torch",
        unit="ratio", bar=bar, better="higher", summary=geometric_mean, sources=SOURCES,
    )  # fmt: skip
    def measure(bench: Bench) -> Iterator[Row]:
        for vector in (128, 64, 32):
            for tokens, rows, columns in LARGE:
                pattern = NMPattern(KEPT[percent], 32, vector)
                weight, dense = pruned((rows, columns), pattern, torch.bfloat16)
                x = torch.randn(tokens, columns, device="cuda").bfloat16()
                row = _race(bench, weight, dense, x)
                plan = weight.on_gpu.tile_plan(tokens)
                case = f"{tokens} tokens {rows}x{columns}, L = {vector}"
                yield replace(row, case=case, counted=vector == 128, note=f"{_rate(row, tokens, weight)}; {plan}")


for _percent, _bar in ((75, 1.2), (87, 1.8)):
    _tiles(_percent, _bar)


@claim(
    "h200-nm-decode",
    text="N:M bf16 products of 16 tokens on an H200: compressed bytes a second over those that a device copy moves",
    system=["NM-SpMM"],
    peer="device copy (bytes read and written) in the same run; torch.nn.functional.linear beside it",
    unit="ratio",
    bar=0.6,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def decode(bench: Bench) -> Iterator[Row]:
    """Weights with at least 50 million entries, 16 tokens, 50 and 75 % pruned."""
    copy = copy_speed(bench)
    for kept, vector in ((16, 32), (8, 32), (8, 128)):
        for shape in DECODE:
            weight, dense = pruned(shape, NMPattern(kept, 32, vector), torch.bfloat16)
            x = torch.randn(16, shape[1], device="cuda").bfloat16()
            check(weight, dense, x)
            weights = [weight, *(weight.to("cuda", copy=True) for _ in range(_copies(weight.nbytes) - 1))]
            plan = weight.on_gpu.few_plan(16)
            for each in weights[1:]:
                each.on_gpu.few_plan(16)
            matrices = [dense, *(dense.clone() for _ in range(_copies(dense.nbytes) - 1))]
            with bench.cuda_graphs():
                row = bench.compare("", [partial(each.linear, x) for each in weights],
                                    [partial(F.linear, x, each) for each in matrices])  # fmt: skip
            reached = weight.nbytes / row.ours
            note = f"{reached * 1e-9:.0f} of {copy * 1e-9:.0f} GB/s; {row.ratio:.2f}x cuBLAS; {plan}"
            case = f"{shape[0]}x{shape[1]}, {kept}:32, L = {vector}"
            yield bench.value(case, reached / copy, "ratio", counted=vector == 32, note=note)


def copy_speed(bench: Bench) -> float:
    """Bytes read and written per second by a copy of 4 GB."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    with bench.cuda_graphs():
        seconds = sorted(bench.seconds(partial(target.copy_, source)))
    return 2 * source.nbytes / seconds[len(seconds) // 2]


def pruned(shape: tuple[int, int], pattern: NMPattern, dtype: torch.dtype) -> tuple[NMWeight, Tensor]:
    """A normal matrix pruned by magnitude, compressed and dense."""
    generator = torch.Generator("cuda").manual_seed(1234)
    weight = NMWeight.from_dense((0.02 * torch.randn(shape, device="cuda", generator=generator)).to(dtype), pattern)
    return weight, weight.to_dense()


def check(weight: NMWeight, dense: Tensor, x: Tensor) -> None:
    """The product is right, against float64."""
    expected = x.double() @ dense.double().T
    error = float((weight.linear(x).double() - expected).norm() / expected.norm())
    assert error < (1e-5 if x.dtype == torch.float32 else 8 * torch.finfo(x.dtype).eps), f"relative error {error}"


def _race(bench: Bench, weight: NMWeight, dense: Tensor, x: Tensor) -> Row:
    check(weight, dense, x)
    libraries = {name: partial(dense_linear, x, dense, name) for name in ("cublas", "cublaslt")}
    with bench.cuda_graphs():
        return bench.compare("", partial(weight.linear, x), libraries)


def _rate(row: Row, tokens: int, weight: NMWeight) -> str:
    useful = 2 * tokens * weight.shape[0] * weight.kept / row.ours
    return f"{useful * 1e-12:.1f} TFLOP/s on kept weights"


def _copies(nbytes: int) -> int:
    return max(2, min(32, math.ceil(4.2 * _L2_BYTES / nbytes)))
