"""The GPU kernel of weights in fragment order: every variant compiles here, and multiplies right on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from gossamer.weights import CompressedLinear, FragmentBitmapWeight, FragmentLosslessWeight
from gossamer.weights import _fragments_gpu as gpu
from gossamer.weights._fragments import FragmentWeight
from gossamer.weights._fragments_gpu import FragmentPlan, macros

TYPES = [torch.float16, torch.bfloat16]


def sparse_weight(shape: tuple[int, int], density: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    return (weight * (torch.rand(shape, generator=generator) < density)).to(dtype)


def formats_of(weight: Tensor) -> list[FragmentWeight]:
    formats: list[FragmentWeight] = [FragmentBitmapWeight.from_dense(weight)]
    return [*formats, FragmentLosslessWeight.from_dense(weight)] if weight.dtype == torch.bfloat16 else formats


@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_variant_compiles(n: int, dtype: torch.dtype) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    assert nvrtc
    from gossamer.core.nvrtc import compile_cubin

    for strips, stages in product((1, 2), (2, 3)):
        for weight in formats_of(torch.ones(16, 128, dtype=dtype)):
            chosen = macros(FragmentPlan(strips, stages, 8, 1, 8), n, weight)
            assert compile_cubin(weight.decoder.source(), "sm_90", chosen)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() < gpu.COMPUTE_CAPABILITY:
        pytest.skip("needs a GPU of compute capability 9.0")


ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (17, 65), (100, 300), (4095, 1000), (256, 4096), (16, 9000)])
def test_every_plan_multiplies_right(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for density in (0.0, 0.3, 1.0):
        weight = sparse_weight(shape, density, dtype).cuda()
        for stored, n in product(formats_of(weight), (1, 3, 8, 9, 17, 32)):
            assert torch.equal(stored.to_dense(), weight)
            x = torch.randn(n, shape[1], device="cuda").to(dtype)
            expected = x.double() @ weight.double().T
            for plan in gpu.candidates(stored, n)[::11]:
                assert relative_error(gpu.multiply(stored, x, plan), expected) < ERROR[dtype], (density, n, plan)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_activations_may_begin_anywhere_in_memory() -> None:
    weight = sparse_weight((64, 256), 0.5, torch.float16).cuda()
    x = torch.randn(1 + 2 * 256, device="cuda").half()[1:].view(2, 256)
    y = FragmentBitmapWeight.from_dense(weight).linear(x)
    assert relative_error(y, x.double() @ weight.double().T) < ERROR[torch.float16]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_hundred_launches_give_the_same_bits() -> None:
    stored = FragmentBitmapWeight.from_dense(sparse_weight((2048, 4096), 0.5, torch.float16).cuda())
    x = torch.randn(16, 4096, device="cuda").half()
    for plan in gpu.candidates(stored, 16)[::5]:
        first = gpu.multiply(stored, x, plan)
        assert all(torch.equal(gpu.multiply(stored, x, plan), first) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_product_that_begins_early_still_waits_for_what_it_reads() -> None:
    """A chain in which every product takes the result of the one before, and a weight made right before its product."""
    weights = [sparse_weight((1024, 1024), 0.5, torch.float16).cuda() / 16 for _ in range(3)]
    first = torch.randn(8, 1024, device="cuda").half()
    for plan in gpu.candidates(FragmentBitmapWeight.from_dense(weights[0]), 8)[::7]:
        results = []
        for early in (False, True):
            stored = [FragmentBitmapWeight.from_dense(weight) for weight in weights]
            x = first
            for step in range(60):
                if step % 20 == 10:
                    stored = [weight.clone() for weight in stored]
                x = gpu.multiply(stored[step % 3], x, plan, early) * 0.7
            results.append(x)
        assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_overflow_and_special_values_behave_as_in_the_dense_product() -> None:
    weight = torch.zeros(32, 4096, dtype=torch.float16, device="cuda")
    weight[0], weight[1], weight[2, 5] = 1.0, 60.0, float("inf")
    x = torch.ones(1, 4096, dtype=torch.float16, device="cuda")
    y = FragmentBitmapWeight.from_dense(weight).linear(x)
    assert y[0, 0] == 4096
    assert torch.isinf(y[0, 1])  # 245,760 does not fit into float16; the float32 sum does
    assert torch.isinf(y[0, 2])
    assert (y[0, 3:] == 0).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_layers_run_compiled_and_in_graphs_and_decode_many_rows() -> None:
    weight = sparse_weight((512, 1024), 0.5, torch.bfloat16).cuda()
    layer = CompressedLinear(FragmentBitmapWeight.from_dense(weight), torch.ones(512, device="cuda"))
    for n in (4, 100):
        x = torch.randn(n, 1024, device="cuda").bfloat16()
        assert relative_error(layer(x), x.double() @ weight.double().T + 1) < 1e-2
    x = torch.randn(4, 1024, device="cuda").bfloat16()
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    stored = layer.weight_format
    assert isinstance(stored, FragmentBitmapWeight)
    arguments = (x, list(stored.arrays().values()), stored.name, 512, "longest", [stored.longest])
    torch.library.opcheck(torch.ops.gossamer.fragment_linear, arguments)
    with pytest.raises(ValueError, match="device"):
        layer(torch.ones(1, 1024))
