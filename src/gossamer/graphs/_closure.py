"""The dense closure by halves: nearly all work is in matrix products (R-Kleene, D'Alberto & Nicolau 2007).

With ``A = [[P, Q], [R, S]]``: close P; Q = P Q, R = R P; S = S + R Q; close S; R = S R, Q = Q S; P = P + Q R. Products
are semiring block products of the kernel generator; B is packed in strips, A is read as it lies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gossamer.codegen import BlockProduct, block_product
from gossamer.core.jit import aligned_bytes, kernel
from gossamer.graphs._semirings import ELEMENTS, Semiring

LEAF = 64
_DEPTH = 128
_ROWS = 192
_COLUMNS = 512


class Products:
    """``C = C (+) A (x) B`` for arrays of one number type, cut into blocks that stay in the caches. Owns its packed B."""

    def __init__(self, rule: Semiring, dtype: Any) -> None:
        self.rule = rule
        self.dtype = np.dtype(dtype)
        self._block: BlockProduct = block_product(rule.kernel, ELEMENTS[self.dtype])
        size = self.dtype.itemsize
        self._packed = np.empty(0, self.dtype)
        # Rows of A are copied to where they begin in different sets of the cache.
        self._rows = aligned_bytes(_ROWS * (_DEPTH * size + 64)).view(self.dtype).reshape(_ROWS, -1)

    def add(self, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        """``c`` may be ``a`` or ``b`` where the other is closed: an entry that is already better is still a path's."""
        m, n, depth, size = a.shape[0], b.shape[1], a.shape[1], self.dtype.itemsize
        width = self._block.columns
        row_bytes = self._rows.strides[0]
        for j in range(0, n, _COLUMNS):
            columns = min(_COLUMNS, n - j)
            strips = -(-columns // width)
            packed = self._room(depth * strips * width)
            for k in range(0, depth, _DEPTH):
                _pack(b[k : k + _DEPTH, j : j + columns], packed[k * strips * width :], width)
            for i in range(0, m, _ROWS):  # this block of C stays in the cache over the whole depth
                rows = min(_ROWS, m - i)
                for k in range(0, depth, _DEPTH):
                    inner = min(_DEPTH, depth - k)
                    self._rows[:rows, :inner] = a[i : i + rows, k : k + inner]
                    self._block(
                        self._rows.ctypes.data, row_bytes,
                        packed.ctypes.data + k * strips * width * size, inner * width * size, width * size,
                        c.ctypes.data + i * c.strides[0] + j * size, c.strides[0], rows, columns, inner,
                    )  # fmt: skip

    def _room(self, numbers: int) -> np.ndarray:
        if len(self._packed) < numbers:
            self._packed = aligned_bytes(numbers * self.dtype.itemsize).view(self.dtype)
        return self._packed


def close(a: np.ndarray, products: Products) -> None:
    """Replace the square ``a`` by its closure, in place. Its diagonal must be at least the semiring's one."""
    n = len(a)
    if n <= LEAF:
        _floyd_warshall(a, products.rule.kernel == "max_min", products.rule.zero(a.dtype))
        return
    half = (n // 2 + LEAF - 1) // LEAF * LEAF
    p, q, r, s = a[:half, :half], a[:half, half:], a[half:, :half], a[half:, half:]
    close(p, products)
    products.add(q, p, q)
    products.add(r, r, p)
    products.add(s, r, q)
    close(s, products)
    products.add(r, s, r)
    products.add(q, q, s)
    products.add(p, q, r)


@kernel
def _pack(b: Any, packed: Any, width: int) -> None:
    depth, columns = b.shape
    for start in range(0, columns, width):
        base = start * depth
        wide = min(width, columns - start)
        for row in range(depth):
            for column in range(wide):
                packed[base + row * width + column] = b[row, start + column]


@kernel
def _floyd_warshall(a: Any, widest: bool, nothing: Any) -> None:
    n = len(a)
    for k in range(n):
        for i in range(n):
            through = a[i, k]
            if through == nothing:
                continue
            if widest:
                for j in range(n):
                    a[i, j] = max(a[i, j], min(through, a[k, j]))
            else:
                for j in range(n):
                    a[i, j] = min(a[i, j], through + a[k, j])
