"""Reads packed checkpoints: what is in them, single tensors, and the original files, byte by byte."""

from __future__ import annotations

import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.core.files import atomic_write
from gossamer.weights._in_order import in_order
from gossamer.weights._pack import KIND, Progress
from gossamer.weights._piece import decode
from gossamer.weights._record_file import Record, RecordFile
from gossamer.weights._safetensors_files import SafetensorsFile, StoredTensor, parse_header

_TORCH_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True)
class PackedTensor:
    """One tensor of a packed checkpoint. ``stored``: bytes it takes there; ``coding``: how, like "tbe" or "raw"."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int
    coding: str


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    prefix: bytes
    tensors: tuple[StoredTensor, ...]


class PackedCheckpoint:
    """A packed checkpoint that is open for reading; use it as a context manager.

    Raises:
        ValueError: from every method, where a byte that it reads was altered or is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._records = RecordFile(self.path, KIND)
        try:
            self._read_contents()
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            self._records.__exit__(None, None, None)
            raise ValueError(f"{self.path} is damaged: its records make no sense ({error!r})") from error
        except BaseException:
            self._records.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.__exit__(kind, error, trace)

    def _read_contents(self) -> None:
        end = self._records.record(self._records.last_place())
        if end.header.get("kind") != "end" or end.payload_bytes != 8 * end.header["records"]:
            raise ValueError(f"{self.path} is damaged: its list of records is missing")
        files: list[_File] = []
        self.index: tuple[str, bytes] | None = None
        self._pieces: dict[tuple[int, int], list[Record]] = {}
        self._same: dict[tuple[int, int], tuple[int, int]] = {}
        for place in self._records.payload(end).view(np.uint64).tolist():
            record = self._records.record(place)
            header = record.header
            payload = b"" if header["kind"] == "piece" else self._records.payload(record).tobytes()
            if header["kind"] == "file":
                tensors = parse_header(payload, header["size"], f"{self.path}: {header['name']}")
                files.append(_File(_plain_name(header["name"]), header["size"], payload, tensors))
            elif header["kind"] == "index":
                self.index = _plain_name(header["name"]), payload
            elif header["kind"] == "same":
                self._same[header["file"], header["tensor"]] = (header["as"][0], header["as"][1])
            elif header["kind"] == "piece":
                self._pieces.setdefault((header["file"], header["tensor"]), []).append(record)
        self._files = files
        self._check_pieces()

    def _check_pieces(self) -> None:
        """Every tensor must be covered by its pieces, or by those of the tensor that it equals."""
        for number, file in enumerate(self._files):
            for place, tensor in enumerate(file.tensors):
                covered = 0
                for record in self._pieces_of(number, place):
                    if record.header["start"] != covered:
                        break
                    covered = record.header["end"]
                if covered != tensor.nbytes:
                    raise ValueError(f"{self.path} is damaged: tensor {tensor.name!r} of {file.name} is incomplete")

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the original safetensors files."""
        return tuple(file.name for file in self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of the original files, the index included."""
        return sum(file.size for file in self._files) + (len(self.index[1]) if self.index else 0)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed file."""
        return self.path.stat().st_size

    def tensors(self) -> Iterator[PackedTensor]:
        """What is stored of every tensor, file by file, in the order of their bytes."""
        for number, file in enumerate(self._files):
            for place, tensor in enumerate(file.tensors):
                own = self._pieces.get((number, place), [])
                coding = "+".join(Counter(record.header["coding"] for record in own)) or "empty"
                if (number, place) in self._same:
                    other = self._same[number, place]
                    coding = f"same as {self._files[other[0]].tensors[other[1]].name}"
                stored = sum(record.end - record.place for record in own)
                yield PackedTensor(tensor.name, file.name, tensor.dtype, tensor.shape, tensor.nbytes, stored, coding)

    def read(self, name: str) -> Tensor:
        """The tensor called ``name``; ``ValueError`` if there is none, or torch does not know its type."""
        for number, file in enumerate(self._files):
            for place, tensor in enumerate(file.tensors):
                if tensor.name == name:
                    if tensor.dtype not in _TORCH_TYPES:
                        raise ValueError(f"tensor {name!r} has type {tensor.dtype}, which torch does not know")
                    if tensor.nbytes == 0:
                        return torch.empty(tensor.shape, dtype=_TORCH_TYPES[tensor.dtype])
                    data = np.concatenate([self._decoded(record) for record in self._pieces_of(number, place)])
                    return torch.from_numpy(data).view(_TORCH_TYPES[tensor.dtype]).view(tensor.shape)
        raise ValueError(f"{self.path} has no tensor {name!r}")

    def unpack(self, out: str | os.PathLike[str], threads: int | None = None, progress: Progress | None = None) -> Path:
        """Write the original file as ``out``, or, of a sharded checkpoint, all files into the new folder ``out``.

        Raises:
            OSError: ``out`` exists, or cannot be written.
        """
        out = Path(out)
        if out.exists():
            raise FileExistsError(f"output {out} exists already; choose another or remove it")
        if len(self._files) == 1 and self.index is None:
            with atomic_write(out) as temporary:
                self._write_file(0, temporary, threads, progress)
            return out
        stage = out.with_name(out.name + ".partial")
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        for number, file in enumerate(self._files):
            self._write_file(number, stage / file.name, threads, progress)
        if self.index is not None:
            (stage / self.index[0]).write_bytes(self.index[1])
        os.replace(stage, out)
        return out

    def verify(
        self,
        against: list[SafetensorsFile] | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Decode everything and check every checksum; compare with the original files if they are given.

        Raises:
            ValueError: something differs; the message names the tensor.
        """
        if against is not None:
            for file, original in zip(self._files, against, strict=False):
                if (file.name, file.prefix) != (original.path.name, original.prefix):
                    raise ValueError(f"{original.path} has another header than {file.name} in {self.path}")
            if len(against) != len(self._files):
                raise ValueError(f"{self.path} holds {len(self._files)} files, the checkpoint has {len(against)}")
        for number, file in enumerate(self._files):
            for start, data in self._decoded_file(number, threads, progress, "verifying"):
                if against is not None and not np.array_equal(against[number].read(start, data.size), data):
                    tensor = next(tensor for tensor in file.tensors if tensor.start <= start < tensor.end)
                    raise ValueError(f"tensor {tensor.name!r} of {against[number].path} differs from {self.path}")

    def _write_file(self, number: int, path: Path, threads: int | None, progress: Progress | None) -> None:
        with path.open("wb") as file:
            file.write(self._files[number].prefix)
            for _, data in self._decoded_file(number, threads, progress, "unpacking"):
                file.write(data.data)

    def _decoded_file(
        self, number: int, threads: int | None, progress: Progress | None, what: str
    ) -> Iterator[tuple[int, np.ndarray]]:
        """The bytes of a file after its header, piece by piece, each with the place where it belongs."""
        file = self._files[number]
        listed = [
            (tensor.start + record.header["start"], record)
            for place, tensor in enumerate(file.tensors)
            for record in self._pieces_of(number, place)
        ]
        before, total = sum(each.size for each in self._files[:number]), sum(each.size for each in self._files)
        for start, data in zip(
            [start for start, _ in listed],
            in_order([partial(self._decoded, record) for _, record in listed], threads),
            strict=True,
        ):
            yield start, data
            if progress is not None:
                progress(what, before + len(file.prefix) + start + data.size, total)

    def _pieces_of(self, number: int, place: int) -> list[Record]:
        return self._pieces.get(self._same.get((number, place), (number, place)), [])

    def _decoded(self, record: Record) -> np.ndarray:
        header: Mapping[str, Any] = record.header
        payload = self._records.payload(record)
        try:
            data = decode(header, payload, header["end"] - header["start"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} is damaged: the piece at byte {record.place}: {error}") from error
        if zlib.crc32(data.data) != header["crc"]:
            raise ValueError(f"{self.path} is damaged: the piece at byte {record.place} decodes to other bytes")
        return data


def _plain_name(name: str) -> str:
    """``name`` if it is a file beside others; a packed file must not write elsewhere."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"a packed checkpoint names the file {name!r}, which is no plain name")
    return name
