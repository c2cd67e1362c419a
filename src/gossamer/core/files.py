"""Files that are whole or absent, and that notice a flipped bit.

Every file that Gossamer writes appears under its name only when it is complete. Array files are safetensors files
(any safetensors reader opens them) whose metadata carries a CRC-32 **over the whole file**, header included, so
that a single altered byte anywhere is refused on loading.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_CHECKSUM_KEY = b'"gossamer_crc32":"'
_BLANK = b"--------"
_CHUNK = 1 << 24


@contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path beside ``path``; rename it to ``path`` when the block ends well, else remove it.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; ``path`` is then as it was before.

    >>> import tempfile; folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> (folder / "a.txt").read_text(), len(list(folder.iterdir()))
    ('whole', 1)
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:  # it names a file that nobody has heard of
        raise type(error)(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush_to_disk(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write ``arrays`` and ``metadata`` (strings) as one checksummed safetensors file, atomically.

    Raises:
        OSError: as :func:`atomic_write`.

    >>> import tempfile, torch; path = Path(tempfile.mkdtemp()) / "a.safetensors"
    >>> save_arrays(path, {"x": torch.arange(3)}, {"unit": "s"})
    >>> load_arrays(path)
    ({'x': tensor([0, 1, 2])}, {'unit': 's'})
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    stamped = {**metadata, "gossamer_crc32": _BLANK.decode()}
    with atomic_write(path) as temporary:
        try:
            save_file({name: array.contiguous() for name, array in arrays.items()}, temporary, metadata=stamped)
        except SafetensorError as error:  # how the library says that the disk is full
            raise OSError(f"{path} cannot be written: {error}") from error
        _sort_metadata(temporary)
        place = _checksum_place(temporary)
        checksum = _crc_without_checksum(temporary, place)
        with temporary.open("r+b") as file:
            file.seek(place)
            file.write(b"%08x" % checksum)


def load_arrays(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`save_arrays` wrote.

    Raises:
        ValueError: the file is not one of ours, is cut short, or any byte of it was altered.
        FileNotFoundError: there is no such file.
    """
    from safetensors import safe_open

    verify(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    del metadata["gossamer_crc32"]
    return arrays, metadata


def verify(path: str | os.PathLike[str]) -> None:
    """Check the checksum of a file that :func:`save_arrays` wrote; ``ValueError`` if it does not hold."""
    path = Path(path)
    place = _checksum_place(path)
    with path.open("rb") as file:
        file.seek(place)
        stored = file.read(len(_BLANK))
    if stored != b"%08x" % _crc_without_checksum(path, place):
        raise ValueError(f"{path} is damaged: its checksum does not match its content; write or copy the file again")


def _sort_metadata(path: Path) -> None:
    """Put the metadata in order: the library writes them in random order, and equal content shall be equal bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        file.seek(8)
        file.write(text.ljust(size))


def _checksum_place(path: Path) -> int:
    """Byte offset of the eight hexadecimal digits, found in the header and nowhere else."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(f"{path} is damaged or not a safetensors file: its header does not fit in {size} bytes")
        header = file.read(header_size)
    place = header.find(_CHECKSUM_KEY)
    if place < 0:
        raise ValueError(f"{path} is damaged or was not written by Gossamer: it has no checksum")
    return 8 + place + len(_CHECKSUM_KEY)


def _crc_without_checksum(path: Path, place: int) -> int:
    """CRC-32 of the whole file, with the checksum's own digits read as blanks."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        crc = zlib.crc32(view[:place])
        crc = zlib.crc32(_BLANK, crc)
        for start in range(place + len(_BLANK), len(view), _CHUNK):
            crc = zlib.crc32(view[start : start + _CHUNK], crc)
    return crc


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
