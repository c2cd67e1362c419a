"""The stored arrays of both lossless layouts, against slow encoders written from their descriptions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.weights._lossless import LosslessWeight

SHAPES = [(1, 1), (1, 63), (1, 64), (65, 65), (63, 130), (64, 128), (3, 4095), (129, 257)]


def gaussian(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)


def bits_of(weight):
    return weight.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits):
    return torch.from_numpy(np.ascontiguousarray(bits, np.uint16).view(np.int16)).view(torch.bfloat16)


def best_start(exponents, width, first):
    """The start of the window that holds most exponents, by trying all."""
    held = [
        (sum(1 for e in exponents if start <= e < start + width), -start) for start in range(first, 256 - width + 1)
    ]
    return -max(held)[1]


def nib12_by_the_text(bits):
    rows, columns = bits.shape
    base = best_start([e for e in ((bits >> 7) & 255).ravel().tolist() if e], 14, 1) - 1
    blocks = -(-columns // 64)
    plane, codes = np.zeros((rows, blocks * 64), np.uint8), np.zeros((rows, blocks * 32), np.uint8)
    starts, positions, values = [0], [], []
    for row in range(rows):
        for column in range(columns):
            pattern = int(bits[row, column])
            sign, exponent, mantissa = pattern >> 15, pattern >> 7 & 255, pattern & 127
            if exponent == 0:
                code = 0
            elif base + 1 <= exponent <= base + 14:
                code = exponent - base
            else:
                code, mantissa = 15, 0
                positions.append(column)
                values.append(pattern)
            plane[row, column] = sign << 7 | mantissa
            block, place = divmod(column, 64)
            codes[row, block * 32 + place % 32] |= code << (4 if place >= 32 else 0)
        starts.append(len(positions))
    arrays = {
        "plane": plane.ravel(),
        "codes": codes.ravel(),
        "starts": np.array(starts, np.int32),
        "columns": np.array(positions, np.int32),
        "values": np.array(values, np.uint16),
    }
    return arrays, {"layout": "nib12", "base": base}


def places_of_a_tile():
    """Row and column of all weights of a 64x64 tile in the order of the bits."""
    for warp in range(4):
        for middle in range(4):
            for across in range(2):
                for down in range(2):
                    for row in range(8):
                        for column in range(8):
                            yield 16 * warp + 8 * down + row, 16 * middle + 8 * across + column


def tbe_by_the_text(bits):
    rows, columns = bits.shape
    base = best_start(((bits >> 7) & 255).ravel().tolist(), 7, 0) - 1
    down, across = -(-rows // 64), -(-columns // 64)
    planes = np.zeros((3, down * across * 64), np.uint64)
    coded, full, offsets, warps = [], [], [], []
    for tile in range(down * across):
        tile_starts = len(coded), len(full)
        offsets.extend(tile_starts)
        for number, (row, column) in enumerate(places_of_a_tile()):
            if number % 1024 == 0:
                warps.extend((len(coded) - tile_starts[0], len(full) - tile_starts[1]))
            row, column = row + tile // across * 64, column + tile % across * 64
            inside = row < rows and column < columns
            pattern = int(bits[row, column]) if inside else (base + 1) << 7
            code = (pattern >> 7 & 255) - base
            if 1 <= code <= 7:
                coded.append(pattern >> 15 << 7 | pattern & 127)
                for plane in range(3):
                    planes[plane, tile * 64 + number // 64] |= np.uint64((code >> plane & 1) << number % 64)
            else:
                full.append(pattern)
        coded.extend([0] * (-len(coded) % 16))
        full.extend([0] * (-len(full) % 8))
    offsets.extend((len(coded), len(full)))
    longest = np.diff(np.array(offsets).reshape(-1, 2), axis=0).max(axis=0)
    arrays = {
        "plane1": planes[0],
        "plane2": planes[1],
        "plane3": planes[2],
        "coded": np.array(coded, np.uint8),
        "full": np.array(full, np.uint16),
        "offsets": np.array(offsets, np.int32),
        "warps": np.array(warps, np.int32),
    }
    meta = {"layout": "tbe", "base": base, "max_coded": int(longest[0]), "max_full": int(longest[1])}
    return arrays, meta


ORACLES = {"nib12": nib12_by_the_text, "tbe": tbe_by_the_text}


def assert_arrays_match_the_text(weight, layout):
    compressed = LosslessWeight.from_dense(weight, layout)
    arrays, meta = ORACLES[layout](bits_of(weight))
    size = sum(array.nbytes for array in arrays.values())
    if size >= 2 * weight.numel():
        assert compressed.layout == "raw"
        return
    assert compressed.meta() == meta
    assert set(compressed.arrays()) == set(arrays)
    for name, array in compressed.arrays().items():
        assert array.ndim == 1
        assert not array.is_floating_point()
        assert array.numpy().tobytes() == arrays[name].tobytes(), name
    assert compressed.nbytes == size


@pytest.mark.parametrize("layout", ORACLES)
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_match_the_layout_text(shape, layout):
    assert_arrays_match_the_text(gaussian(shape), layout)


@pytest.mark.parametrize("layout", ORACLES)
@pytest.mark.parametrize("exponent", [0, 1, 3, 250, 255])
def test_windows_at_the_ends_of_the_range_do_not_wrap(exponent, layout):
    """Exponents 0 and 255 need windows whose base is -1 or whose last code is exponent 255."""
    bits = np.random.default_rng(exponent).integers(0, 65536, (64, 128)).astype(np.uint16)
    bits = (bits & 0x807F) | np.uint16(exponent << 7)
    assert_arrays_match_the_text(from_bits(bits), layout)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 140),
    seed=st.integers(0, 2**32 - 1),
    exponents=st.lists(st.integers(0, 255), min_size=1, max_size=24),
    layout=st.sampled_from(sorted(ORACLES)),
)
def test_arrays_match_the_layout_text_for_any_exponents(rows, columns, seed, exponents, layout):
    random = np.random.default_rng(seed)
    exponent = random.choice(exponents, (rows, columns)).astype(np.uint16)
    bits = random.integers(0, 65536, (rows, columns)).astype(np.uint16) & 0x807F | exponent << 7
    assert_arrays_match_the_text(from_bits(bits), layout)
