"""Which register tiles cover a matrix: a performance model, and the exact minimum over all ways of cutting.

A matrix of C is cut into strips of columns and each strip into tiles of rows. Costs add up, so dynamic programming
finds the cheapest cut: over the rows of a strip for every width, then over widths. It takes the place of the rules for
ragged ends of autoGEMM (Wu et al., SC 2024); what the rules find, it finds, and it cannot be worse under the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from gossamer.codegen._kernel import MicroKernel, Semiring
from gossamer.codegen._targets import Target

_WIDTHS = (1, 2, 3, 4, 6, 8)
_HEIGHTS = tuple(range(1, 15))
_DYNAMIC_ROWS = 48
_TILE_CYCLES = 9.0
_L1_BYTES = 22 << 10  # of 32 KiB, what B may take beside A and C
_L2_BYTES_A_CYCLE = 32.0


@dataclass(frozen=True)
class Strip:
    """Columns of C that one register tile's width covers. heights: pairs of tile rows and how many such tiles."""

    start: int
    columns: int
    vectors: int
    heights: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tiling:
    """How C of shape ``(m, n)`` is cut for a depth of ``k``, and what the model expects. Made by :func:`tile`."""

    target: Target
    m: int
    n: int
    k: int
    strips: tuple[Strip, ...]
    cycles: float

    @property
    def efficiency(self) -> float:
        """Useful multiply-adds over those that the processor could do in the expected time."""
        lanes = self.target.lanes()
        return self.m * self.n * self.k / (self.cycles * self.target.fma_ports * lanes)

    def explain(self) -> str:
        """The cut and its expected time beside one tile size for everything.

        >>> from gossamer.codegen import named_target
        >>> print(tile(26, 36, 256, named_target("aarch64-neon")).explain().splitlines()[0])
        26 x 36 x 256 on aarch64-neon: 30294 cycles expected, 99 % of peak
        """
        fixed = fixed_tile(self.m, self.n, self.k, self.target)
        lines = [
            f"{self.m} x {self.n} x {self.k} on {self.target.name}: {self.cycles:.0f} cycles expected, "
            f"{100 * self.efficiency:.0f} % of peak"
        ]
        for strip in self.strips:
            rows = ", ".join(f"{count} of {height}" for height, count in strip.heights)
            lines.append(
                f"  columns {strip.start}..{strip.start + strip.columns}: {strip.vectors} vectors; rows: {rows}"
            )
        lines.append(f"  one tile size with ragged ends: {fixed.cycles:.0f} cycles")
        return "\n".join(lines)


def tile_cycles(target: Target, rows: int, vectors: int, depth: int, semiring: Semiring = "plus_times") -> float:
    """Cycles that one tile is expected to take: the slowest of arithmetic, loads, latency and issue, and the switch.

    >>> from gossamer.codegen import named_target
    >>> tile_cycles(named_target("x86-avx2"), 6, 2, 256) < 2 * tile_cycles(named_target("x86-avx2"), 3, 2, 256)
    True
    """
    arithmetic = float(rows * vectors)
    loads = vectors + (rows / 4 if target.by_element else rows)
    issued = arithmetic + loads + 1.0
    if semiring != "plus_times":  # two instructions a pair, on the ports of additions
        arithmetic *= 2
        issued += rows * vectors
    # Accumulators that are too few wait for themselves; tiles that follow each other fill a part of the gap.
    waiting = target.fma_latency * (0.72 + 0.28 * min(1.0, rows * vectors / (target.fma_latency * target.fma_ports)))
    b_bytes = vectors * target.vector_bytes
    if depth * b_bytes > _L1_BYTES:  # the strip of B comes from the second cache again for every tile
        waiting = max(waiting, b_bytes / _L2_BYTES_A_CYCLE)
        arithmetic *= 1.05
    step = max(arithmetic / target.fma_ports, loads / target.load_ports, issued / target.issue, waiting)
    return depth * step + _TILE_CYCLES + rows * vectors


@cache
def tile_shapes(target: Target, semiring: Semiring = "plus_times", element: str = "f32") -> dict[int, tuple[int, ...]]:
    """Heights of the register tiles of each width that fit ``target``: the family that serves all shapes."""
    shapes: dict[int, tuple[int, ...]] = {}
    for vectors in _WIDTHS:
        fitting = [rows for rows in _HEIGHTS if _fits(target, rows, vectors, semiring, element)]
        if fitting:
            shapes[vectors] = tuple(fitting)
    return shapes


def _fits(target: Target, rows: int, vectors: int, semiring: Semiring, element: str) -> bool:
    kernel = MicroKernel(rows, vectors, element=element, semiring=semiring)
    spare = target.registers - kernel.registers(target)
    if semiring == "plus_times":
        return spare >= (1 if target.by_element else 0)
    # Of sums that wait for their minimum LLVM keeps several: on Arm, and in wide tiles, it needs room for them.
    return spare >= (6 if target.by_element else 0) and vectors <= 3


@lru_cache(maxsize=4096)
def tile(
    m: int, n: int, k: int, target: Target, semiring: Semiring = "plus_times", element: str = "f32", lanes: int = 0
) -> Tiling:
    """The cheapest cut of an ``(m, n)`` result of depth ``k``.

    Raises:
        ValueError: a size is below 1.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    lanes = lanes or target.lanes(element)
    shapes = tile_shapes(target, semiring, element)
    columns = {width: _rows(m, k, width, heights, target, semiring) for width, heights in shapes.items()}
    vectors = math.ceil(n / lanes)
    widest = min(columns, key=lambda width: columns[width][0] / width)
    spare = max(0, vectors - 16) // widest * widest
    best: list[tuple[float, int]] = [(0.0, 0)]
    for size in range(1, vectors - spare + 1):
        best.append(min((best[size - width][0] + columns[width][0], -width) for width in columns if width <= size))
    widths = [widest] * (spare // widest)
    left = vectors - spare
    while left:
        widths.append(-best[left][1])
        left += best[left][1]
    widths.sort(reverse=True)
    return _assembled(m, n, k, target, lanes, widths, columns)


def row_heights(m: int, k: int, vectors: int, target: Target) -> tuple[tuple[int, int], ...]:
    """The cheapest cut of ``m`` rows of a strip: pairs of tile rows and how many such tiles."""
    return _rows(m, k, vectors, tile_shapes(target)[vectors], target, "plus_times")[1]


def fixed_tile(m: int, n: int, k: int, target: Target) -> Tiling:
    """One tile size for everything, with ragged ends: what a fixed kernel does."""
    shapes = tile_shapes(target)
    rows, width = max(
        ((height, width) for width, heights in shapes.items() for height in heights),
        key=lambda shape: (shape[0] * shape[1] / (shape[0] + shape[1] * target.lanes()), shape),
    )
    rows, width = _main_tile(target, rows, width)
    vectors = math.ceil(n / target.lanes())
    widths = [width] * (vectors // width) + ([vectors % width] if vectors % width else [])
    heights = [(rows, m // rows)] * (m >= rows) + [(m % rows, 1)] * (m % rows > 0)
    columns = {
        size: (sum(count * tile_cycles(target, height, size, k) for height, count in heights), tuple(heights))
        for size in set(widths)
    }
    return _assembled(m, n, k, target, target.lanes(), widths, columns)


def _main_tile(target: Target, rows: int, width: int) -> tuple[int, int]:
    """The usual tile of hand-written libraries on this register file."""
    return {16: (6, 2)}.get(target.registers, (5, 4) if target.by_element else (12, 2))


def _assembled(
    m: int,
    n: int,
    k: int,
    target: Target,
    lanes: int,
    widths: list[int],
    columns: dict[int, tuple[float, tuple[tuple[int, int], ...]]],
) -> Tiling:
    strips, start = [], 0
    for width in widths:
        covered = min(width * lanes, n - start)
        strips.append(Strip(start, covered, width, columns[width][1]))
        start += covered
    return Tiling(target, m, n, k, tuple(strips), sum(columns[width][0] for width in widths))


def _rows(
    m: int, k: int, width: int, heights: tuple[int, ...], target: Target, semiring: Semiring
) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Cycles and tile heights of the cheapest cut of ``m`` rows; most of many rows go to the best height at once."""
    cycles = {height: tile_cycles(target, height, width, k, semiring) for height in heights}
    tallest = min(heights, key=lambda height: cycles[height] / height)
    many = max(0, m - _DYNAMIC_ROWS) // tallest
    best: list[tuple[float, int]] = [(0.0, 0)]
    for size in range(1, m - many * tallest + 1):
        best.append(min((best[size - height][0] + cycles[height], -height) for height in heights if height <= size))
    counts = {tallest: many} if many else {}
    left = m - many * tallest
    while left:
        height = -best[left][1]
        counts[height] = counts.get(height, 0) + 1
        left -= height
    total = best[m - many * tallest][0] + many * cycles[tallest]
    return total, tuple(sorted(counts.items(), reverse=True))
