"""Codes pieces of a checkpoint without loss: runs of bf16 weights in the smallest lossless format, others as they are.

Which format is smallest is foreseen from a sample of the exponents, so that each piece is encoded once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.weights._format import WeightFormat, describe, from_description
from gossamer.weights._lossless import LosslessWeight
from gossamer.weights._lossless_arrays import as_tensor
from gossamer.weights._lossless_bits import best_window, exponent_counts
from gossamer.weights._nib12_vector import CODES as NIB12_CODES
from gossamer.weights._safetensors_files import StoredTensor
from gossamer.weights._sparse_lossless import SparseLosslessWeight
from gossamer.weights._tbe_vector import CODES as TBE_CODES

WIDTH = 4096
"""Columns of the matrix as which weights are coded whose own last dimension does not suit."""
_WIDEST = 1 << 16
_ALIGNMENT = 64
_AT_MOST = 0.98  # of the plain bytes; more is not worth decoding
_SAMPLE, _RUNS = 1 << 16, 16
_parallel_code = threading.Lock()  # numba's parallel loops may be entered by one thread at a time


@dataclass(frozen=True)
class Piece:
    """Bytes ``start:end`` of a tensor; coded as a bf16 matrix of ``rows`` x ``columns`` if ``columns`` is not 0."""

    start: int
    end: int
    rows: int = 0
    columns: int = 0


def pieces(tensor: StoredTensor, most_bytes: int) -> Iterator[Piece]:
    """Cut ``tensor`` into pieces of about ``most_bytes``."""
    place, columns = 0, _columns(tensor)
    if columns:
        height = max(64, most_bytes // (2 * columns) // 64 * 64)
        rows = tensor.nbytes // (2 * columns)
        for top in range(0, rows, height):
            count = min(height, rows - top)
            yield Piece(place, place + 2 * columns * count, count, columns)
            place += 2 * columns * count
    while place < tensor.nbytes:
        end = min(place + most_bytes, tensor.nbytes)
        yield Piece(place, end)
        place = end


def _columns(tensor: StoredTensor) -> int:
    """Width of the matrix as which a tensor is coded, 0 if it is not."""
    if tensor.dtype != "BF16" or math.prod(tensor.shape) < WIDTH:
        return 0
    last = tensor.shape[-1]
    return last if len(tensor.shape) > 1 and last % 64 == 0 and last <= _WIDEST else WIDTH


def encode(data: np.ndarray, piece: Piece) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What to write for the bytes ``data`` of ``piece``: a JSON description and arrays."""
    weight = _smallest(data, piece) if piece.columns else None
    if weight is None:
        return {"coding": "raw"}, [data]
    arrays = {name: array.numpy() for name, array in weight.arrays().items()}
    listed = [[name, array.dtype.name, array.size] for name, array in arrays.items()]
    kind = "sparse-" if isinstance(weight, SparseLosslessWeight) else ""
    return {"coding": f"{kind}{weight.meta()['layout']}", "weight": describe(weight), "arrays": listed}, list(
        arrays.values()
    )


def decode(header: Mapping[str, Any], payload: np.ndarray, nbytes: int) -> np.ndarray:
    """The bytes of a piece, uint8 ``(nbytes,)``, from what :func:`encode` gave and :func:`parts` laid out.

    Raises:
        ValueError: the description and the payload contradict each other.
    """
    if header["coding"] == "raw":
        data = payload
    else:
        arrays = dict(_split(header["arrays"], payload))
        weight = from_description(header["weight"], arrays)
        with _parallel_code if isinstance(weight, SparseLosslessWeight) else threading.Lock():
            data = weight.to_dense().view(torch.int16).numpy().reshape(-1).view(np.uint8)
    if data.size != nbytes:
        raise ValueError(f"a piece holds {data.size} bytes where {nbytes} belong")
    return data


def parts(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """What to write one after another, uint8: the arrays, each but the last filled up with zeros to whole 64 bytes."""
    written: list[np.ndarray] = []
    for array in arrays:
        if written and (missing := -sum(part.nbytes for part in written) % _ALIGNMENT):
            written.append(np.zeros(missing, np.uint8))
        written.append(array.view(np.uint8))
    return written


def _split(listed: list[list[Any]], payload: np.ndarray) -> Iterator[tuple[str, Tensor]]:
    place = 0
    for name, dtype, size in listed:
        kind = np.dtype(dtype)
        end = place + kind.itemsize * size
        if end > payload.size:
            raise ValueError(f"array {name!r} of a piece is cut short")
        yield name, as_tensor(payload[place:end].view(kind))
        place = -(-end // _ALIGNMENT) * _ALIGNMENT


def _smallest(data: np.ndarray, piece: Piece) -> WeightFormat | None:
    """The piece in the format that takes the fewest bytes; None if that is the plain one."""
    bits = data.view(np.uint16)
    sizes = _foreseen(_sampled_counts(bits), piece)
    best = min(sizes, key=sizes.__getitem__)
    if sizes[best] > _AT_MOST * data.nbytes:
        return None
    matrix = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(piece.rows, piece.columns)
    kind = SparseLosslessWeight if best.startswith("sparse") else LosslessWeight
    weight = kind.from_dense(matrix, best.removeprefix("sparse-"))
    return weight if weight.nbytes < _AT_MOST * data.nbytes else None


def _sampled_counts(bits: np.ndarray) -> np.ndarray:
    """How often each exponent occurs: counted where there are few weights, else estimated from evenly spaced runs."""
    if bits.size <= 2 * _SAMPLE:
        return exponent_counts(bits)
    run = _SAMPLE // _RUNS
    starts = np.linspace(0, bits.size - run, _RUNS).astype(np.int64)
    counts = exponent_counts(np.concatenate([bits[start : start + run] for start in starts.tolist()]))
    return np.asarray(counts * bits.size // _SAMPLE)


def _foreseen(counts: np.ndarray, piece: Piece) -> dict[str, float]:
    """Bytes of each format for weights with ``counts`` of each exponent."""
    filled = counts.copy()
    filled[0] = 0  # zeros, which a bitmap drops; subnormal numbers are rare
    kept = int(filled.sum())
    bitmap = piece.rows * (-(-piece.columns // 64) * 8 + 8)
    sparse_lines = (-(-kept // WIDTH), WIDTH)
    shape = (piece.rows, piece.columns)
    return {
        "nib12": _nib12_bytes(counts, shape),
        "tbe": _tbe_bytes(counts, shape),
        "sparse-nib12": bitmap + _nib12_bytes(filled, sparse_lines),
        "sparse-tbe": bitmap + _tbe_bytes(filled, sparse_lines),
    }


def _nib12_bytes(counts: np.ndarray, shape: tuple[int, int]) -> float:
    start = best_window(counts, NIB12_CODES, first=1)
    escapes = int(counts.sum() - counts[0] - counts[start : start + NIB12_CODES].sum())
    return shape[0] * -(-shape[1] // 64) * 96 + 4 * (shape[0] + 1) + 6 * escapes


def _tbe_bytes(counts: np.ndarray, shape: tuple[int, int]) -> float:
    start = best_window(counts, TBE_CODES)
    outside = int(counts.sum() - counts[start : start + TBE_CODES].sum())
    tiles = -(-shape[0] // 64) * -(-shape[1] // 64)
    return tiles * (3 * 512 + 4096 + 40 + 15) + outside  # a weight outside takes two bytes instead of one
