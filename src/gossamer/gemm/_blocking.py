"""From a tiling to a program: blocks of the depth that keep B's strips in the first cache, copies where they pay.

For every block of the depth: B's strips are packed, unless they were before or are read as they lie; for every block of
rows, A is copied into consecutive memory where its rows are far apart; then each strip goes down the rows. Results of
earlier blocks of the depth are added to; the epilogue belongs to the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gossamer.codegen import DYNAMIC_EDGE, CopyKernel, InnerKernel, Job, MicroKernel, Strip, Target, Tiling
from gossamer.gemm._pack import padded_width, strip_starts

A, B, C, BIAS, SCALES, LATER_SCALES, A_COPY, B_COPY = range(8)
"""The bases of a program. Later blocks of the depth scale what is in C by one, the first by beta."""

_DEPTH = 512
_A_BLOCK_BYTES = 224 << 10
INNER_COLUMNS = 3
_INNER_ROWS = {1: 8, 2: 4, 3: 3}


@dataclass(frozen=True)
class Form:
    """What a product does, sizes aside. update, bias, activation: as in a micro-kernel. packed: B was packed before."""

    dtype: str
    transb: bool
    packed: bool
    update: str
    bias: bool
    activation: str

    @property
    def item_bytes(self) -> int:
        """Of the operands."""
        return 2 if self.dtype == "bf16" else 4


@dataclass(frozen=True)
class Strides:
    """Bytes between rows of A, B and C."""

    a: int
    b: int
    c: int


@dataclass(frozen=True)
class Share:
    """Rows and strips that one thread computes."""

    first_row: int
    rows: int
    tiling: Tiling


def depth_blocks(k: int) -> list[tuple[int, int]]:
    """Starts and ends of about equal blocks of the depth.

    >>> depth_blocks(1000)
    [(0, 500), (500, 1000)]
    """
    count = math.ceil(k / _DEPTH)
    size = math.ceil(k / count)
    return [(start, min(k, start + size)) for start in range(0, k, size)]


def takes_inner(dtype: str, n: int, k: int, target: Target) -> bool:
    """Whether so few columns are summed along the depth."""
    return dtype == "f32" and n <= INNER_COLUMNS and k >= 2 * target.lanes()


class Blocking:
    """The jobs of one thread's share; ``a_scratch`` and ``b_scratch`` are the bytes that they need."""

    def __init__(self, form: Form, share: Share, strides: Strides, k: int, target: Target) -> None:
        self.form, self.share, self.strides, self.k, self.target = form, share, strides, k, target
        self.lanes = target.lanes()
        self.a_scratch = self.b_scratch = 0
        self.jobs = list(self._inner() if takes_inner(form.dtype, share.tiling.n, k, target) else self._blocks())

    def _inner(self) -> Iterator[Job]:
        n, k = self.share.tiling.n, self.k
        b, ldb = (B, 0), 4 * k if self.form.packed else self.strides.b
        if not (self.form.packed or self.form.transb or (n == 1 and ldb == 4)):
            self.b_scratch = 4 * n * k
            yield Job(CopyKernel(turned=True), b, ldb, b, 0, (B_COPY, 0), 4 * k, n, k)
            b, ldb = (B_COPY, 0), 4 * k
        tall = _INNER_ROWS[n]
        row = self.share.first_row
        for height, count in ((tall, self.share.rows // tall), (self.share.rows % tall, 1)):
            if not height or not count:
                continue
            kernel = InnerKernel(height, n, self.form.update, self.form.bias, self.form.activation)  # type: ignore[arg-type]
            places = (A, row * self.strides.a), self.strides.a, b, ldb, (C, row * self.strides.c), self.strides.c
            yield Job(kernel, *places, k, count, (BIAS, 0), SCALES)
            row += height * count

    def _blocks(self) -> Iterator[Job]:
        blocks = depth_blocks(self.k)
        for block in blocks:
            packed = self.form.packed or self._packs_b()
            if packed and not self.form.packed:
                yield from self._pack_b(block)
            for heights in self._row_blocks(block):
                yield from self._rows(block, heights, packed, block == blocks[0], block == blocks[-1])

    def _packs_b(self) -> bool:
        """Whether packing pays: it takes about as long as two or three rows of the product; far rows of B take longer."""
        if self.form.transb or self.form.dtype == "bf16":
            return True
        large = self.share.tiling.n * self.k * 4 > 48 << 10
        return large and self.share.rows >= (12 if self.strides.b % 2048 else 6)

    def _pack_b(self, block: tuple[int, int]) -> Iterator[Job]:
        kernel = CopyKernel("bf16" if self.form.dtype == "bf16" else "f32", turned=self.form.transb)
        depth = block[1] - block[0]
        starts = strip_starts(self.share.tiling.strips, self.lanes, depth)
        self.b_scratch = max(self.b_scratch, 4 * starts[-1])
        size = self.form.item_bytes
        for strip, start in zip(self.share.tiling.strips, starts, strict=False):
            row_bytes = 4 * padded_width(strip, self.lanes)
            if self.form.transb:
                place = strip.start * self.strides.b + block[0] * size
                yield Job(
                    kernel, (B, place), self.strides.b, (B, 0), 0, (B_COPY, 4 * start), row_bytes, depth, strip.columns
                )
            else:
                place = block[0] * self.strides.b + strip.start * size
                yield Job(
                    kernel, (B, place), self.strides.b, (B, 0), 0, (B_COPY, 4 * start), row_bytes, strip.columns, depth
                )

    def _copies_a(self, depth: int) -> bool:
        if self.form.dtype == "bf16":
            return True
        # Rows of A fight for places in the caches, and each is in a page of its own: once copied, strips read it in order.
        return (
            len(self.share.tiling.strips) >= 4
            and depth >= 64
            and self.strides.a > 4 * depth + 256
            and self.strides.a >= 2048
        )

    def _row_blocks(self, block: tuple[int, int]) -> Iterator[list[tuple[int, int, list[tuple[int, int]]]]]:
        """Blocks of rows; each is, for every strip, the first row and the tile heights."""
        depth = block[1] - block[0]
        most = max(24, _A_BLOCK_BYTES // (4 * depth))
        strips = self.share.tiling.strips
        same = all(strip.heights == strips[0].heights for strip in strips)
        if not same or self.share.rows <= most:
            yield [(0, self.share.rows, list(strip.heights)) for strip in strips]
            return
        row = 0
        for height, count in strips[0].heights:
            while count:
                now = min(count, max(1, most // height))
                yield [(row, now * height, [(height, now)]) for _ in strips]
                row, count = row + now * height, count - now

    def _rows(
        self,
        block: tuple[int, int],
        heights: list[tuple[int, int, list[tuple[int, int]]]],
        packed: bool,
        first: bool,
        last: bool,
    ) -> Iterator[Job]:
        depth, size = block[1] - block[0], self.form.item_bytes
        start, rows, _ = heights[0]
        a_base, a_row_bytes = (A, (self.share.first_row + start) * self.strides.a + block[0] * size), self.strides.a
        if self._copies_a(depth):
            kernel = CopyKernel("bf16" if self.form.dtype == "bf16" else "f32")
            copied = 4 * depth + 64  # rows of the copy begin in different sets of the cache
            self.a_scratch = max(self.a_scratch, rows * copied)
            yield Job(kernel, a_base, a_row_bytes, (B, 0), 0, (A_COPY, 0), copied, depth, rows)
            a_base, a_row_bytes = (A_COPY, 0), copied
        starts = strip_starts(self.share.tiling.strips, self.lanes, self.k if self.form.packed else depth)
        for strip, place, (top, _, tiles) in zip(self.share.tiling.strips, starts, heights, strict=False):
            b, ldb = self._b_place(strip, place, block, packed)
            row = 0
            for height, count in tiles:
                yield Job(
                    self._kernel(height, strip, packed, first, last),
                    (a_base[0], a_base[1] + row * a_row_bytes), a_row_bytes, b, ldb,
                    (C, (self.share.first_row + top + row) * self.strides.c + 4 * strip.start), self.strides.c,
                    depth, count, (BIAS, 4 * strip.start), SCALES if first else LATER_SCALES, strip.columns,
                )  # fmt: skip
                row += height * count

    def _b_place(self, strip: Strip, place: int, block: tuple[int, int], packed: bool) -> tuple[tuple[int, int], int]:
        if not packed:
            return (B, block[0] * self.strides.b + 4 * strip.start), self.strides.b
        size = self.form.item_bytes if self.form.packed else 4
        row_bytes = size * padded_width(strip, self.lanes)
        if self.form.packed:
            return (B, size * place + block[0] * row_bytes), row_bytes
        return (B_COPY, 4 * place), row_bytes

    def _kernel(self, height: int, strip: Strip, packed: bool, first: bool, last: bool) -> MicroKernel:
        edge = strip.columns % self.lanes
        if edge and self.target.masks:
            edge = DYNAMIC_EDGE
        widened = "bf16" if self.form.packed and self.form.dtype == "bf16" else ""
        kernel = MicroKernel(
            height, strip.vectors, edge=edge, padded_b=bool(packed and (edge or widened)), b_element=widened
        )
        # Later blocks add to what is there; beta is used up by the first.
        update = self.form.update if first else "accumulate" if self.form.update == "store" else self.form.update
        kernel = replace(kernel, update=update)  # type: ignore[arg-type]
        if not last:
            return kernel
        return replace(kernel, bias=self.form.bias, activation=self.form.activation)  # type: ignore[arg-type]
