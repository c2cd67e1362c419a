"""Lossless weights on a GPU: the decompression kernels compile here, and give back every bit on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.weights import CompressedLinear, FragmentLosslessWeight, LosslessWeight
from gossamer.weights._decompress_gpu import TbePlan, decompress_tbe
from gossamer.weights._gpu_source import source

SHAPES = [(64, 64), (1, 4096), (65, 200), (130, 333), (300, 1111), (1024, 4096)]


def gaussian(shape: tuple[int, int]) -> Tensor:
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()


def adversaries(shape: tuple[int, int]) -> list[Tensor]:
    """Normal weights; with special values among them; with a tenth of random bits; and so small that windows begin at 0."""
    special, noisy, tiny = gaussian(shape), gaussian(shape), gaussian(shape) * 1e-36
    values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-39, 3e38]).bfloat16()
    special.view(-1)[:: max(7, special.numel() // 999)] = values[
        torch.arange(len(special.view(-1)[:: max(7, special.numel() // 999)])) % len(values)
    ]
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int16)
    noisy.view(torch.int16).view(-1)[::10] = bits.view(-1)[::10]
    return [gaussian(shape), special, noisy, tiny]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(
    ("file", "macros"),
    [
        ("tbe_decompress.cu", {"WIDE": 0, "STAGES": 2}),
        ("tbe_decompress.cu", {"WIDE": 1, "STAGES": 3}),
        ("nib12_decompress.cu", {}),
    ],
)
def test_kernels_compile(file: str, macros: dict[str, int]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    assert compile_cubin(source(file), "sm_90", {**macros, "BFLOAT16": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["tbe", "nib12"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_comes_back(layout: str, shape: tuple[int, int]) -> None:
    for weight in adversaries(shape):
        stored = LosslessWeight.from_dense(weight, layout)
        there = stored.to("cuda")
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")
        assert same_bits(there.to_dense(out).cpu(), weight)
        assert same_bits(there.to_dense().cpu(), weight)
        assert there.layout == stored.layout and there.nbytes == stored.nbytes
        assert same_bits(there.to("cpu").to_dense(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_fragments_come_back_as_they_were(shape: tuple[int, int]) -> None:
    for weight in adversaries(shape):
        assert same_bits(FragmentLosslessWeight.from_dense(weight.cuda()).to_dense().cpu(), weight)


@pytest.mark.gpu
def test_every_bf16_pattern_comes_back() -> None:
    weight = gaussian((1024, 1024))
    weight.view(torch.int16).view(-1)[: 1 << 16] = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for layout in ("tbe", "nib12"):
        stored = LosslessWeight.from_dense(weight, layout)
        assert stored.layout == layout
        assert same_bits(stored.to("cuda").to_dense().cpu(), weight)


@pytest.mark.gpu
def test_every_plan_and_place_of_the_result_is_right() -> None:
    weight = gaussian((512, 1000))
    stored = LosslessWeight.from_dense(weight, "tbe").to("cuda")
    for plan in (TbePlan(1, 4), TbePlan(2, 16), TbePlan(3, 8), TbePlan(4, 2)):
        out = torch.zeros(512, 1000, dtype=torch.int16, device="cuda")
        decompress_tbe(stored.arrays(), stored.meta(), out, plan)
        assert torch.equal(out.cpu(), weight.view(torch.int16))
    out = torch.zeros(1 + weight.numel(), dtype=torch.int16, device="cuda")[1:].view(512, 1000)
    decompress_tbe(stored.arrays(), stored.meta(), out)
    assert torch.equal(out.cpu(), weight.view(torch.int16))


@pytest.mark.gpu
def test_layers_multiply_as_the_dense_library_does_in_graphs_too() -> None:
    weight, x = gaussian((512, 1024)), torch.randn(3, 1024, device="cuda").bfloat16()
    for layout in ("tbe", "nib12"):
        layer = CompressedLinear(LosslessWeight.from_dense(weight, layout)).cuda()
        expected = F.linear(x, weight.cuda())
        assert torch.equal(layer(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        with pytest.raises(ValueError, match="device"):
            layer(x.cpu())
