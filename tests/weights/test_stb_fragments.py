"""Binarised weights in fragment order: what was quantised comes back, and the decoder's lanes by an emulator."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import mma_lanes
from gossamer.weights import CompressedLinear, FragmentSTBWeight, STBWeight, WeightFormat, stack_fragments, stb_quantize
from gossamer.weights import _fragments_gpu as gpu
from gossamer.weights._fragments_gpu import FragmentPlan, macros

TYPES = [torch.float16, torch.bfloat16]


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[:, ::9] *= 8  # columns that are worth two signs
    return weight.to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (16, 128), (17, 129), (100, 300), (64, 127)])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_the_quantiser_found_comes_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random_weight(shape, dtype)
    expected = stb_quantize(weight).to_dense().to(dtype)
    stored = FragmentSTBWeight.from_dense(weight)
    assert torch.equal(stored.to_dense(), expected)
    assert stored.density == pytest.approx(float((expected != 0).double().mean()), abs=1e-6)
    for code in ("faithful", "code4"):
        unordered = STBWeight.from_dense(weight, code)
        assert torch.equal(FragmentSTBWeight.from_stb(unordered).to_dense(), unordered.to_dense())


def test_lean_weights_too_and_their_bits_are_counted() -> None:
    lean = STBWeight.from_dense(random_weight((64, 256)), "lean", n=5)
    stored = FragmentSTBWeight.from_stb(lean)
    assert torch.equal(stored.to_dense(), lean.to_dense())
    assert stored.stored_bits == pytest.approx((1424 * 8 + 32) / 2048, abs=0.01)


def test_weights_with_other_salient_columns_stand_below_each_other() -> None:
    turned = random_weight((32, 256)).flip(1)
    weights = [FragmentSTBWeight.from_dense(weight) for weight in (random_weight((16, 256)), turned)]
    stacked = stack_fragments(weights)
    assert stacked is not None
    assert torch.equal(stacked.to_dense(), torch.cat([weight.to_dense() for weight in weights]))


def byte_permute(first: np.ndarray, second: np.ndarray, selector: np.ndarray | int) -> np.ndarray:
    """``prmt.b32`` of every lane; selectors with bit 3 set would repeat a sign, which no code may ask for."""
    both = np.stack([first, second], 1).astype(np.uint32).copy().view(np.uint8)  # (32, 8)
    nibbles = np.stack([np.broadcast_to(np.asarray(selector) >> 4 * byte & 15, 32) for byte in range(4)], 1).astype(int)
    assert (nibbles < 8).all()
    return np.take_along_axis(both, nibbles, 1).copy().view(np.uint32)[:, 0]


def emulated_tile(record: np.ndarray, x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """``(16, 8)``: what a warp makes of one record and eight rows ``(8, 128)`` of x, instruction by instruction."""
    words, lanes = record.view(np.uint32), mma_lanes.LANES
    sums = np.zeros((32, 4))
    others = [words[(16 + 16 * (mma_lanes.G + 8 * row)[:, None]) // 4 + np.arange(4)] for row in range(2)]
    salient = [words[(272 + 8 * (mma_lanes.G + 8 * row)[:, None]) // 4 + np.arange(2)] for row in range(2)]
    for quarter, k in product(range(4), range(2)):
        codes = words[100 + 128 * (quarter // 2) + 4 * lanes[:, None] + np.arange(4)]
        four_bits = record[4 * quarter + mma_lanes.T].astype(np.uint64) >> np.uint64(4 * k) & np.uint64(15)
        mask = ((four_bits * np.uint64(0x00204081) & np.uint64(0x01010101)) * np.uint64(0xFF)).astype(np.uint32)
        a = np.zeros((32, 4, 2), np.uint16)
        for row in range(2):
            four = (codes[:, 2 * (quarter % 2) + row] >> np.uint32(16 * k)) & np.uint32(0xFFFF)
            halves = []
            for byte in range(2):
                table = others[row][:, 2 * byte], others[row][:, 2 * byte + 1], salient[row][:, byte]
                looked_up = byte_permute(table[0], table[1], four), byte_permute(table[0], table[2], four)
                halves.append(looked_up[0] & ~mask | looked_up[1] & mask)
            a[:, row] = byte_permute(*halves, 0x5140).view(np.uint16).reshape(32, 2)
            a[:, 2 + row] = byte_permute(*halves, 0x7362).view(np.uint16).reshape(32, 2)
        columns = 32 * quarter + 8 * mma_lanes.T + 4 * k
        b = np.stack([np.stack([x[mma_lanes.G, columns + 2 * h + e] for e in range(2)], 1) for h in range(2)], 1)
        numbers = torch.from_numpy(a.view(np.int16).copy()).view(dtype).double().numpy()
        sums = mma_lanes.mma(numbers, b, sums, 16)
    tile = np.zeros((16, 8))
    tile[mma_lanes.result(16)] = sums
    return tile


@pytest.mark.parametrize("dtype", TYPES)
def test_a_warp_multiplies_a_record_as_the_kernel_text_says(dtype: torch.dtype) -> None:
    levels = stb_quantize(random_weight((16, 128), dtype))
    assert 0 < int((levels.level >= 7).any(0).sum()) < 128
    x = np.random.default_rng(0).standard_normal((8, 128))
    stored = FragmentSTBWeight.from_levels(levels, dtype)
    tile = emulated_tile(stored.records.numpy().view(np.uint8), x, dtype)
    np.testing.assert_allclose(tile, levels.to_dense().to(dtype).double().numpy() @ x.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [8, 16, 32])
def test_every_variant_compiles(n: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    for dtype, strips in zip(TYPES, (1, 2), strict=True):
        weight = FragmentSTBWeight.from_dense(torch.ones(16, 128, dtype=dtype))
        assert compile_cubin(weight.decoder.source(), "sm_90", macros(FragmentPlan(strips, 2, 8, 1, 8), n, weight))


def test_it_is_saved_and_is_a_layer_on_a_cpu_too(tmp_path: Path) -> None:
    stored = FragmentSTBWeight.from_dense(random_weight((33, 200)))
    stored.save(tmp_path / "weight.safetensors")
    loaded = WeightFormat.load(tmp_path / "weight.safetensors")
    assert isinstance(loaded, FragmentSTBWeight)
    x = torch.randn(3, 200)
    expected = x @ stored.to_dense().float().T
    torch.testing.assert_close(CompressedLinear(loaded)(x), expected, rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused() -> None:
    levels = stb_quantize(random_weight((16, 128)))
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
        FragmentSTBWeight.from_levels(levels, torch.float32)
    with pytest.raises(TypeError, match="one of float16, bfloat16"):
        FragmentSTBWeight.from_dense(torch.ones(16, 128))
    with pytest.raises(TypeError, match="takes norms and n, got m"):
        FragmentSTBWeight.from_dense(random_weight((16, 128)), m=8)
    column = int((levels.level >= 7).any(0).nonzero()[0])
    levels.level[:, column] = torch.arange(16) % 2 * 6 + 1
    with pytest.raises(ValueError, match="salient columns in all rows"):
        FragmentSTBWeight.from_levels(levels)
    good = FragmentSTBWeight.from_dense(random_weight((16, 128)))
    with pytest.raises(ValueError, match="do not describe"):
        FragmentSTBWeight.from_arrays(good.arrays(), (17, 128), torch.float16, good.meta())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 65), (100, 300), (4095, 1000), (16, 9000)])
def test_every_plan_multiplies_right(shape: tuple[int, int], dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < gpu.COMPUTE_CAPABILITY:
        pytest.skip("needs a GPU of compute capability 9.0")
    stored = FragmentSTBWeight.from_dense(random_weight(shape, dtype)).to("cuda")
    dense = stored.to_dense().double()
    for n in (1, 3, 8, 9, 17, 32):
        x = torch.randn(n, shape[1], device="cuda").to(dtype)
        expected = x.double() @ dense.T
        for plan in gpu.candidates(stored, n)[::11]:
            error = (gpu.multiply(stored, x, plan).double() - expected).norm() / expected.norm().clamp(min=1e-30)
            assert float(error) < (1e-3 if dtype == torch.float16 else 8e-3), (n, plan)
