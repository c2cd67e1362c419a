"""Bit-exact weights in fragment order: every pattern comes back, and the decoder's lanes by an emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mma_lanes
from gossamer.weights import CompressedLinear, FragmentLosslessWeight, WeightFormat


def normal_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def test_all_65536_patterns_come_back() -> None:
    """Among others: alone they would take more than the dense matrix."""
    patterns = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).reshape(256, 256)
    others = torch.full((256, 4096), 1.0).bfloat16()
    weight = torch.cat([patterns, others], 1)
    stored = FragmentLosslessWeight.from_dense(weight)
    assert torch.equal(bits(stored.to_dense()), bits(weight))
    assert stored.escaped == 65536 - 16 * 256
    with pytest.raises(ValueError, match="more memory than dense"):
        FragmentLosslessWeight.from_dense(patterns)
    zeros = normal_weight((64, 256)) * (torch.rand(64, 256) < 0.4)
    with pytest.raises(ValueError, match="FragmentBitmapWeight"):
        FragmentLosslessWeight.from_dense(zeros)


@settings(max_examples=30)
@given(
    rows=st.sampled_from([1, 7, 15, 16, 17, 100]),
    columns=st.sampled_from([1, 2, 127, 128, 129, 300]),
    scale=st.sampled_from([0.0, 1e-38, 0.02, 1.0, 1e38]),
    seed=st.integers(0, 99),
)
def test_every_shape_and_scale_comes_back(rows: int, columns: int, scale: float, seed: int) -> None:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()
    assert torch.equal(bits(FragmentLosslessWeight.from_dense(weight).to_dense()), bits(weight))


def test_normal_weights_take_twelve_bits_and_few_escapes() -> None:
    stored = FragmentLosslessWeight.from_dense(normal_weight((512, 1024)))
    assert 0 < stored.escaped < 1e-3 * 512 * 1024
    assert stored.nbytes < 0.755 * stored.dense_nbytes


def as_float(bits: np.ndarray | int) -> np.ndarray:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32).astype(float)


def add_escapes(sums: np.ndarray, words: np.ndarray, x: np.ndarray, base: int) -> None:
    """As every lane does it; x is read where ``fetch_activations`` lays it down, for one block of eight tokens."""
    pieces = np.zeros((4, 32, 8))  # quarter, lane, columns
    for quarter in range(4):
        for lane in range(32):
            first = 32 * quarter + 8 * (lane & 3)
            pieces[quarter, lane] = x[lane >> 2, first : first + 8]
    flat = pieces.reshape(-1)
    for word in words.tolist():
        row, column = word >> 7 & 0x1FF, word & 127
        for lane in range(32):
            if row & ~8 != lane >> 2:
                continue
            difference = as_float(word >> 16) - as_float(base << 7)
            piece = column // 32 * 256 + 8 * (8 * (lane & 3) + column // 8 % 4) + column % 8
            for part in range(2):
                sums[lane, 2 * (row >= 8) + part] += difference * flat[piece + 32 * part]


def emulated_tile(record: np.ndarray, x: np.ndarray, base: int) -> np.ndarray:
    """``(16, 8)``: what a warp makes of one record and eight rows ``(8, 128)`` of x, instruction by instruction."""
    memory = record.view(np.uint32)
    sums = np.zeros((32, 4))
    for quarter in range(4):
        loaded = memory[128 * quarter + 4 * mma_lanes.LANES[:, None] + np.arange(4)]
        codes = memory[512 + 128 * (quarter // 2) + 4 * mma_lanes.LANES[:, None] + 2 * (quarter % 2) + np.arange(2)]
        for k in range(2):
            a = np.zeros((32, 4, 2), np.uint16)
            for register in range(4):
                word = loaded[:, 2 * k + register // 2].copy().view(np.uint8).reshape(32, 4)
                first, second = word[:, 2 * (register % 2)], word[:, 2 * (register % 2) + 1]
                spread = np.stack([first, np.full(32, base), second, np.full(32, base)], 1).astype(np.uint8)
                turned = spread.copy().view(np.uint32)[:, 0].astype(np.uint64)
                turned = turned >> np.uint64(1) | (turned & np.uint64(1)) << np.uint64(31)
                four = codes[:, k].astype(np.uint64) >> np.uint64(8 * (register // 2))
                four = four & np.uint64(0x000F000F) << np.uint64(4 * (register % 2))
                whole = turned + four * np.uint64(128 >> 4 * (register % 2))
                a[:, register] = whole.astype(np.uint32).view(np.uint16).reshape(32, 2)
            columns = 32 * quarter + 8 * mma_lanes.T + 4 * k
            b = np.stack([np.stack([x[mma_lanes.G, columns + 2 * h + e] for e in range(2)], 1) for h in range(2)], 1)
            sums = mma_lanes.mma(as_float(a), b, sums, 16)
    add_escapes(sums, memory[768:], x, base)
    tile = np.zeros((16, 8))
    tile[mma_lanes.result(16)] = sums
    return tile


def test_a_warp_multiplies_a_record_as_the_kernel_text_says() -> None:
    weight = normal_weight((16, 128))
    weight[3, 7], weight[0, 0], weight[11, 126], weight[15, 127], weight[8, 33] = 0.0, 1e30, 1e-30, -1e20, -0.0
    x = np.random.default_rng(0).standard_normal((8, 128))
    stored = FragmentLosslessWeight.from_dense(weight)
    assert stored.escaped >= 5
    tile = emulated_tile(stored.records.numpy().view(np.uint16), x, stored.base)
    np.testing.assert_allclose(tile, weight.double().numpy() @ x.T, rtol=1e-12, atol=1e-12)


def test_it_is_saved_and_is_a_layer_on_a_cpu_too(tmp_path: Path) -> None:
    weight = normal_weight((40, 130))
    FragmentLosslessWeight.from_dense(weight).save(tmp_path / "w.safetensors")
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, FragmentLosslessWeight)
    assert torch.equal(loaded.to_dense(), weight)
    x = torch.randn(2, 130)
    torch.testing.assert_close(CompressedLinear(loaded)(x), x @ weight.float().T, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"bfloat16.*float16"):
        FragmentLosslessWeight.from_dense(torch.ones(4, 4, dtype=torch.float16))
    weight = FragmentLosslessWeight.from_dense(torch.zeros(20, 30).bfloat16().fill_diagonal_(1.0))
    for name, wrong in (("records", torch.float32), ("offsets", torch.int64)):
        arrays = weight.arrays()
        arrays[name] = arrays[name].to(wrong)
        with pytest.raises(ValueError, match=f"{name} must be a contiguous vector"):
            FragmentLosslessWeight.from_arrays(arrays, weight.shape, weight.dtype, weight.meta())
    arrays = weight.arrays()
    arrays["records"] = arrays["records"].clone()
    places = arrays["records"][768 * 2 :: 2]
    places[places.argmax()] = 31  # a column that the matrix does not have
    with pytest.raises(ValueError, match="escapes do not fit"):
        FragmentLosslessWeight.from_arrays(arrays, weight.shape, weight.dtype, weight.meta())
