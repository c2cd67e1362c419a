"""Allocation functions as genomes: what DSA searches (Li et al., NeurIPS 2024).

The scores of a block pass through up to two element-wise operations, are reduced to one number, and that through up to two
functions of numbers; the results of all blocks are spread over a range of densities. The published operations are here in
protected form: logarithms and inverse sines are total, the geometric mean is a mean of logarithms. Ours are two more
genes: what the scores are, and a straight line over depth that is added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gossamer.compress._allocation import SOURCES, block_vector, line, outlier_share, spread_out
from gossamer.compress._expression import ELEMENTS, SCALAR, Expr, Operator, Terminal, Vocabulary
from gossamer.compress._workbench import Workbench

_TINY = 1e-6

PRE: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "ABS": torch.abs,
    "LOG": lambda x: (torch.where(x > 0, x, 1.0) + _TINY).log(),
    "ABSLOG": lambda x: torch.where(x == 0, 1.0, x).abs().log(),
    "POW": torch.square,
    "EXP": torch.exp,
    "NORMALIZE": lambda x: ((x - x.mean()) / x.std()).nan_to_num(0.0),
    "SIGMOID": torch.sigmoid,
    "TANH": torch.tanh,
    "MMS": lambda x: (x - x.min()) / (x.max() - x.min() + 1e-9),
})  # fmt: skip
REDUCTIONS: Mapping[str, Callable[[Tensor], float]] = MappingProxyType({
    "MEAN": lambda x: float(x.double().mean()),
    "VAR": lambda x: float(x.double().var()),
    "STD": lambda x: float(x.double().std()),
    "L1_NORM": lambda x: float(x.double().abs().mean()),
    "FROBENIUS_NORM": lambda x: float(torch.linalg.vector_norm(x.double())),
    "GEOMETRIC_MEAN": lambda x: math.exp(float(x.double().abs().clamp_min(1e-300).log().mean())),
    "ENTROPY": lambda x: _entropy(x),
    "OUTLIERS": outlier_share,
})  # fmt: skip
TRANSFORMS: Mapping[str, Callable[[float], float]] = MappingProxyType({
    "SIN": math.sin,
    "COS": math.cos,
    "TAN": math.tan,
    "ASIN": lambda x: math.asin(_inside(x)),
    "ACOS": lambda x: math.acos(_inside(x)),
    "ATAN": math.atan,
    "EXP": lambda x: math.exp(min(x, 700.0)),
    "LOG": lambda x: math.log(abs(x) + _TINY),
    "ABS": abs,
    "SIGMOID": lambda x: 1 / (1 + math.exp(-max(min(x, 700.0), -700.0))),
    "TANH": math.tanh,
    "SOFTPLUS": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
})  # fmt: skip

SPREADS, TILTS = range(0, 21), range(-12, 21, 2)
"""Hundredths. The published spread is 7 to 10."""

ALLOCATION_VOCABULARY = Vocabulary(
    operators={
        **{name: Operator(1, rf"\operatorname{{{name.lower()}}}\left({{0}}\right)") for name in PRE},
        **{
            name: Operator(1, rf"\operatorname{{{name.lower().replace('_', ' ')}}}\left({{0}}\right)", ELEMENTS, SCALAR)
            for name in REDUCTIONS
        },
        **{
            f"of_{name}": Operator(1, rf"\operatorname{{{name.lower()}}}\left({{0}}\right)", SCALAR, SCALAR)
            for name in TRANSFORMS
        },
    },
    terminals={name: Terminal(rf"s^{{\mathrm{{{name}}}}}") for name in SOURCES},
)

_GENOME = re.compile(
    r"(?P<source>\w+):\((?P<pre>[\w,]*)\)-\((?P<reduction>\w+)\)-\((?P<transform>[\w,]*)\)-\((?P<spread>\d+)\)"
    r"(?:-\((?P<direction>[+-])\))?(?:-\((?P<tilt>-?\d+)\))?"
)
_PUBLISHED_SOURCE = "W"


@dataclass(frozen=True)
class AllocationGenome:
    """One allocation function.

    source: of :data:`SOURCES`. pre: up to two of :data:`PRE`. reduction: of :data:`REDUCTIONS`. transform: up to two of
    :data:`TRANSFORMS`. spread: half the range of densities, hundredths. direction: +1 prunes blocks with larger values
    more. tilt: a line from ``+tilt`` in the first block to ``-tilt`` in the last, hundredths, added to the density.

    >>> genome = AllocationGenome.parse("W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)")  # published for LLaMA-1-7B at 70 %
    >>> str(genome.function)
    'of_ASIN(of_ATAN(VAR(ABSLOG(wanda))))'
    """

    source: str = "wanda"
    pre: tuple[str, ...] = ()
    reduction: str = "MEAN"
    transform: tuple[str, ...] = ()
    spread: int = 8
    direction: int = 1
    tilt: int = 0

    def __post_init__(self) -> None:
        ALLOCATION_VOCABULARY.kind(self.function)
        if len(self.pre) > 2 or len(self.transform) > 2:
            raise ValueError(f"at most two operations before and after the reduction, got {self.pre}, {self.transform}")
        if self.direction not in (1, -1):
            raise ValueError(f"direction must be +1 or -1, got {self.direction}")
        if not 0 <= self.spread <= 50 or not -50 <= self.tilt <= 50:
            raise ValueError(f"spread must be in 0..50 and tilt in -50..50 hundredths, got {self.spread}, {self.tilt}")

    @classmethod
    def parse(cls, text: str) -> AllocationGenome:
        """The inverse of ``str``; published strings lack the last two genes and name the source W.

        Raises:
            ValueError: it cannot be read.
        """
        match = _GENOME.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"an allocation reads like W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)-(+)-(0), got {text!r}")
        pre, transform = (
            tuple(name for name in match[stage].split(",") if name and name != "NO_OP")
            for stage in ("pre", "transform")
        )
        source = "wanda" if match["source"] == _PUBLISHED_SOURCE else match["source"]
        direction = -1 if match["direction"] == "-" else 1
        return cls(source, pre, match["reduction"], transform, int(match["spread"]), direction, int(match["tilt"] or 0))

    def __str__(self) -> str:
        sign = "+" if self.direction > 0 else "-"
        pre, transform = ",".join(self.pre), ",".join(self.transform)
        return f"{self.source}:({pre})-({self.reduction})-({transform})-({self.spread})-({sign})-({self.tilt})"

    @property
    def function(self) -> Expr:
        """The function of a block's scores as a typed expression."""
        tree = Expr(self.source)
        for name in (*self.pre, self.reduction, *(f"of_{name}" for name in self.transform)):
            tree = Expr(name, (tree,))
        return tree

    @property
    def latex(self) -> str:
        """The function as LaTeX."""
        return ALLOCATION_VOCABULARY.latex(self.function)


class BlockValues:
    """Values of genomes on a workbench; pre-processing and reducing, which are slow, happen once per block."""

    def __init__(self, bed: Workbench) -> None:
        self.bed = bed
        self._reduced: dict[tuple[str, tuple[str, ...], str], list[float]] = {}

    def reduced(self, genome: AllocationGenome) -> list[float]:
        """One number per block, before the functions of numbers."""
        key = (genome.source, genome.pre, genome.reduction)
        if key not in self._reduced:
            self._reduced[key] = [self._reduce(block, *key) for block in range(len(self.bed.blocks))]
        return self._reduced[key]

    def _reduce(self, block: int, source: str, pre: tuple[str, ...], reduction: str) -> float:
        vector = block_vector(self.bed, block, source)
        for name in pre:
            vector = PRE[name](vector)
        return REDUCTIONS[reduction](vector)

    def values(self, genome: AllocationGenome, strict: bool = False) -> list[float] | None:
        """One number per block, NaN as 0; None for a genome that is infinite somewhere.

        strict: also None where an inverse sine or cosine gets what it is not defined for; otherwise that is clamped.
        """
        values = []
        for value in self.reduced(genome):
            for name in genome.transform:
                if strict and name in ("ASIN", "ACOS") and abs(value) > 1:
                    return None
                if not math.isfinite(value):
                    break
                value = TRANSFORMS[name](value)
            values.append(0.0 if math.isnan(value) else value)
        return values if all(map(math.isfinite, values)) else None

    def offsets(self, genome: AllocationGenome, strict: bool = False) -> list[float] | None:
        """Offsets of density per block, with mean zero; None for an invalid genome."""
        values = self.values(genome, strict)
        if values is None:
            return None
        spread = spread_out(values, genome.spread / 100, genome.direction)
        return [a + b for a, b in zip(spread, line(len(values), genome.tilt / 100), strict=True)]


def _inside(x: float) -> float:
    return min(max(x, -1.0), 1.0)


def _entropy(x: Tensor) -> float:
    """Of the magnitudes as shares of their sum, in nats."""
    size = x.double().abs()
    total = float(size.sum())
    if total == 0:
        return 0.0
    return math.log(total) - float(torch.xlogy(size, size).sum()) / total
