"""N:M products on a GPU: every kind of variant compiles here, and multiplies right on a GPU."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from gossamer.weights import CompressedLinear, NMWeight
from gossamer.weights import _nm_gpu as gpu
from gossamer.weights._gpu_source import source
from gossamer.weights._nm_gpu import FewPlan, FloatsPlan

ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}
SHAPES = [(32, 64), (100, 70), (257, 300), (1024, 4100), (4096, 96)]
PATTERNS = ["1:2", "2:4:32", "3:8", "16:32", "4:32:64", "8:32:128", "5:250"]


def sparse_weight(shape: tuple[int, int], pattern: str, dtype: torch.dtype) -> NMWeight:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return NMWeight.from_dense(dense, pattern)


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def compile_everywhere(file: str, macros: dict[str, int]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    for arch in ("sm_80", "sm_90"):
        assert compile_cubin(source(file), arch, macros)


@pytest.mark.parametrize(("blocks", "bf16"), [(1, 0), (2, 1), (4, 1)])
def test_kernel_for_few_tokens_compiles(blocks: int, bf16: int) -> None:
    compile_everywhere("nm_few.cu", {"WARPS": 4, "STAGES": 3, "BLOCKS": blocks, "BFLOAT16": bf16})


@pytest.mark.parametrize("packed", [0, 1])
def test_kernel_for_floats_compiles(packed: int) -> None:
    sizes = {"TOKENS": 64, "OUTPUTS": 64, "DOWN": 8, "KEPT": 6, "INPUTS": 64, "ROOM": 60 if packed else 64}
    compile_everywhere(
        "nm_floats.cu", {**sizes, "ACROSS": 2, "STAGES": 3, "PACKED": packed, "RESIDENT": 2, "BFLOAT16": 0}
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_plans_fit_their_weights(pattern: str) -> None:
    """Shares are whole windows that cover all kept rows, none empty; blocks hold whole groups."""
    weight = sparse_weight((257, 600), pattern, torch.bfloat16)
    for n in (1, 16, 32):
        plans = gpu.few_plans(weight, n)
        assert plans
        for plan in plans:
            share = plan.share(weight)
            assert share % weight.pattern.n == 0 and (plan.shares - 1) * share < weight.kept <= plan.shares * share
            assert plan.shared_bytes(weight, n) <= 227 << 10
    floats = sparse_weight((257, 600), pattern, torch.float32)
    for n in (1, 100, 4096):
        plans_of_floats = gpu.floats_plans(floats, n)
        assert plans_of_floats
        for plan in plans_of_floats:
            steps = gpu.steps_of(floats, plan)
            assert plan.outputs % weight.pattern.vector == 0
            assert gpu.floats_shared(floats, plan, steps) <= 227 << 10
            assert int(steps.positions.max()) < steps.room


@pytest.mark.parametrize(("pattern", "packed"), [("3:8", False), ("4:32", True), ("2:32:64", True)])
def test_positions_lead_to_the_kept_inputs(pattern: str, packed: bool) -> None:
    weight = sparse_weight((200, 330), pattern, torch.float32)
    plan = FloatsPlan(64, 64, 8, 2, packed, 3, 1)
    steps = gpu.steps_of(weight, plan)
    kept, width, across = 2 * weight.pattern.n, 2 * weight.pattern.m, 64 // weight.pattern.vector
    for row, group in product(range(weight.kept), range(weight.groups)):
        step = row // kept
        place = int(steps.positions[group // across, step, group % across, row % kept])
        found = int(steps.lists[group // across, step, place]) if packed else step * width + place
        assert found == int(weight.inputs[row, group])


def test_tensor_core_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton")
    program = """
import torch
from gossamer.weights import NMWeight
from gossamer.weights._nm_tiles import TilePlan, multiply_tiles, transposed
for shape, pattern, n in (((96, 256), "16:32", 70), ((128, 200), "3:8:128", 33)):
    weight, x = NMWeight.from_dense(torch.randn(shape).half(), pattern), torch.randn(n, shape[1]).half()
    turned = transposed(x, weight.pattern.windows(shape[1]) * weight.pattern.m, 32)
    inputs = weight.inputs.t().contiguous().int()
    y = multiply_tiles(turned, weight.value_matrix, inputs, shape[0], weight.pattern.vector, n, TilePlan(32, 32, 4, 2))
    expected = x.double() @ weight.to_dense().double().T
    assert (y.double() - expected).norm() < 1e-3 * expected.norm()
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=300)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_tokens_multiply_right(pattern: str, dtype: torch.dtype) -> None:
    for shape, n in product(SHAPES, (1, 7, 8, 16, 17, 32)):
        weight = sparse_weight(shape, pattern, dtype).to("cuda")
        x = torch.randn(n, shape[1], device="cuda").to(dtype)
        expected = x.double() @ weight.to_dense().double().T
        for plan in gpu.few_plans(weight, n)[::5]:
            assert relative_error(gpu.multiply_few(weight, x, plan), expected) < ERROR[dtype], (shape, n, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS)
def test_floats_multiply_right(pattern: str) -> None:
    for shape, n in product(SHAPES, (1, 33, 300)):
        weight = sparse_weight(shape, pattern, torch.float32).to("cuda")
        x = torch.randn(n, shape[1], device="cuda")
        expected = x.double() @ weight.to_dense().double().T
        plans = gpu.floats_plans(weight, n)
        for plan in plans[:: max(1, len(plans) // 2)]:
            y = gpu.multiply_floats(weight, x, plan, gpu.steps_of(weight, plan))
            assert relative_error(y, expected) < ERROR[torch.float32], (shape, n, plan)


@pytest.mark.gpu
def test_packed_and_plain_floats_have_the_same_bits() -> None:
    weight = sparse_weight((512, 1024), "4:32", torch.float32).to("cuda")
    x = torch.randn(1024, 200, device="cuda").t()
    ys = []
    for packed in (False, True):
        plan = FloatsPlan(64, 128, 8, 2, packed, 3, 1)
        ys.append(gpu.multiply_floats(weight, x, plan, gpu.steps_of(weight, plan)))
    assert torch.equal(*ys)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["2:4:32", "3:8", "16:32:64", "8:32:128"])
def test_many_tokens_multiply_right(pattern: str, dtype: torch.dtype) -> None:
    from gossamer.weights._nm_tiles import candidates

    for shape, n in product(SHAPES[2:], (33, 300)):
        weight = sparse_weight(shape, pattern, dtype).to("cuda")
        x = torch.randn(n, shape[1], device="cuda").to(dtype)
        expected = x.double() @ weight.to_dense().double().T
        for plan in candidates(weight.pattern.vector)[::4]:
            assert relative_error(gpu.multiply_tiled(weight, x, plan, weight.on_gpu.inputs), expected) < ERROR[dtype]


@pytest.mark.gpu
def test_products_have_the_same_bits_every_time() -> None:
    for dtype, n in ((torch.bfloat16, 16), (torch.float32, 64)):
        weight = sparse_weight((1024, 4096), "8:32", dtype).to("cuda")
        x = torch.randn(n, 4096, device="cuda").to(dtype)
        first = weight.linear(x)
        assert all(torch.equal(weight.linear(x), first) for _ in range(50))


@pytest.mark.gpu
def test_layers_run_on_the_gpu_in_graphs_and_by_row_counts() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        weight = sparse_weight((512, 1024), "8:32", dtype)
        dense = weight.to_dense().cuda()
        layer = CompressedLinear(weight, torch.ones(512)).cuda()
        for rows in ((4,), (2, 3), (5, 20), (1, 700)):
            x = torch.randn(*rows, 1024, device="cuda").to(dtype)
            assert relative_error(layer(x), x.double() @ dense.double().T + 1) < 1e-2
        x = torch.randn(16, 1024, device="cuda").to(dtype)
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        with pytest.raises(ValueError, match="device"):
            layer(torch.ones(1, 1024))


@pytest.mark.gpu
def test_the_operator_keeps_torchs_rules() -> None:
    weight = sparse_weight((128, 256), "8:32", torch.bfloat16).to("cuda")
    x = torch.randn(4, 256, device="cuda").bfloat16()
    numbers = [128, 8, 32, 32, *vars(FewPlan(4, 3, 1)).values()]
    torch.library.opcheck(torch.ops.gossamer.nm_linear, ("few", x, [weight.values, weight.index], numbers))
