"""The bit planes of :class:`~gossamer.weights.STBWeight`: levels of weights into packed streams and back.

Rows are filled up to 64, columns to 128. The groups of 8 inputs follow one another as the rows of 8x8 tiles do in the
tensor-core bitmap layout: tiles of 64x64 by rows of tiles, in each four warp tiles of 16x64 from top to bottom, in each
four 16x16 from left to right, in each 2x2 tiles of 8x8 by columns, in each 8 rows. All streams are little-endian bits:

* ``pattern``: which n of a group are kept, as its rank among all such bytes in ascending order, 7 bits at n = 4;
* ``signs``, ``low``, ``high``: n bits a group, one for each kept weight in ascending order. A salient weight has its
  second sign in ``low`` and 0 in ``high``; of others, these are the two bits of the region.

The 8 groups of a tile thus begin at a whole byte in every stream, at a place that follows from the tile's number.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from gossamer.weights._stb_quantise import BLOCK, GROUP

TILE = 64
_SPARE = 8
"""Zero bytes after each stream, which a kernel may read."""


@lru_cache(maxsize=GROUP)
def patterns(n: int) -> np.ndarray:
    """All bytes with ``n`` bits set, ascending, uint8.

    >>> len(patterns(4)), patterns(4)[0]
    (70, np.uint8(15))
    """
    return np.array([byte for byte in range(256) if byte.bit_count() == n], np.uint8)


def pattern_bits(n: int) -> int:
    """Bits that the rank of a pattern takes.

    >>> [pattern_bits(n) for n in (4, 5, 6)]
    [7, 6, 5]
    """
    return max(1, math.ceil(math.log2(len(patterns(n)))))


def padded_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Whole tiles of rows and blocks of columns."""
    return -(-shape[0] // TILE) * TILE, -(-shape[1] // BLOCK) * BLOCK


def to_groups(matrix: np.ndarray) -> np.ndarray:
    """The entries of a padded matrix in the order of the groups, ``(groups, 8)``."""
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // 64, 4, 2, 8, columns // 64, 4, 2, 8)
    return cut.transpose(0, 4, 1, 5, 6, 2, 3, 7).reshape(-1, GROUP)


def from_groups(groups: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The inverse of :func:`to_groups`."""
    rows, columns = shape
    cut = groups.reshape(rows // 64, columns // 64, 4, 4, 2, 2, 8, 8)
    return cut.transpose(0, 2, 5, 6, 1, 3, 4, 7).reshape(rows, columns)


def pack_planes(level: np.ndarray, n: int) -> dict[str, np.ndarray]:
    """The four streams, uint8 with spare bytes, of a padded matrix of levels."""
    groups = to_groups(level)
    kept = groups != 0
    masks = np.packbits(kept, axis=1, bitorder="little")[:, 0]
    ranks = np.searchsorted(patterns(n), masks)
    values = groups[kept].astype(np.int64)
    salient = values >= 7
    code = np.where(salient, values - 7, values - 1)
    bits = pattern_bits(n)
    return {
        "pattern": _stream((ranks[:, None] >> np.arange(bits)) & 1),
        "signs": _stream(code & 1),
        "low": _stream((code >> 1) & 1),
        "high": _stream(np.where(salient, 0, code >> 2)),
    }


def unpack_planes(planes: dict[str, np.ndarray], salient: np.ndarray, n: int, shape: tuple[int, int]) -> np.ndarray:
    """Levels, uint8 of the padded ``shape``, from the streams and a bool per column that says which are salient.

    Raises:
        ValueError: a pattern or a region is out of range.
    """
    count = shape[0] * shape[1] // GROUP
    bits = pattern_bits(n)
    ranks = _bits(planes["pattern"], count * bits).reshape(count, bits) @ (1 << np.arange(bits))
    if (ranks >= len(patterns(n))).any():
        raise ValueError(f"array 'pattern' holds ranks beyond the {len(patterns(n))} patterns {n}:8")
    kept = np.unpackbits(patterns(n)[ranks][:, None], axis=1, bitorder="little").astype(bool)
    sign, low, high = (_bits(planes[name], count * n) for name in ("signs", "low", "high"))
    of_salient = to_groups(np.broadcast_to(salient, shape))[kept]
    if (high & (low | of_salient)).any():
        raise ValueError("arrays 'low' and 'high' hold a region that does not exist")
    groups = np.zeros((count, GROUP), np.uint8)
    groups[kept] = np.where(of_salient, 7 + sign + 2 * low, 1 + sign + 2 * low + 4 * high)
    return from_groups(groups, shape)


def stream_bytes(bits: int) -> int:
    """Bytes of a stream of so many bits: whole 32-bit words and the spare ones."""
    return -(-bits // 32) * 4 + _SPARE


def _stream(bits: np.ndarray) -> np.ndarray:
    stream = np.zeros(stream_bytes(bits.size), np.uint8)
    packed = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
    stream[: packed.size] = packed
    return stream


def _bits(stream: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(stream, bitorder="little", count=count).astype(np.int64)
