"""A file of checksummed records that is written front to back and can be taken up again after a crash.

====================== ==========================================================================================
head                   8 bytes magic, uint32 version, uint32 0
each record            uint64 bytes of JSON, uint64 bytes of payload, uint32 CRC-32 of the JSON, of the payload; JSON;
                       payload
foot (finished files)  uint64 where the last record begins, 8 bytes magic
====================== ==========================================================================================

All numbers are little-endian. While it grows, the file is called ``NAME.partial``; every byte of it is covered by a
checksum or a fixed value, so that one altered byte anywhere is noticed.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

_HEAD, _PREAMBLE, _FOOT = struct.Struct("<8sII"), struct.Struct("<QQII"), struct.Struct("<Q8s")
HEAD_BYTES = _HEAD.size
_MOST_JSON = 1 << 30


@dataclass(frozen=True)
class Kind:
    """A kind of file: its magic bytes, version and what to call it in messages."""

    magic: bytes
    version: int
    called: str


@dataclass(frozen=True)
class Record:
    """Where a record lies, and its JSON; the payload is read by :meth:`RecordFile.payload`."""

    header: dict[str, Any]
    place: int
    payload_place: int
    payload_bytes: int
    payload_crc: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.payload_place + self.payload_bytes


class RecordFile:
    """A record file that is open for reading."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path = path
        self._kind = kind
        self._file: BinaryIO = path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            self._check_head()
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def last_place(self) -> int:
        """Where the last record of a finished file begins; ``ValueError`` if the file was not finished."""
        foot = os.pread(self._file.fileno(), _FOOT.size, max(_HEAD.size, self._size - _FOOT.size))
        if len(foot) == _FOOT.size:
            place, magic = _FOOT.unpack(foot)
            if magic == self._kind.magic and _HEAD.size <= place < self._size:
                return int(place)
        raise self._damaged("its end is missing or altered")

    def record(self, place: int) -> Record:
        """The record that begins at ``place``; ``ValueError`` if it is cut short or its JSON was altered."""
        preamble = os.pread(self._file.fileno(), _PREAMBLE.size, place)
        if len(preamble) < _PREAMBLE.size:
            raise self._damaged(f"the record at byte {place} is cut short")
        size, payload_bytes, crc, payload_crc = _PREAMBLE.unpack(preamble)
        payload_place = place + _PREAMBLE.size + size
        if size > _MOST_JSON or payload_place + payload_bytes > self._size:
            raise self._damaged(f"the record at byte {place} is cut short")
        text = os.pread(self._file.fileno(), size, place + _PREAMBLE.size)
        if zlib.crc32(text) != crc:
            raise self._damaged(f"the checksum of the record at byte {place} does not match")
        return Record(json.loads(text), place, payload_place, payload_bytes, payload_crc)

    def records(self, place: int = _HEAD.size) -> Iterator[Record]:
        """The records from ``place`` on, as far as they are whole."""
        while place + _PREAMBLE.size <= self._size:
            record = self.record(place)
            yield record
            place = record.end

    def payload(self, record: Record) -> np.ndarray:
        """The payload, uint8; ``ValueError`` if it was altered. Several threads may call this."""
        data = np.empty(record.payload_bytes, np.uint8)
        done = 0
        while done < data.size:
            count = os.preadv(self._file.fileno(), [data[done:].data], record.payload_place + done)
            if count == 0:
                raise self._damaged("it became shorter while it was read")
            done += count
        if zlib.crc32(data.data) != record.payload_crc:
            raise self._damaged(f"the checksum of the payload at byte {record.payload_place} does not match")
        return data

    def _check_head(self) -> None:
        head = os.pread(self._file.fileno(), _HEAD.size, 0)
        if len(head) < _HEAD.size or not head.startswith(self._kind.magic):
            raise ValueError(f"{self.path} is not a {self._kind.called}")
        _, version, reserved = _HEAD.unpack(head)
        if reserved:
            raise self._damaged("its first bytes were altered")
        if not 1 <= version <= self._kind.version:
            raise ValueError(
                f"{self.path} has version {version} of a {self._kind.called}, this Gossamer reads up to "
                f"{self._kind.version}: upgrade it"
            )

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {reason}; write or copy the file again")


class RecordWriter:
    """Appends records to ``PATH.partial``; :meth:`finish` gives the file its name."""

    def __init__(self, path: Path, kind: Kind, keep: int | None = None) -> None:
        """Start anew, or go on after the first ``keep`` bytes of the partial file that is there."""
        self.path = path
        self.partial = partial_of(path)
        self._kind = kind
        self._file: BinaryIO = self.partial.open("r+b" if keep else "wb")
        if keep:
            self._file.truncate(keep)
            self._file.seek(keep)
        else:
            self._file.write(_HEAD.pack(kind.magic, kind.version, 0))
        self._last = 0

    def write(self, header: Mapping[str, Any], payload: Sequence[np.ndarray] = ()) -> int:
        """Append one record, its payload in parts, and hand it to the operating system; where it begins."""
        text = json.dumps(header, separators=(",", ":")).encode()
        crc, size = 0, sum(part.nbytes for part in payload)
        for part in payload:
            crc = zlib.crc32(part.data, crc)
        self._last = self._file.tell()
        self._file.write(_PREAMBLE.pack(len(text), size, zlib.crc32(text), crc) + text)
        for part in payload:
            self._file.write(part.data)
        self._file.flush()
        return self._last

    def finish(self) -> None:
        """Write the foot, and rename the file once it is on disk."""
        self._file.write(_FOOT.pack(self._last, self._kind.magic))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.partial, self.path)

    def close(self) -> None:
        """Leave the partial file as it is."""
        self._file.close()


def partial_of(path: Path) -> Path:
    """The name of an unfinished file."""
    return path.with_name(path.name + ".partial")
