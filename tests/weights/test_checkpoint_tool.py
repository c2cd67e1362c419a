"""Packed checkpoints: every byte comes back, memory stays bounded, killed runs resume, damage is noticed."""

import json
import os
import signal
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from gossamer import cli
from gossamer.weights import PackedCheckpoint, pack_checkpoint
from gossamer.weights._piece import Piece, decode, encode, parts, pieces
from gossamer.weights._safetensors_files import SafetensorsFile, StoredTensor, checkpoint_files

RUNNER = CliRunner()
SMALL = 1 << 14


def bf16(shape, seed=0, density=1.0):
    generator = torch.Generator().manual_seed(seed)
    weight = (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    return weight.masked_fill(torch.rand(shape, generator=generator) >= density, 0)


def some_tensors():
    wide = bf16((130, 192))
    return {
        "wide": wide,
        "tied": wide.clone(),
        "pruned": bf16((256, 128), 1, 0.5),
        "odd": bf16((77, 101), 2),
        "filter": bf16((64, 32, 3, 3), 3),
        "bits": torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16).view(256, 256),
        "bias": bf16((5,)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "half": torch.randn(9, 9).half(),
        "long": torch.arange(5000),
        "double": torch.randn(3, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "eight": torch.randn(64).to(torch.float8_e4m3fn),
    }


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(some_tensors(), path, metadata={"format": "pt", "tied": "é"})
    return path


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    tensors = list(some_tensors().items())
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, part in zip(names, (tensors[:1] + tensors[3:8], tensors[1:3] + tensors[8:]), strict=True):
        save_file(dict(part), folder / name)
    where = {tensor: names[tensor not in dict(tensors[:1] + tensors[3:8])] for tensor, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}, indent=3))
    return folder


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece_bytes", [4096, SMALL, 1 << 25])
def test_every_byte_comes_back(checkpoint, tmp_path, threads, piece_bytes):
    pack_checkpoint(checkpoint, tmp_path / "packed", threads, piece_bytes=piece_bytes)
    with PackedCheckpoint(tmp_path / "packed") as packed:
        packed.verify([SafetensorsFile.open(checkpoint)], threads)
        packed.unpack(tmp_path / "back.safetensors", threads)
        assert packed.nbytes == checkpoint.stat().st_size
    assert (tmp_path / "back.safetensors").read_bytes() == checkpoint.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.safetensors", "model.safetensors", "packed"]


def test_shards_and_their_index_come_back_into_a_folder(sharded, tmp_path):
    for number, source in enumerate((sharded, sharded / "model.safetensors.index.json")):
        packed_path = pack_checkpoint(source, tmp_path / f"packed{number}", piece_bytes=SMALL)
        with PackedCheckpoint(packed_path) as packed:
            packed.unpack(tmp_path / f"back{number}")
            packed.verify(checkpoint_files(sharded)[0])
            assert {tensor.name: tensor.coding for tensor in packed.tensors()}["tied"] == "same as wide"
        for original in sharded.iterdir():
            assert (tmp_path / f"back{number}" / original.name).read_bytes() == original.read_bytes()


def test_codings_are_the_smallest_ones(checkpoint, tmp_path):
    with PackedCheckpoint(pack_checkpoint(checkpoint, tmp_path / "packed")) as packed:
        tensors = {tensor.name: tensor for tensor in packed.tensors()}
    assert {name: tensors[name].coding for name in ("wide", "bits", "bias", "half", "long", "empty")} == {
        "wide": "same as tied", "bits": "raw", "bias": "raw", "half": "raw", "long": "raw", "empty": "empty",
    }  # fmt: skip
    assert tensors["tied"].coding in ("nib12", "tbe") and tensors["tied"].stored < 0.8 * tensors["tied"].nbytes
    assert tensors["pruned"].stored < 0.5 * tensors["pruned"].nbytes
    assert tensors["wide"].stored == 0
    assert tensors["filter"].coding == "nib12+raw"


def test_single_tensors_can_be_read(checkpoint, tmp_path):
    with PackedCheckpoint(pack_checkpoint(checkpoint, tmp_path / "packed", piece_bytes=4096)) as packed:
        for name, tensor in some_tensors().items():
            read = packed.read(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            if name in ("wide", "tied", "pruned", "odd", "long", "empty"):
                assert torch.equal(read, tensor)
        with pytest.raises(ValueError, match="no tensor 'other'"):
            packed.read("other")


@settings(max_examples=40)
@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 200), st.sampled_from([64, 128, 192])),
        st.tuples(st.integers(4096, 30000)),
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)),
    ),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    most=st.sampled_from([4096, SMALL, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_pieces_cover_a_tensor_and_decode_to_its_bytes(shape, density, most, seed):
    data = bf16(shape, seed, density).view(torch.int16).numpy().reshape(-1).view(np.uint8)
    place = 0
    for piece in pieces(StoredTensor("t", "BF16", shape, 0, data.size), most):
        assert piece.start == place < piece.end
        place = piece.end
        header, arrays = encode(data[piece.start : piece.end].copy(), piece)
        payload = np.concatenate(parts(arrays))
        back = decode(json.loads(json.dumps(header)), payload, piece.end - piece.start)
        assert np.array_equal(back, data[piece.start : piece.end])
        assert payload.nbytes <= piece.end - piece.start + 512
    assert place == data.size


def test_random_bits_are_kept_raw_and_need_no_more_room():
    data = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8)
    header, arrays = encode(data, Piece(0, data.size, 64, 1024))
    assert header == {"coding": "raw"} and arrays[0] is data


def test_memory_stays_bounded(tmp_path):
    source = tmp_path / "large.safetensors"
    save_file({f"w{i}": bf16((2048, 1024), i) for i in range(16)}, source)
    pack_checkpoint(source, tmp_path / "warm", 2, piece_bytes=1 << 20)
    tracemalloc.start()
    pack_checkpoint(source, tmp_path / "packed", 2, piece_bytes=1 << 20)
    with PackedCheckpoint(tmp_path / "packed") as packed:
        packed.unpack(tmp_path / "back", 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert source.stat().st_size > 64e6 and peak < 24e6


KILLED = """
import os, signal, sys
from gossamer.weights import pack_checkpoint
def progress(what, done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
pack_checkpoint(sys.argv[1], sys.argv[2], 2, progress, piece_bytes=4096)
"""


def test_a_killed_run_goes_on_where_it_was(checkpoint, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, checkpoint, tmp_path / "packed"], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "packed").exists() and (tmp_path / "packed.partial").exists()
    steps = []
    pack_checkpoint(checkpoint, tmp_path / "packed", 2, lambda *step: steps.append(step), piece_bytes=4096)
    assert steps[0][1] > steps[0][2] / 2 and steps[-1][1] == steps[-1][2]
    pack_checkpoint(checkpoint, tmp_path / "undisturbed", 1, piece_bytes=4096)
    assert (tmp_path / "packed").read_bytes() == (tmp_path / "undisturbed").read_bytes()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), garbage=st.binary(max_size=40))
def test_a_run_that_broke_off_anywhere_gives_the_same_file(checkpoint, tmp_path, share, garbage):
    whole = tmp_path / "whole"
    if not whole.exists():
        pack_checkpoint(checkpoint, whole, piece_bytes=SMALL)
    content = whole.read_bytes()
    cut = int(share * len(content))
    (tmp_path / "again.partial").write_bytes(content[:cut] + (garbage if cut >= 16 else b""))
    pack_checkpoint(checkpoint, tmp_path / "again", piece_bytes=SMALL)
    assert (tmp_path / "again").read_bytes() == content
    (tmp_path / "again").unlink()


def test_a_partial_file_of_something_else_is_not_overwritten(checkpoint, tmp_path):
    pack_checkpoint(checkpoint, tmp_path / "packed", piece_bytes=SMALL)
    os.rename(tmp_path / "packed", tmp_path / "packed.partial")
    with pytest.raises(ValueError, match="another checkpoint or piece size; use --fresh"):
        pack_checkpoint(checkpoint, tmp_path / "packed", piece_bytes=2 * SMALL)
    pack_checkpoint(checkpoint, tmp_path / "packed", piece_bytes=2 * SMALL, fresh=True)
    (tmp_path / "other.partial").write_text("a text that somebody needs")
    with pytest.raises(ValueError, match="not a packed checkpoint"):
        pack_checkpoint(checkpoint, tmp_path / "other")
    with pytest.raises(FileExistsError, match="exists already"):
        pack_checkpoint(checkpoint, tmp_path / "packed")


def test_a_changed_source_is_not_resumed(checkpoint, tmp_path):
    pack_checkpoint(checkpoint, tmp_path / "packed")
    os.rename(tmp_path / "packed", tmp_path / "packed.partial")
    save_file({"x": torch.ones(3)}, checkpoint)
    with pytest.raises(ValueError, match="another checkpoint"):
        pack_checkpoint(checkpoint, tmp_path / "packed")


def check(path):
    with PackedCheckpoint(path) as packed:
        packed.verify(threads=1)


def test_any_altered_byte_and_any_cut_is_noticed(tmp_path):
    source = tmp_path / "m.safetensors"
    save_file({"w": bf16((64, 64)), "b": bf16((3,)), "c": bf16((3,))}, source)
    content = bytearray(pack_checkpoint(source, tmp_path / "packed").read_bytes())
    check(tmp_path / "packed")
    damaged = tmp_path / "damaged"
    random = np.random.default_rng(0)
    ends = {*range(200), *range(len(content) - 400, len(content))}
    for place in sorted(ends | set(random.choice(len(content), 300).tolist())):
        altered = bytearray(content)
        altered[place] ^= 1 << random.integers(8)
        damaged.write_bytes(altered)
        with pytest.raises(ValueError, match="damaged|upgrade|not a packed checkpoint"):
            check(damaged)
    for length in [0, 5, 16, 100, len(content) // 2, len(content) - 1]:
        damaged.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged|not a packed checkpoint"):
            check(damaged)


def test_a_difference_from_the_source_is_named(checkpoint, tmp_path):
    packed_path = pack_checkpoint(checkpoint, tmp_path / "packed")
    content = bytearray(checkpoint.read_bytes())
    content[-1] ^= 1
    checkpoint.write_bytes(content)
    with PackedCheckpoint(packed_path) as packed, pytest.raises(ValueError, match="tensor '.*' of .* differs"):
        packed.verify([SafetensorsFile.open(checkpoint)])
    save_file({"x": torch.ones(1)}, checkpoint)
    with PackedCheckpoint(packed_path) as packed, pytest.raises(ValueError, match="another header"):
        packed.verify([SafetensorsFile.open(checkpoint)])


def header_file(path, header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "header cannot be read"),
        ({"w": {"dtype": "U8"}}, b"", "header cannot be read"),
        ([1], b"", "header cannot be read"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, b"abc", "does not begin where"),
        ({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"abc", "its header describes"),
        ({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]}}, b"ab", "its shape needs"),
    ],
)
def test_damaged_sources_are_refused(tmp_path, header, data, message):
    with pytest.raises(ValueError, match=message):
        pack_checkpoint(header_file(tmp_path / "m.safetensors", header, data), tmp_path / "packed")
    assert not list(tmp_path.glob("packed*"))


def test_what_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint_files(tmp_path / "short.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no safetensors files"):
        checkpoint_files(empty)
    index = empty / "model.safetensors.index.json"
    for text, message in [("{}", "no weight_map"), ('{"weight_map": {"a": "b.safetensors"}}', "is missing"),
                          ('{"weight_map": {"a": "../b"}}', "no file beside it")]:  # fmt: skip
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            checkpoint_files(empty)
    with pytest.raises(FileNotFoundError):
        pack_checkpoint(tmp_path / "absent.safetensors", tmp_path / "packed")


def test_verbs_pack_verify_inspect_and_unpack(checkpoint, tmp_path):
    def run(*arguments):
        result = RUNNER.invoke(cli.app, ["weights", *map(str, arguments)])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    packed = tmp_path / "packed"
    about = json.loads(run("pack", checkpoint, packed, "--json"))
    assert about["packed_bytes"] == packed.stat().st_size and about["bytes"] == checkpoint.stat().st_size
    assert json.loads(run("verify", packed, "--against", checkpoint, "--json"))["ok"]
    listed = json.loads(run("inspect", packed, "--json"))["tensors"]
    assert {tensor["name"] for tensor in listed} == set(some_tensors())
    assert "same as" in run("inspect", packed)
    assert json.loads(run("unpack", packed, tmp_path / "back", "--json"))["files"] == ["model.safetensors"]
    assert (tmp_path / "back").read_bytes() == checkpoint.read_bytes()
    assert "whole" in run("verify", packed)


def test_damage_is_told_in_one_line(tmp_path):
    (tmp_path / "no.pack").write_bytes(bytes(100))
    result = RUNNER.invoke(cli.app, ["weights", "verify", str(tmp_path / "no.pack")])
    assert result.exit_code == 2
    assert result.stderr.strip().endswith("no.pack is not a packed checkpoint")
