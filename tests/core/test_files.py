"""Files are whole or absent, and a flipped bit is noticed."""

import errno
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.files import atomic_write, load_arrays, save_arrays, verify, write_json

ARRAYS = {"values": torch.arange(40, dtype=torch.int16), "empty": torch.empty(0, dtype=torch.int64)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    save_arrays(path, ARRAYS, {"unit": "s"})
    return path


def test_arrays_and_metadata_come_back(written: Path) -> None:
    arrays, metadata = load_arrays(written)
    assert metadata == {"unit": "s"}
    assert arrays.keys() == ARRAYS.keys()
    assert all(torch.equal(arrays[name], ARRAYS[name]) for name in ARRAYS)


def test_any_safetensors_reader_opens_the_file(written: Path) -> None:
    from safetensors.torch import load_file

    assert torch.equal(load_file(written)["values"], ARRAYS["values"])


PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(metadata=st.dictionaries(PLAIN_TEXT.filter(lambda key: key != "gossamer_crc32"), PLAIN_TEXT, min_size=2))
def test_equal_content_is_equal_bytes_and_any_text_comes_back(tmp_path_factory, metadata: dict[str, str]) -> None:
    folder = tmp_path_factory.mktemp("equal")
    save_arrays(folder / "a", ARRAYS, metadata)
    save_arrays(folder / "b", ARRAYS, dict(reversed(metadata.items())))
    assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
    arrays, read = load_arrays(folder / "a")
    assert read == metadata
    assert torch.equal(arrays["values"], ARRAYS["values"])


@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
def test_flipping_any_one_byte_is_noticed(written: Path, place: int, change: int) -> None:
    content = bytearray(written.read_bytes())
    content[place % len(content)] ^= change
    damaged = written.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_arrays(damaged)


@given(length=st.integers(0, 10**6))
def test_a_file_cut_short_is_noticed(written: Path, length: int) -> None:
    content = written.read_bytes()
    damaged = written.with_name("short.safetensors")
    damaged.write_bytes(content[: length % len(content)])
    with pytest.raises(ValueError, match="damaged"):
        verify(damaged)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    before = path.read_bytes()

    def fill_the_disk() -> None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        fill_the_disk()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_told_by_the_name_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "a.json"
    with pytest.raises(FileNotFoundError) as error:
        write_json(path, {})
    assert error.value.filename == str(path)
