"""The dense closure by divide and conquer, so that nearly all work is in matrix products (R-Kleene, D'Alberto & Nicolau 2007).

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
_DEPTH = 256
_ROWS = 96
_COLUMNS = 1024


class Products:
    """``C = C (+) A (x) B`` for arrays of one number type, cut into blocks that stay in the caches. Owns its packed B."""

    def __init__(self, rule: Semiring, dtype: Any) -> None:
        self.rule = rule
        self.dtype = np.dtype(dtype)
        self._block: BlockProduct = block_product(rule.kernel, ELEMENTS[self.dtype])
        strips = -(-_COLUMNS // self._block.columns)
        self._packed = aligned_bytes(strips * self._block.columns * _DEPTH * self.dtype.itemsize).view(self.dtype)

    def add(self, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        """``c`` may be ``a`` or ``b`` where the other is closed: an entry that is already better is still a path's."""
        m, n, depth, size = a.shape[0], b.shape[1], a.shape[1], self.dtype.itemsize
        width = self._block.columns
        packed = self._packed.ctypes.data
        a_place, c_place = a.ctypes.data, c.ctypes.data
        for k in range(0, depth, _DEPTH):
            inner = min(_DEPTH, depth - k)
            for j in range(0, n, _COLUMNS):
                columns = min(_COLUMNS, n - j)
                _pack(b[k : k + inner, j : j + columns], self._packed, width)
                for i in range(0, m, _ROWS):
                    rows = min(_ROWS, m - i)
                    self._block(
                        a_place + i * a.strides[0] + k * size, a.strides[0], packed, inner * width * size, width * size,
                        c_place + i * c.strides[0] + j * size, c.strides[0], rows, columns, inner,
                    )  # fmt: skip


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
