"""Packs a safetensors checkpoint into one smaller file that gives every byte back.

The checkpoint is read piece by piece, pieces are coded in threads, and written in order, so that memory stays bounded
and an interrupted run goes on where it was: the records that are whole in ``OUT.partial`` are kept. bf16 weights are
coded without loss (:mod:`gossamer.weights._piece`); headers, metadata and all other tensors are kept as they are. A
tensor whose bytes equal an earlier one's is stored once.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer.weights._in_order import in_order
from gossamer.weights._piece import Piece, encode, parts, pieces
from gossamer.weights._record_file import HEAD_BYTES, Kind, RecordFile, RecordWriter, partial_of
from gossamer.weights._safetensors_files import SafetensorsFile, StoredTensor, checkpoint_files

KIND = Kind(b"gossampk", 1, "packed checkpoint")
PIECE_BYTES = 8 << 20

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``, in bytes of the checkpoint."""


def pack_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    threads: int | None = None,
    progress: Progress = lambda what, done, total: None,
    fresh: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Path:
    """Write ``source`` as one packed file; :class:`PackedCheckpoint` reads it, :func:`unpack_checkpoint` restores it.

    Args:
        source: a safetensors file, the index of a sharded checkpoint, or the folder of either.
        out: the file to write; it must not exist. ``OUT.partial`` holds what is done until then.
        threads: pieces that are coded at once; as many as there are processors by default. Each takes about five
            times ``piece_bytes`` of memory.
        progress: called after every piece.
        fresh: throw away what an earlier run left instead of going on from it.
        piece_bytes: bytes of a tensor that are coded at a time, about.

    Raises:
        ValueError: ``source`` is damaged, or ``OUT.partial`` comes from another checkpoint.
        OSError: ``out`` exists, or its folder cannot be written.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"output file {out} exists already; choose another or remove it")
    if piece_bytes < 1 << 12:
        raise ValueError(f"piece_bytes must be at least 4096, got {piece_bytes}")
    files, index = checkpoint_files(source)
    jobs = list(_jobs(files, index, piece_bytes))
    places, keep = _finished(out, jobs) if not fresh else ([], None)
    writer = RecordWriter(out, KIND, keep)
    total, done = sum(job.nbytes for job in jobs), sum(job.nbytes for job in jobs[: len(places)])
    try:
        remaining = jobs[len(places) :]
        for job, (header, payload) in zip(remaining, in_order(remaining, threads), strict=True):
            places.append(writer.write(header, payload))
            done += job.nbytes
            progress("packing", done, total)
        writer.write({"kind": "end", "records": len(places)}, [np.array(places, np.uint64)])
        writer.finish()
    finally:
        writer.close()
    return out


Written = tuple[dict[str, Any], list[np.ndarray]]


@dataclass(frozen=True)
class _Job:
    """One record to write: a header with its payload, or a piece that is read and coded first."""

    header: dict[str, Any]
    payload: bytes = b""
    file: SafetensorsFile | None = None
    tensor: StoredTensor | None = None
    piece: Piece | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint that the record stands for."""
        return len(self.payload) if self.piece is None else self.piece.end - self.piece.start

    def __call__(self) -> Written:
        if self.file is None or self.tensor is None or self.piece is None:
            return self.header, [np.frombuffer(self.payload, np.uint8)]
        data = self.file.read(self.tensor.start + self.piece.start, self.nbytes)
        description, arrays = encode(data, self.piece)
        return {**self.header, "crc": zlib.crc32(data.data), **description}, parts(arrays)


def _jobs(files: list[SafetensorsFile], index: Path | None, piece_bytes: int) -> Iterator[_Job]:
    """Every record of the packed file but the last, in order; depends on the checkpoint only."""
    identity = [[file.path.name, file.size, file.path.stat().st_mtime_ns, zlib.crc32(file.prefix)] for file in files]
    yield _Job({"kind": "source", "files": identity, "piece_bytes": piece_bytes})
    for file in files:
        yield _Job({"kind": "file", "name": file.path.name, "size": file.size}, file.prefix)
    if index is not None:
        yield _Job({"kind": "index", "name": index.name}, index.read_bytes())
    equal = _equal_tensors(files)
    for number, file in enumerate(files):
        for place, tensor in enumerate(file.tensors):
            header = {"file": number, "tensor": place}
            if (number, place) in equal:
                yield _Job({"kind": "same", **header, "as": list(equal[number, place])})
                continue
            for piece in pieces(tensor, piece_bytes):
                ends = {"start": piece.start, "end": piece.end}
                yield _Job({"kind": "piece", **header, **ends}, b"", file, tensor, piece)


def _equal_tensors(files: list[SafetensorsFile]) -> dict[tuple[int, int], tuple[int, int]]:
    """Tensors whose bytes equal those of an earlier tensor of the same type and shape."""
    equal: dict[tuple[int, int], tuple[int, int]] = {}
    alike: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for number, file in enumerate(files):
        for place, tensor in enumerate(file.tensors):
            beginning = file.read(tensor.start, min(tensor.nbytes, 4096)).tobytes()
            earlier = alike.setdefault((tensor.dtype, tensor.shape, beginning), [])
            for other in earlier if tensor.nbytes else ():
                if _same_bytes(file, tensor, files[other[0]], files[other[0]].tensors[other[1]]):
                    equal[number, place] = other
                    break
            else:
                earlier.append((number, place))
    return equal


def _same_bytes(file: SafetensorsFile, tensor: StoredTensor, other: SafetensorsFile, earlier: StoredTensor) -> bool:
    step = 1 << 22
    return all(
        np.array_equal(
            file.read(tensor.start + place, min(step, tensor.nbytes - place)),
            other.read(earlier.start + place, min(step, tensor.nbytes - place)),
        )
        for place in range(0, tensor.nbytes, step)
    )


def _finished(out: Path, jobs: list[_Job]) -> tuple[list[int], int | None]:
    """Where the whole records of an earlier run of the same ``jobs`` begin, and where the last of them ends."""
    partial = partial_of(out)
    if not partial.exists():
        return [], None
    places: list[int] = []
    end: int | None = None
    if partial.stat().st_size < HEAD_BYTES:
        return places, end
    with RecordFile(partial, KIND) as file:
        try:
            for record, job in zip(file.records(), jobs, strict=False):
                if not places and record.header != job.header:
                    raise _OtherCheckpoint
                if any(record.header.get(key) != value for key, value in job.header.items()):
                    break
                file.payload(record)
                places.append(record.place)
                end = record.end
        except _OtherCheckpoint:
            raise ValueError(
                f"{partial} holds an unfinished run of another checkpoint or piece size; use --fresh to throw it away"
            ) from None
        except ValueError:
            pass  # the record that was being written when the run ended
    return places, end


class _OtherCheckpoint(Exception):
    """The partial file does not come from this checkpoint."""
