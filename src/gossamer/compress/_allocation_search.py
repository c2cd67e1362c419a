"""Find the layer allocation that suits one model: by functions, as DSA does, or by the densities themselves.

Both searches run on a workbench with ranks sorted once, so that a candidate costs one short text. The screen adds up,
over all layers, the loss to second order that their sparsity costs; each layer's curve is measured once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from gossamer.compress._allocation import line, owl, uniform
from gossamer.compress._allocation_genome import (
    PRE,
    REDUCTIONS,
    SPREADS,
    TILTS,
    TRANSFORMS,
    AllocationGenome,
    BlockValues,
)
from gossamer.compress._budget import pruned_per_row, to_budget
from gossamer.compress._metric_search import Texts, second_order_loss
from gossamer.compress._ranks import RankedLayers

Log = Callable[[str, float], None]

_STEP = 100
"""Levels of the direct search are hundredths of density."""
_REACH = 30
"""Largest offset of the direct search, hundredths."""


class AllocationBench:
    """Judges offsets of density per block, whoever proposes them; each distinct vector once."""

    def __init__(
        self, layers: RankedLayers, texts: Texts, sparsity: float, log: Log = lambda what, score: None
    ) -> None:
        self.layers, self.texts, self.sparsity, self.log = layers, texts, sparsity, log
        self.sizes = layers.bed.weights_per_block()
        self._curves: list[tuple[list[float], list[float]]] | None = None
        self._scores: dict[tuple[int, ...], float] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.sizes)

    def sparsities(self, offsets: Sequence[float]) -> list[float]:
        """Sparsity per block, exact in total."""
        base = [1 - self.sparsity + offset for offset in offsets]
        return [1 - density for density in to_budget(base, self.sizes, self.sparsity)]

    def pruned(self, offsets: Sequence[float]) -> list[int]:
        """Zeros per row of every layer."""
        per_block = self.sparsities(offsets)
        layers = self.layers.bed.layers
        shapes = [(layer.weight.shape[0], layer.weight.shape[1]) for layer in layers]
        return pruned_per_row(shapes, [per_block[layer.block] for layer in layers])

    def key(self, offsets: Sequence[float]) -> str:
        """The sparsities to three digits."""
        return " ".join(f"{value:.3f}" for value in self.sparsities(offsets))

    def score(self, name: str, offsets: Sequence[float]) -> float:
        """Perplexity of the short text."""
        pruned = tuple(self.pruned(offsets))
        if pruned not in self._scores:
            self._scores[pruned] = self.layers.perplexity(pruned, self.texts.short)
        self.log(name, self._scores[pruned])
        return self._scores[pruned]

    def final(self, offsets: Sequence[float], windows: Tensor | None = None) -> float:
        """Perplexity of the long text, or of ``windows``."""
        return self.layers.perplexity(self.pruned(offsets), self.texts.long if windows is None else windows)

    def screen(self, offsets: Sequence[float]) -> float:
        """Loss to second order, summed over layers, in nats per token."""
        if self._curves is None:
            self._curves = loss_curves(self.layers)
        per_block = self.sparsities(offsets)
        return sum(
            float(np.interp(per_block[layer.block], *curve))
            for layer, curve in zip(self.layers.bed.layers, self._curves, strict=True)
        )

    def sensitivity(self) -> list[float]:
        """Offsets that minimise the screen: each block is pruned until one more weight costs the same everywhere.

        Marginal costs come from the curves of :func:`loss_curves`, made convex; the multiplier is found by bisection.
        """
        self.screen(uniform(self.blocks))
        assert self._curves is not None
        costs = _block_costs(self)
        marginal = [np.maximum.accumulate(np.diff(cost) / size) for cost, size in zip(costs, self.sizes, strict=True)]
        steps = np.linspace(0.0, 1.0, len(costs[0]))
        low, high = 0.0, float(max(slope.max() for slope in marginal))
        for _ in range(60):
            price = (low + high) / 2
            chosen = [float(steps[bisect.bisect_right(list(slope), price)]) for slope in marginal]
            if sum(value * size for value, size in zip(chosen, self.sizes, strict=True)) < self.sparsity * sum(
                self.sizes
            ):
                low = price
            else:
                high = price
        return [self.sparsity - value for value in chosen]


def _block_costs(bench: AllocationBench) -> list[np.ndarray]:
    """Loss of every block at 101 sparsities from 0 to 1."""
    grid = np.linspace(0.0, 1.0, 101)
    costs = [np.zeros(101) for _ in bench.sizes]
    assert bench._curves is not None
    for layer, curve in zip(bench.layers.bed.layers, bench._curves, strict=True):
        costs[layer.block] += np.interp(grid, *curve)
    return costs


CURVE = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def loss_curves(layers: RankedLayers) -> list[tuple[list[float], list[float]]]:
    """Per layer, sparsities and the loss to second order at each."""
    curves = []
    for layer, ranks in zip(layers.bed.layers, layers.ranks, strict=True):
        losses = [
            second_order_loss(layer, layer.weight * (ranks < round(sparsity * ranks.shape[1]))) for sparsity in CURVE
        ]
        curves.append((list(CURVE), losses))
    return curves


class FunctionProblem:
    """Search for an :class:`AllocationGenome`; genomes with the same sparsities are the same."""

    def __init__(self, bench: AllocationBench, values: BlockValues, strict: bool = False, tilts: bool = True) -> None:
        self.bench, self.values, self.strict = bench, values, strict
        self.tilts: tuple[int, ...] = tuple(TILTS) if tilts else (0,)
        gradients = all(layer.gradients is not None for layer in bench.layers.bed.layers)
        self.sources = ("wanda", "magnitude", *(["fisher"] if gradients else []))

    def seeds(self) -> list[AllocationGenome]:
        """Uniform, straight lines, OWL, and the published function in both directions."""
        published = AllocationGenome.parse("W:(ABSLOG)-(VAR)-(ATAN,ASIN)-(7)")
        plain = [AllocationGenome(spread=0), published, replace(published, direction=-1)]
        lines = [AllocationGenome(spread=0, tilt=tilt) for tilt in self.tilts if tilt in (4, 8, 12, 16)]
        return [*plain, *lines, AllocationGenome(reduction="OUTLIERS", direction=-1)]

    def random(self, rng: np.random.Generator) -> AllocationGenome:
        """Every gene at random."""
        return AllocationGenome(
            _pick(rng, self.sources),
            tuple(_pick(rng, tuple(PRE)) for _ in range(int(rng.integers(3)))),
            _pick(rng, tuple(REDUCTIONS)),
            tuple(_pick(rng, tuple(TRANSFORMS)) for _ in range(int(rng.integers(3)))),
            int(rng.integers(SPREADS.start, SPREADS.stop)),
            1 if rng.integers(2) else -1,
            self.tilts[int(rng.integers(len(self.tilts)))],
        )

    def cross(self, left: AllocationGenome, right: AllocationGenome, rng: np.random.Generator) -> AllocationGenome:
        """Whole stages from either parent."""
        chosen = [left if rng.integers(2) else right for _ in range(6)]
        a, b, c, d, e, f = chosen
        return AllocationGenome(a.source, b.pre, c.reduction, d.transform, e.spread, e.direction, f.tilt)

    def mutate(self, genome: AllocationGenome, rng: np.random.Generator) -> AllocationGenome:
        """Change one gene; steps of numbers are small."""
        kind = int(rng.integers(7))
        if kind == 0:
            return replace(genome, pre=_edited(genome.pre, tuple(PRE), rng))
        if kind == 1:
            return replace(genome, reduction=_pick(rng, tuple(REDUCTIONS)))
        if kind == 2:
            return replace(genome, transform=_edited(genome.transform, tuple(TRANSFORMS), rng))
        if kind == 3:
            return replace(genome, source=_pick(rng, self.sources))
        if kind == 4:
            return replace(genome, direction=-genome.direction)
        if kind == 5:
            spread = genome.spread + int(rng.integers(1, 4)) * (1 if rng.integers(2) else -1)
            return replace(genome, spread=min(max(spread, SPREADS.start), SPREADS.stop - 1))
        place = self.tilts.index(genome.tilt) + (1 if rng.integers(2) else -1)
        return replace(genome, tilt=self.tilts[min(max(place, 0), len(self.tilts) - 1)])

    def offsets(self, genome: AllocationGenome) -> list[float] | None:
        """Of density per block; None for an invalid genome."""
        return self.values.offsets(genome, self.strict)

    def key(self, genome: AllocationGenome) -> str | None:
        """The sparsities that the genome leads to."""
        offsets = self.offsets(genome)
        return None if offsets is None else self.bench.key(offsets)

    def size(self, genome: AllocationGenome) -> int:
        """Operations, and one more for a tilt."""
        return 1 + len(genome.pre) + len(genome.transform) + (genome.tilt != 0) if genome.spread else 1

    def screen(self, genome: AllocationGenome) -> float:
        """See :meth:`AllocationBench.screen`."""
        return self.bench.screen(self._valid(genome))

    def score(self, genome: AllocationGenome) -> float:
        """See :meth:`AllocationBench.score`."""
        return self.bench.score(str(genome), self._valid(genome))

    def final(self, genome: AllocationGenome) -> float:
        """See :meth:`AllocationBench.final`."""
        return self.bench.final(self._valid(genome))

    def encode(self, genome: AllocationGenome) -> str:
        """As printed."""
        return str(genome)

    def decode(self, text: str) -> AllocationGenome:
        """The inverse of :meth:`encode`."""
        return AllocationGenome.parse(text)

    def _valid(self, genome: AllocationGenome) -> list[float]:
        offsets = self.offsets(genome)
        if offsets is None:
            raise ValueError(f"allocation {genome} has no finite value for every block")
        return offsets


class LevelProblem:
    """Search the densities directly: hundredths of offset per block, one block up and one down at a time.

    The honest competitor of any function (after the level switches of EvoPress, Sieberling et al., 2024): it has as many
    genes as blocks and knows nothing of them.
    """

    def __init__(self, bench: AllocationBench) -> None:
        self.bench = bench

    def seeds(self) -> list[tuple[int, ...]]:
        """Uniform, straight lines, OWL, half of what minimises the screen, and that on top of two lines."""
        blocks = self.bench.blocks
        lines = [line(blocks, slope) for slope in (0.04, 0.08, 0.12, 0.16)]
        known = [uniform(blocks), *lines, owl(self.bench.layers.bed)]
        if self._screens:
            half = [0.5 * value for value in self.bench.sensitivity()]
            known.append(half)
            known += [[a + b for a, b in zip(half, slope, strict=True)] for slope in lines[:2]]
        return [_levels(offsets) for offsets in known]

    @property
    def _screens(self) -> bool:
        return all(layer.gradients is not None for layer in self.bench.layers.bed.layers)

    def random(self, rng: np.random.Generator) -> tuple[int, ...]:
        """A line of random slope with noise."""
        slope, noise = rng.uniform(-0.1, 0.2), rng.normal(0.0, 0.03, self.bench.blocks)
        return _levels([a + float(b) for a, b in zip(line(self.bench.blocks, slope), noise, strict=True)])

    def cross(self, left: tuple[int, ...], right: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
        """The blocks before a random one from one parent, the others from the other."""
        place = int(rng.integers(1, max(len(left), 2)))
        return left[:place] + right[place:]

    def mutate(self, genome: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
        """Move one to four hundredths from one block to another, one to three times."""
        levels = list(genome)
        for _ in range(int(rng.integers(1, 4))):
            up, down, step = int(rng.integers(len(levels))), int(rng.integers(len(levels))), int(rng.integers(1, 5))
            levels[up] = min(levels[up] + step, _REACH)
            levels[down] = max(levels[down] - step, -_REACH)
        return tuple(levels)

    def key(self, genome: tuple[int, ...]) -> str | None:
        """The sparsities that the levels lead to."""
        return self.bench.key(_offsets(genome))

    def size(self, genome: tuple[int, ...]) -> int:
        """All are equally complex."""
        return 0

    def screen(self, genome: tuple[int, ...]) -> float:
        """See :meth:`AllocationBench.screen`."""
        return self.bench.screen(_offsets(genome))

    def score(self, genome: tuple[int, ...]) -> float:
        """See :meth:`AllocationBench.score`."""
        return self.bench.score(self.encode(genome), _offsets(genome))

    def final(self, genome: tuple[int, ...]) -> float:
        """See :meth:`AllocationBench.final`."""
        return self.bench.final(_offsets(genome))

    def encode(self, genome: tuple[int, ...]) -> str:
        """As numbers."""
        return " ".join(map(str, genome))

    def decode(self, text: str) -> tuple[int, ...]:
        """The inverse of :meth:`encode`."""
        return tuple(map(int, text.split()))

    def offsets(self, genome: tuple[int, ...]) -> list[float]:
        """Of density per block."""
        return _offsets(genome)


def _levels(offsets: Sequence[float]) -> tuple[int, ...]:
    return tuple(max(min(round(_STEP * value), _REACH), -_REACH) for value in offsets)


def _offsets(levels: Sequence[int]) -> list[float]:
    return [level / _STEP for level in levels]


def _edited(names: tuple[str, ...], known: tuple[str, ...], rng: np.random.Generator) -> tuple[str, ...]:
    """One name added, dropped or exchanged; at most two remain."""
    kind = int(rng.integers(3))
    if kind == 0 and names:
        place = int(rng.integers(len(names)))
        return names[:place] + names[place + 1 :]
    if kind == 1 and names:
        place = int(rng.integers(len(names)))
        return (*names[:place], _pick(rng, known), *names[place + 1 :])
    return (*names, _pick(rng, known))[-2:]


def _pick(rng: np.random.Generator, names: Sequence[str]) -> str:
    return names[int(rng.integers(len(names)))]
