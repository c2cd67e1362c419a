"""Bitmap weights in the ``sparse-bitmask`` format of compressed-tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.weights import BitmapWeight, from_bitmask, load_bitmask, save_bitmask, to_bitmask

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sparse(shape, density=0.5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator).to(dtype)
    return dense.masked_fill(torch.rand(shape, generator=generator) >= density, 0)


def by_the_text(dense):
    """The four tensors as the format describes them."""
    marks = (dense != 0).numpy()
    counts = marks.sum(1)
    return {
        "shape": torch.tensor(dense.shape),
        "compressed": dense[dense != 0],
        "bitmask": torch.from_numpy(np.packbits(marks, axis=1, bitorder="little")),
        "row_offsets": torch.from_numpy(counts.cumsum() - counts),
    }


@settings(max_examples=30)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 150),
    density=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["rows", "tca"]),
)
def test_tensors_are_those_of_the_format_and_come_back(rows, columns, density, dtype, layout):
    dense = sparse((rows, columns), density, dtype)
    parts = to_bitmask(BitmapWeight.from_dense(dense, layout))
    expected = by_the_text(dense)
    assert set(parts) == set(expected)
    for name, tensor in parts.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    assert torch.equal(from_bitmask(expected).to_dense(), dense)


def test_a_file_comes_back(tmp_path):
    dense = sparse((20, 70), dtype=torch.bfloat16)
    save_bitmask(tmp_path / "m.safetensors", {"a.weight": BitmapWeight.from_dense(dense), "a.bias": torch.ones(20)})
    loaded = load_bitmask(tmp_path / "m.safetensors")
    assert set(loaded) == {"a.weight", "a.bias"}
    assert isinstance(loaded["a.weight"], BitmapWeight) and torch.equal(loaded["a.weight"].to_dense(), dense)
    assert torch.equal(loaded["a.bias"], torch.ones(20))


def test_the_package_reads_ours_and_we_read_its():
    package = pytest.importorskip(
        "compressed_tensors.compressors.sparse_compressors.sparse_bitmask", reason="needs compressed-tensors up to 0.10"
    )
    dense = sparse((33, 77), dtype=torch.float16)
    parts = to_bitmask(BitmapWeight.from_dense(dense))
    assert torch.equal(package.BitmaskTensor(**{**parts, "shape": parts["shape"].tolist()}).decompress(), dense)
    theirs = package.BitmaskTensor.from_dense(dense).dict("w")
    ours = {name.removeprefix("w."): tensor for name, tensor in theirs.items()}
    assert torch.equal(from_bitmask(ours).to_dense(), dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("bitmask"), "bitmask is missing"),
        (lambda p: p.update(shape=torch.tensor([3])), "two numbers"),
        (lambda p: p.update(compressed=p["compressed"].long()), "compressed one of"),
        (lambda p: p.update(bitmask=p["bitmask"][:, :1]), "bitmask must be uint8"),
        (lambda p: p["bitmask"].fill_(255), "inconsistent"),
        (lambda p: p.update(row_offsets=p["row_offsets"] + 1), "row_offset"),
        (lambda p: p.update(compressed=p["compressed"][:-1]), "inconsistent"),
    ],
)
def test_contradicting_tensors_are_refused(change, message):
    parts = to_bitmask(BitmapWeight.from_dense(sparse((10, 20))))
    change(parts)
    with pytest.raises(ValueError, match=message):
        from_bitmask(parts)
