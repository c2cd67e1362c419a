"""Reads the headers of safetensors checkpoints, one file or many shards, without loading any tensor.

A safetensors file is eight bytes of header length, a JSON header, and the tensors' bytes without gaps. A sharded
checkpoint is a folder of such files and an index, ``*.safetensors.index.json``, that says which tensor is where.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

INDEX_ENDING = ".safetensors.index.json"
_MOST_HEADER = 100_000_000
"""The safetensors library refuses longer headers."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a safetensors file: its name, dtype as the header spells it, shape, and bytes ``start:end``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


@dataclass(frozen=True)
class SafetensorsFile:
    """The header of a safetensors file, as bytes and parsed; ``tensors`` in the order of their bytes.

    ``prefix`` is everything before the tensors' bytes, the header's length included.
    """

    path: Path
    prefix: bytes
    tensors: tuple[StoredTensor, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SafetensorsFile:
        """Read and check the header of ``path``.

        Raises:
            ValueError: the header cannot be read, or the tensors do not fill the file without gaps.
            FileNotFoundError: there is no such file.
        """
        path = Path(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise ValueError(
                    f"{path} is damaged or not a safetensors file: its header does not fit in {size} bytes"
                )
            header = file.read(length)
        prefix = length.to_bytes(8, "little") + header
        return cls(path, prefix, parse_header(prefix, size, os.fspath(path)))

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.prefix) + (self.tensors[-1].end - self.tensors[0].start if self.tensors else 0)

    def read(self, start: int, count: int) -> np.ndarray:
        """``count`` bytes of tensors from ``start`` on, as uint8 in memory of their own."""
        data = np.fromfile(self.path, np.uint8, count, offset=len(self.prefix) + start)
        if data.size != count:
            raise ValueError(f"{self.path} became shorter while it was read")
        return data


def parse_header(prefix: bytes, size: int, name: str) -> tuple[StoredTensor, ...]:
    """The tensors that the beginning of a safetensors file of ``size`` bytes lists, in the order of their bytes."""
    try:
        header = json.loads(prefix[8:])
        tensors = [
            StoredTensor(key, str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for key, entry in header.items()
            if key != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name} is damaged or not a safetensors file: its header cannot be read ({error})") from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    place = 0
    for tensor in tensors:
        if tensor.start != place or tensor.end < tensor.start:
            raise ValueError(f"{name} is damaged: tensor {tensor.name!r} does not begin where the one before it ends")
        if tensor.dtype == "BF16" and tensor.nbytes != 2 * math.prod(tensor.shape):
            raise ValueError(
                f"{name} is damaged: tensor {tensor.name!r} has {tensor.nbytes} bytes, its shape needs others"
            )
        place = tensor.end
    if len(prefix) + place != size:
        raise ValueError(f"{name} is damaged: it has {size} bytes, its header describes {len(prefix) + place}")
    return tuple(tensors)


def checkpoint_files(source: str | os.PathLike[str]) -> tuple[list[SafetensorsFile], Path | None]:
    """The safetensors files of a checkpoint and its index, if it has one.

    source: a ``.safetensors`` file, an index file, or a folder with an index or with safetensors files.

    Raises:
        ValueError: the folder holds none, or the index names a file that is not there.
    """
    source = Path(source)
    index = source if source.name.endswith(INDEX_ENDING) else None
    if source.is_dir():
        indices = sorted(source.glob(f"*{INDEX_ENDING}"))
        if len(indices) > 1:
            raise ValueError(f"{source} holds several checkpoints: give one of {', '.join(map(str, indices))}")
        index = indices[0] if indices else None
        if index is None:
            paths = sorted(source.glob("*.safetensors"))
            if not paths:
                raise ValueError(f"{source} holds no safetensors files")
            return [SafetensorsFile.open(path) for path in paths], None
    if index is None:
        return [SafetensorsFile.open(source)], None
    return [SafetensorsFile.open(path) for path in _shards(index)], index


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no index of a sharded checkpoint: it has no weight_map of file names") from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is no file beside it")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name}, which is missing; fetch the checkpoint again in full")
    return [index.parent / name for name in names]
