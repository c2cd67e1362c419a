"""Weights in fragment order on one GPU against dense cuBLAS: decode with 1 to 32 tokens in flight.

Times are CUDA-graph replays; weights rotate over copies that exceed the L2 cache four times, so nobody reads them from
there. A product of ours begins to fetch while the one before drains, as products that follow each other in a decoding
step can; what it takes when it may not is in the remarks. The peer is the faster of cuBLAS and cuBLASLt as torch calls
them. The six shapes are those of LLaMA-like layers with at least 58 million entries; 4096x4096, where launches are most
of the time, is shown apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gossamer.core.measure import Bench, Row, claim, geometric_mean, median, worst
from gossamer.weights import FragmentBitmapWeight, FragmentLosslessWeight, FragmentSTBWeight
from gossamer.weights._fragments import FragmentWeight
from gossamer.weights._fragments_gpu import dense_linear, fastest_way, multiply
from gossamer.weights._stb_quantise import STBLevels

SHAPES = ((28672, 4096), (4096, 14336), (5120, 13824), (28672, 8192), (8192, 28672), (8192, 8192))
SMALL = (4096, 4096)
TOKENS = (1, 8, 16, 32)
COMMON = ("weights/_fragments*.py", "weights/kernels/fragment_*.cu", "core/nvrtc.py")
BITMAP = (*COMMON, "weights/_bitmap_fragments.py", "weights/kernels/bitmap_tile.cu")
LOSSLESS = (*COMMON, "weights/_lossless_fragments.py", "weights/kernels/nib12_tile.cu")
PEER = "torch.nn.functional.linear, the faster of cuBLAS and cuBLASLt"
STB = (*COMMON, "weights/_stb_fragments.py", "weights/kernels/stb_tile.cu")
_L2_BYTES = 60 << 20

Calls = list[Callable[[], Tensor]]


def _against_dense(sparsity: int, bar: float) -> None:
    """Register the claim for one sparsity."""

    @claim(
        f"h200-bitmap-{sparsity}",
        text=f"bitmap fp16 linear at {sparsity} % sparsity against dense cuBLAS on an H200, 1 to 32 tokens",
        system=["SpInfer"], peer=PEER, peer_package="torch", unit="ratio", bar=bar, better="higher",
        summary=geometric_mean, sources=BITMAP,
    )  # fmt: skip
    def measure(bench: Bench) -> Iterator[Row]:
        for shape in (*SHAPES, SMALL):
            dense, stored = _pruned(shape, sparsity / 100)
            for tokens in TOKENS:
                row = _compare(bench, dense, stored, tokens)
                yield replace(row, case=f"{shape[0]}x{shape[1]} N={tokens}", counted=shape != SMALL)


for _sparsity, _bar in ((30, 1.0), (50, 1.15), (60, 1.25), (70, 1.4), (80, 1.6)):
    _against_dense(_sparsity, _bar)


@claim(
    "h200-dispatch",
    text="a layer stored as fastest_way advises (bitmap or dense), worst case against dense on an H200",
    system=["SpInfer"],
    peer=PEER,
    peer_package="torch",
    unit="ratio",
    bar=0.97,
    better="higher",
    summary=worst,
    sources=BITMAP,
)
def dispatch(bench: Bench) -> Iterator[Row]:
    """Where the choice is dense, the row compares dense with itself; the note says which ran."""
    for sparsity in (30, 50, 60, 70, 80):
        for shape in (*SHAPES, SMALL):
            dense, stored = _pruned(shape, sparsity / 100)
            for tokens in TOKENS:
                way = fastest_way(stored[0], tokens)
                row = _compare(bench, dense, stored, tokens, way)
                yield replace(row, case=f"{shape[0]}x{shape[1]} {sparsity} % N={tokens}", note=way)


@claim(
    "h200-lossless",
    text="bit-exact 12-bit bf16 linear against dense cuBLAS on an H200, 1 to 16 tokens (bytes allow 1.33x)",
    system=["ZipServ"],
    peer=PEER,
    peer_package="torch",
    unit="ratio",
    bar=1.1,
    better="higher",
    summary=geometric_mean,
    sources=LOSSLESS,
)
def lossless(bench: Bench) -> Iterator[Row]:
    """Normal weights with a deviation of 0.02, as trained ones have it."""
    for shape in (*SHAPES, SMALL):
        dense = _normal(shape).bfloat16()
        copies = _rotated(dense, FragmentLosslessWeight.from_dense(dense))
        for tokens in TOKENS:
            row = _compare(bench, *copies, tokens)
            case = f"{shape[0]}x{shape[1]} N={tokens}"
            yield replace(row, case=case, counted=shape != SMALL and tokens <= 16)


@claim(
    "h200-stb",
    text="binarised 4:8 linear (5.6 stored bits) against dense cuBLAS fp16 on an H200, 1 to 16 tokens (bytes allow 2.9x)",
    system=["STBLLM"],
    peer=PEER,
    peer_package="torch",
    unit="ratio",
    bar=1.8,
    better="higher",
    summary=geometric_mean,
    sources=STB,
)
def stb(bench: Bench) -> Iterator[Row]:
    """Patterns, regions and signs at random, every tenth column salient: what is read and done does not depend on them."""
    for shape in (*SHAPES, SMALL):
        stored = FragmentSTBWeight.from_levels(_random_levels(shape))
        copies = _rotated(stored.to_dense(), stored)
        for tokens in (1, 8, 16):
            yield replace(
                _compare(bench, *copies, tokens), case=f"{shape[0]}x{shape[1]} N={tokens}", counted=shape != SMALL
            )


def _random_levels(shape: tuple[int, int]) -> STBLevels:
    generator = torch.Generator("cuda").manual_seed(7)
    rows, columns = shape
    keep = torch.rand(rows, columns // 8, 8, device="cuda", generator=generator).argsort(2) < 4
    salient = torch.arange(columns, device="cuda") % 10 == 0
    drawn = torch.randint(0, 12, shape, device="cuda", generator=generator, dtype=torch.uint8)
    level = torch.where(salient, 7 + drawn % 4, 1 + drawn % 6) * keep.view(shape)
    mean, scale = (
        torch.rand(rows, columns // 128, 5, device="cuda", generator=generator).half() * size for size in (0.01, 0.05)
    )
    return STBLevels(shape, 4, level, mean, scale)


def _normal(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1234)) * 0.02


def _pruned(shape: tuple[int, int], sparsity: float) -> tuple[list[Tensor], list[FragmentWeight]]:
    keep = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) >= sparsity
    dense = (_normal(shape) * keep).half()
    return _rotated(dense, FragmentBitmapWeight.from_dense(dense))


def _rotated(dense: Tensor, stored: FragmentWeight) -> tuple[list[Tensor], list[FragmentWeight]]:
    """Copies of one weight, dense and compressed, each set four times the L2 cache or two copies."""
    return (
        [dense, *(dense.clone() for _ in range(_copies(2 * dense.numel()) - 1))],
        [stored, *(stored.clone() for _ in range(_copies(stored.nbytes) - 1))],
    )


def _copies(nbytes: int) -> int:
    return max(2, min(32, math.ceil(4.2 * _L2_BYTES / nbytes)))


def _compare(
    bench: Bench, dense: Sequence[Tensor], stored: Sequence[FragmentWeight], tokens: int, way: str = "compressed"
) -> Row:
    x = torch.randn(tokens, dense[0].shape[1], device="cuda").to(dense[0].dtype)
    peers: dict[str, Calls] = {
        name: [partial(dense_linear, x, weight, name) for weight in dense] for name in ("cublas", "cublaslt")
    }
    ours: Calls = [partial(multiply, weight, x) for weight in stored] if way == "compressed" else peers[way]
    expected = x.double() @ dense[0].double().T
    error = float((ours[0]().double() - expected).norm() / expected.norm())
    assert error < 8 * torch.finfo(x.dtype).eps, f"relative error {error}"
    with bench.cuda_graphs():
        row = bench.compare("", ours, peers)
        if way != "compressed":
            return row
        apart = median(bench.seconds([partial(multiply, weight, x, early=False) for weight in stored]))
    speed = f"{stored[0].nbytes / row.ours * 1e-9:.0f} GB/s of weights"
    return replace(row, note=f"{speed}; {apart * 1e6:.3g} µs when it waits for the product before")
