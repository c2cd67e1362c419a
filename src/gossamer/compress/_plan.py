"""Which score, allocation and format for a given budget? Try the candidates on one workbench, and keep the Pareto front.

Every candidate gives its size, by the formula of its format, and its perplexity on a short text, pruned by the statistics
of the dense model. What a user would pick instead, 8-bit rows and 4-bit groups rounded to nearest, stands among the
points. The chosen candidate is then made by :func:`compress`, which calibrates block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gossamer.compress._allocation import line
from gossamer.compress._binarise import binarise
from gossamer.compress._budget import to_budget
from gossamer.compress._metric import NAMED_METRICS
from gossamer.compress._prune import prune
from gossamer.compress._settings import Settings
from gossamer.compress._workbench import BenchLayer, Workbench
from gossamer.weights import STBWeight

SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7)
PATTERNS = ("4:8", "5:8", "6:8")
SCORES = ("wanda", NAMED_METRICS["fisher-wanda"])
GROUP = 32


@dataclass(frozen=True)
class Candidate:
    """One way to store the linear layers: what they hold, and in how many bytes. settings: None for a mere comparison."""

    name: str
    settings: Settings | None
    weight: Callable[[BenchLayer], Tensor]
    nbytes: Callable[[BenchLayer, Tensor], float]


@dataclass(frozen=True)
class Point:
    """What a candidate came to: bytes of the whole model, perplexity on the search text. front: nothing beats both."""

    name: str
    bytes: int
    perplexity: float
    settings: dict[str, Any] | None
    front: bool = False


def candidates(bed: Workbench, base: Settings) -> Iterator[Candidate]:
    """All candidates, the quick ones first; ``base`` gives what they share."""
    sizes = bed.weights_per_block()
    yield Candidate("dense", replace(base, sparsity=0.0, format="dense"), lambda layer: layer.weight, _dense_bytes)
    yield Candidate("int8 rows, rounded", None, _int8, lambda layer, _: layer.weight.numel() + 4.0 * len(layer.weight))
    yield Candidate(
        f"int4 groups of {GROUP}, rounded", None, _int4, lambda layer, _: layer.weight.numel() * (4.5 + 0.5) / 8
    )
    for score in (*SCORES, "sparsegpt"):
        for sparsity in SPARSITIES:
            for slope in (0.0, 0.08):
                offsets = line(len(sizes), slope)
                densities = to_budget([1 - sparsity + offset for offset in offsets], sizes, sparsity)
                found = tuple(round(1 - density, 6) for density in densities) if slope else None
                settings = replace(base, score=score, sparsity=sparsity, allocation=found, format="bitmap")
                name = f"{score} at {sparsity:.0%}{', early blocks denser' if slope else ''}"
                yield Candidate(name, settings, _pruner(settings, sizes), _bitmap_bytes(settings.dtype))
    for pattern in PATTERNS:
        settings = replace(base, score="ria", pattern=pattern, format="stb")
        yield Candidate(f"binarised {pattern}", settings, _binariser(int(pattern[0])), _stb_bytes(int(pattern[0])))


def measure(bed: Workbench, windows: Tensor, candidate: Candidate, others: int) -> Point:
    """Size and perplexity of one candidate; ``others`` are the bytes of everything that is not in its layers."""
    total = float(others)

    def weights() -> Iterator[tuple[BenchLayer, Tensor]]:
        nonlocal total
        for layer in bed.layers:
            weight = candidate.weight(layer)
            total += candidate.nbytes(layer, weight)
            yield layer, weight

    perplexity = bed.perplexity(weights(), windows)
    settings = None if candidate.settings is None else asdict(candidate.settings)
    return Point(candidate.name, round(total), perplexity, settings)


def with_front(points: Sequence[Point]) -> list[Point]:
    """The points by size, those on the Pareto front marked.

    >>> points = [Point("a", 10, 5.0, None), Point("b", 8, 6.0, None), Point("c", 9, 7.0, None)]
    >>> [(point.name, point.front) for point in with_front(points)]
    [('b', True), ('c', False), ('a', True)]
    """
    marked, best = [], float("inf")
    for point in sorted(points, key=lambda point: (point.bytes, point.perplexity)):
        marked.append(replace(point, front=point.perplexity < best))
        best = min(best, point.perplexity)
    return marked


def choose(points: Sequence[Point], dense: float, target_bytes: int | None, max_increase: float | None) -> Point:
    """The best point that can be made: of least perplexity within ``target_bytes``, or else of least bytes.

    Args:
        dense: perplexity of the dense model; ``max_increase``: by what share a point may exceed it.

    Raises:
        ValueError: no limit is given, or no point keeps them; the message names the nearest.
    """
    if target_bytes is None and max_increase is None:
        raise ValueError("give target_bytes, max_increase, or both")
    made = [point for point in points if point.settings is not None]
    most = float("inf") if max_increase is None else dense * (1 + max_increase)
    fitting = [p for p in made if (target_bytes is None or p.bytes <= target_bytes) and p.perplexity <= most]
    if not fitting:
        small = [point for point in made if target_bytes is None or point.bytes <= target_bytes]
        nearest = min(small or made, key=lambda point: point.perplexity if small else point.bytes)
        raise ValueError(
            f"nothing keeps the limits; nearest: {nearest.name} with {nearest.bytes} bytes "
            f"and perplexity {nearest.perplexity:.2f} ({nearest.perplexity / dense - 1:+.1%})"
        )
    return min(fitting, key=(lambda p: p.bytes) if target_bytes is None else (lambda p: p.perplexity))


def _pruner(settings: Settings, sizes: list[int]) -> Callable[[BenchLayer], Tensor]:
    return lambda layer: prune(layer.weight, layer.statistics, settings.of_block(layer.block, sizes), layer.gradients)


def _binariser(n: int) -> Callable[[BenchLayer], Tensor]:
    return lambda layer: binarise(layer.weight, layer.statistics, n).to_dense()


def _dense_bytes(layer: BenchLayer, weight: Tensor) -> float:
    return 2.0 * weight.numel()


def _bitmap_bytes(dtype: str) -> Callable[[BenchLayer, Tensor], float]:
    item = getattr(torch, dtype).itemsize

    def nbytes(layer: BenchLayer, weight: Tensor) -> float:
        rows, columns = weight.shape
        return 8.0 * rows * -(-columns // 64) + item * int((weight != 0).sum()) + 8 * (rows + 1)

    return nbytes


def _stb_bytes(n: int) -> Callable[[BenchLayer, Tensor], float]:
    return lambda layer, _: float(_stb_size(layer.weight.shape[0], layer.weight.shape[1], n))


@lru_cache(maxsize=64)
def _stb_size(rows: int, columns: int, n: int) -> int:
    """Of any matrix of this shape: the container's size does not depend on what it holds."""
    padded = torch.zeros(min(rows, 64), columns)
    return STBWeight.from_dense(padded, n=n).nbytes * -(-rows // 64)


def _int8(layer: BenchLayer) -> Tensor:
    scale = layer.weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    return (layer.weight / scale).round() * scale


def _int4(layer: BenchLayer) -> Tensor:
    """Sixteen levels between the least and the largest of every group of inputs."""
    rows, columns = layer.weight.shape
    padded = torch.nn.functional.pad(layer.weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    low, high = padded.amin(2, keepdim=True), padded.amax(2, keepdim=True)
    scale = (high - low).clamp_min(1e-12) / 15
    return (((padded - low) / scale).round() * scale + low).view(rows, -1)[:, :columns]
