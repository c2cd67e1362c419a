"""Bitmap weights in fragment order: the layout, and the decoder's lanes by an emulator."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mma_lanes
from gossamer.weights import CompressedLinear, FragmentBitmapWeight, WeightFormat
from gossamer.weights import _fragments_gpu as gpu

TYPES = [torch.float16, torch.bfloat16]


def sparse_weight(shape: tuple[int, int], density: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return (weight * (torch.rand(shape, generator=generator) < density)).to(dtype)


def bits(weight: Tensor) -> Tensor:
    return weight.cpu().view(torch.int16)


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 7, 8, 15, 16, 17, 33, 100]),
    columns=st.sampled_from([1, 2, 63, 64, 127, 128, 129, 300]),
    density=st.sampled_from([0.0, 0.01, 0.5, 0.9, 1.0]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
)
def test_every_shape_comes_back_bit_by_bit(
    rows: int, columns: int, density: float, dtype: torch.dtype, seed: int
) -> None:
    weight = sparse_weight((rows, columns), density, dtype, seed)
    stored = FragmentBitmapWeight.from_dense(weight)
    assert torch.equal(bits(stored.to_dense()), bits(weight + 0.0))
    assert stored.density == pytest.approx(float((weight != 0).double().mean()))


def test_special_values_are_kept_and_negative_zero_only_on_request() -> None:
    weight = torch.tensor([[float("nan"), float("inf"), -0.0, 0.0, -float("inf"), 1e-7]], dtype=torch.float16)
    dropped = FragmentBitmapWeight.from_dense(weight).to_dense()
    assert bits(dropped).tolist() == [[*bits(weight)[0, :2].tolist(), 0, *bits(weight)[0, 3:].tolist()]]
    assert torch.equal(
        bits(FragmentBitmapWeight.from_dense(weight, preserve_signed_zero=True).to_dense()), bits(weight)
    )


def slow_records(weight: np.ndarray) -> Iterator[list[int]]:
    """The 16-bit words of every record, written from the layout text entry by entry."""
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // 16) * 16, -(-columns // 128) * 128), np.uint16)
    padded[:rows, :columns] = weight
    for top, left in product(range(0, len(padded), 16), range(0, padded.shape[1], 128)):
        masks, starts, values = {}, {}, []
        for step, group in product(range(16), range(4)):
            quarter, k, h = step // 4, step // 2 % 2, step % 2
            mask = 0
            starts[group, step] = 384 + 2 * len(values)
            for bit in range(32):
                u, lower, t, e = bit // 16, bit // 8 % 2, bit // 2 % 4, bit % 2
                row, column = 2 * group + u + 8 * lower, 32 * quarter + 8 * t + 4 * k + 2 * h + e
                value = int(padded[top + row, left + column])
                if value & 0x7FFF:
                    mask |= 1 << bit
                    values.append(value)
            masks[group, step] = mask
        order = list(product(range(4), range(16)))
        words = [half for place in order for half in (masks[place] & 0xFFFF, masks[place] >> 16)]
        words += [starts[place] for place in order] + values
        yield words + [0] * (-len(words) % 8)


@pytest.mark.parametrize("shape", [(16, 128), (17, 65), (40, 260)])
def test_records_follow_the_layout_text(shape: tuple[int, int]) -> None:
    weight = sparse_weight(shape, 0.4, torch.float16)
    stored = FragmentBitmapWeight.from_dense(weight)
    records = list(slow_records(bits(weight).numpy().view(np.uint16)))
    assert stored.records.numpy().view(np.uint16).tolist() == [word for record in records for word in record]
    assert stored.offsets.diff().tolist() == [len(record) // 8 for record in records]
    assert stored.longest == max(len(record) // 8 for record in records)


def emulated_tile(record: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``(16, 8)``: what a warp makes of one record and eight rows ``(8, 128)`` of x, instruction by instruction."""
    group, shift = mma_lanes.LANES // 8, 16 * (mma_lanes.G % 2) + 2 * mma_lanes.T
    below = (1 << shift) - 1, (1 << (shift + 8)) - 1
    heads = record.view(np.uint32)
    masks, starts = heads[:64].reshape(4, 16)[group], record[128:192].reshape(4, 16)[group].astype(int)
    patterns = np.frombuffer(bytes.fromhex("2222102222101054"), np.uint8)
    values = np.append(record, [0x7E00, 0x7E00]).astype(np.uint16)  # what lies behind the last value is never used
    sums = np.zeros((32, 4))
    for quarter, k in product(range(4), range(2)):
        a = np.zeros((32, 4, 2), np.uint16)
        for h, lower in product(range(2), range(2)):
            step = 4 * quarter + 2 * k + h
            mask = masks[:, step].astype(np.int64)
            place = starts[:, step] // 2 + np.bitwise_count(mask & below[lower])
            loaded = np.stack([values[place], 0 * place, values[place + 1], 0 * place], 1).astype(np.uint16)
            pattern = mask >> (shift + 8 * lower) & 3
            selector = patterns[2 * pattern].astype(int) | patterns[2 * pattern + 1].astype(int) << 8
            nibbles = selector[:, None] >> 4 * np.arange(4) & 15
            a[:, 2 * h + lower] = np.take_along_axis(loaded.view(np.uint8), nibbles, 1).view(np.uint16)
        columns = 32 * quarter + 8 * mma_lanes.T + 4 * k
        b = np.stack([np.stack([x[mma_lanes.G, columns + 2 * h + e] for e in range(2)], 1) for h in range(2)], 1)
        sums = mma_lanes.mma(a.view(np.float16).astype(float), b, sums, 16)
    tile = np.zeros((16, 8))
    tile[mma_lanes.result(16)] = sums
    return tile


@pytest.mark.parametrize("density", [0.0, 0.2, 0.5, 1.0])
def test_a_warp_multiplies_a_record_as_the_kernel_text_says(density: float) -> None:
    weight = sparse_weight((16, 128), density, torch.float16)
    x = np.random.default_rng(0).standard_normal((8, 128))
    record = FragmentBitmapWeight.from_dense(weight).records.numpy().view(np.uint16)
    np.testing.assert_allclose(emulated_tile(record, x), weight.double().numpy() @ x.T, rtol=1e-12, atol=1e-12)


def test_it_is_saved_and_is_a_layer_on_a_cpu_too(tmp_path: Path) -> None:
    weight = sparse_weight((40, 130), 0.5, torch.bfloat16)
    FragmentBitmapWeight.from_dense(weight).save(tmp_path / "w.safetensors")
    loaded = WeightFormat.load(tmp_path / "w.safetensors")
    assert isinstance(loaded, FragmentBitmapWeight)
    assert torch.equal(loaded.to_dense(), weight)
    x = torch.randn(2, 3, 130)
    layer = CompressedLinear(loaded, torch.ones(40))
    torch.testing.assert_close(layer(x), x @ weight.float().T + 1, rtol=1e-4, atol=1e-4)
    out = np.empty(40, np.float32)
    loaded.bind()(x[0, 0].numpy(), out)
    np.testing.assert_allclose(out, (weight.float() @ x[0, 0]).numpy(), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"float16, bfloat16.*float32"):
        FragmentBitmapWeight.from_dense(torch.ones(4, 4))
    with pytest.raises(ValueError, match="matrix"):
        FragmentBitmapWeight.from_dense(torch.ones(4, dtype=torch.float16))
    with pytest.raises(TypeError, match="layout"):
        FragmentBitmapWeight.from_dense(torch.ones(4, 4, dtype=torch.float16), layout="tca")
    weight = FragmentBitmapWeight.from_dense(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="4 features"):
        weight.linear(torch.ones(5))
    arrays = weight.arrays()
    arrays["offsets"] = arrays["offsets"] + 1
    with pytest.raises(ValueError, match="do not describe"):
        FragmentBitmapWeight.from_arrays(arrays, (4, 4), torch.float16, weight.meta())
    for place in (0, 130):  # of a mask word and of a start
        arrays = {**weight.arrays(), "records": weight.records.clone()}
        arrays["records"][place] ^= 4
        with pytest.raises(ValueError, match="contradict"):
            FragmentBitmapWeight.from_arrays(arrays, (4, 4), torch.float16, weight.meta())


def test_every_candidate_fits_and_covers_all_columns() -> None:
    weight = FragmentBitmapWeight.from_dense(sparse_weight((256, 1500), 0.5, torch.float16))
    for n in (1, 8, 9, 32):
        plans = gpu.candidates(weight, n)
        assert plans
        for plan in plans:
            assert plan.shared_bytes(weight, n) <= 227 * 1024
            split = -(-weight.tiles // plan.splits)
            assert split * (plan.splits - 1) < weight.tiles <= split * plan.splits


def test_a_place_for_the_dense_matrix_has_to_fit() -> None:
    weight = FragmentBitmapWeight.from_dense(torch.eye(64, dtype=torch.bfloat16))
    place = torch.zeros(64, 64, dtype=torch.bfloat16)
    assert weight.to_dense(place) is place and torch.equal(place, torch.eye(64, dtype=torch.bfloat16))
    for wrong in (torch.zeros(64, 64), torch.zeros(64, 63).bfloat16(), torch.zeros(64, 128).bfloat16()[:, ::2]):
        with pytest.raises(ValueError, match=r"out must be a contiguous torch\.bfloat16 tensor of shape \(64, 64\)"):
            weight.to_dense(wrong)
