"""Which score, allocation and format for a given budget? Try the candidates on one workbench, and keep the Pareto front.

Every candidate gives its size, by the formula of its format, and its perplexity on a short text, pruned by the statistics
of the dense model, and on the CPU the time that its linear layers take for one token. What a user would pick instead,
8-bit rows and 4-bit groups, stands among the points. The chosen candidate is then made by :func:`compress`, which
calibrates block by block.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.compress._allocation import line
from gossamer.compress._binarise import binarise
from gossamer.compress._budget import to_budget
from gossamer.compress._decode_matrices import DENSE, bind_matrix
from gossamer.compress._metric import NAMED_METRICS
from gossamer.compress._prune import prune
from gossamer.compress._quantised import Quantised, quantised_ways
from gossamer.compress._settings import Settings
from gossamer.compress._workbench import BenchLayer, Workbench
from gossamer.core.measure import Bench
from gossamer.weights import BitmapWeight, STBLevels, STBWeight, WeightFormat

SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7)
PATTERNS = ("4:8", "5:8", "6:8")
SCORES = ("wanda", NAMED_METRICS["fisher-wanda"])
ROUNDS = 5

Call = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """One way to store the linear layers.

    settings: None for a mere comparison. weight: what a layer holds; nbytes: in how many bytes. products: calls that
    multiply one token by the stored layer, by the kernel's name; the fastest counts.
    """

    name: str
    settings: Settings | None
    weight: Callable[[BenchLayer], Tensor]
    nbytes: Callable[[BenchLayer, Tensor], float]
    products: Callable[[BenchLayer, Tensor], Mapping[str, Call]] = lambda layer, weight: {}


@dataclass(frozen=True)
class Point:
    """What a candidate came to.

    bytes: of the whole model. perplexity: on the search text. seconds: of all linear layers for one token, None where that
    was not measured. front: no point is better in bytes or perplexity and as good in the other.
    """

    name: str
    bytes: int
    perplexity: float
    settings: dict[str, Any] | None
    front: bool = False
    seconds: float | None = None


def candidates(bed: Workbench, base: Settings) -> Iterator[Candidate]:
    """All candidates, the quick ones first; ``base`` gives what they share."""
    sizes = bed.weights_per_block()
    whole = replace(base, sparsity=0.0, format="dense")
    yield Candidate("dense", whole, lambda layer: layer.weight, _dense_bytes, _dense_products)
    for way in quantised_ways():
        yield _comparison(way)
    for score in (*SCORES, "sparsegpt"):
        for sparsity in SPARSITIES:
            for slope in (0.0, 0.08):
                offsets = line(len(sizes), slope)
                densities = to_budget([1 - sparsity + offset for offset in offsets], sizes, sparsity)
                found = tuple(round(1 - density, 6) for density in densities) if slope else None
                settings = replace(base, score=score, sparsity=sparsity, allocation=found, format="bitmap")
                name = f"{score} at {sparsity:.0%}{', early blocks denser' if slope else ''}"
                yield Candidate(
                    name,
                    settings,
                    _pruner(settings, sizes),
                    _bitmap_bytes(settings.dtype),
                    _bitmap_product(settings.dtype),
                )
    for pattern in PATTERNS:
        settings = replace(base, score="ria", pattern=pattern, format="stb")
        own = _Binariser(int(pattern[0]))
        yield Candidate(f"binarised {pattern}", settings, own.weight, own.nbytes, own.products)


def measure(bed: Workbench, windows: Tensor, candidate: Candidate, others: int) -> Point:
    """One candidate; ``others`` are the bytes of everything that is not in its layers."""
    total, timed = float(others), bed.device.type == "cpu"
    calls: dict[str, list[Call]] = {}

    def weights() -> Iterator[tuple[BenchLayer, Tensor]]:
        nonlocal total
        for layer in bed.layers:
            weight = candidate.weight(layer)
            total += candidate.nbytes(layer, weight)
            for kernel, call in (candidate.products(layer, weight) if timed else {}).items():
                calls.setdefault(kernel, []).append(call)
            yield layer, weight

    perplexity = bed.perplexity(weights(), windows)
    settings = None if candidate.settings is None else asdict(candidate.settings)
    return Point(candidate.name, round(total), perplexity, settings, seconds=_fastest(calls.values()))


@torch.inference_mode()
def _fastest(kernels: Iterable[Sequence[Call]]) -> float | None:
    """Seconds for all layers one after the other, as a token passes them: no layer is in the cache from the last token."""
    bench = Bench(samples=ROUNDS, sample_seconds=0.0)
    return min((statistics.median(bench.seconds(partial(_run, calls))) for calls in kernels), default=None)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


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


def better_comparisons(points: Sequence[Point], chosen: Point) -> list[Point]:
    """Mere comparisons that are no larger and no worse than ``chosen``: what its user should look at first.

    >>> chosen = Point("pruned", 10, 5.0, {})
    >>> [point.name for point in better_comparisons([chosen, Point("int4", 8, 4.0, None)], chosen)]
    ['int4']
    """
    return [p for p in points if p.settings is None and p.bytes <= chosen.bytes and p.perplexity <= chosen.perplexity]


def _comparison(way: Quantised) -> Candidate:
    def products(layer: BenchLayer, weight: Tensor) -> dict[str, Call]:
        return {} if way.multiply is None else {"torchao": way.multiply(layer.weight)}

    return Candidate(
        way.name, None, lambda layer: way.weight(layer.weight),
        lambda layer, _: layer.weight.numel() * way.bits(layer.weight) / 8, products,
    )  # fmt: skip


def _dense_products(layer: BenchLayer, weight: Tensor) -> dict[str, Call]:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    x, out = np.ones(weight.shape[1], np.float32), np.empty(weight.shape[0], np.float32)
    return {kernel: bind_matrix(linear, x, out, torch.get_num_threads(), kernel) for kernel in DENSE}


def _product(stored: WeightFormat) -> dict[str, Call]:
    x, out = np.ones(stored.shape[1], np.float32), np.empty(stored.shape[0], np.float32)
    return {stored.name: partial(stored.bind(torch.get_num_threads()), x, out)}


def _bitmap_product(dtype: str) -> Callable[[BenchLayer, Tensor], Mapping[str, Call]]:
    item = getattr(torch, dtype)
    return lambda layer, weight: _product(BitmapWeight.from_dense(weight.to(item).cpu(), layout="rows"))


def _pruner(settings: Settings, sizes: list[int]) -> Callable[[BenchLayer], Tensor]:
    return lambda layer: prune(layer.weight, layer.statistics, settings.of_block(layer.block, sizes), layer.gradients)


class _Binariser:
    """Keeps the levels of the layer that it binarised last, from which that is packed."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._last: tuple[str, STBLevels] | None = None

    def weight(self, layer: BenchLayer) -> Tensor:
        levels = binarise(layer.weight, layer.statistics, self.n)
        self._last = (layer.name, levels)
        return levels.to_dense()

    def products(self, layer: BenchLayer, weight: Tensor) -> dict[str, Call]:
        assert self._last is not None and self._last[0] == layer.name
        return _product(STBWeight.from_levels(self._last[1]))

    def nbytes(self, layer: BenchLayer, weight: Tensor) -> float:
        return float(_stb_size(layer.weight.shape[0], layer.weight.shape[1], self.n))


def _dense_bytes(layer: BenchLayer, weight: Tensor) -> float:
    return 2.0 * weight.numel()


def _bitmap_bytes(dtype: str) -> Callable[[BenchLayer, Tensor], float]:
    item = getattr(torch, dtype).itemsize

    def nbytes(layer: BenchLayer, weight: Tensor) -> float:
        rows, columns = weight.shape
        return 8.0 * rows * -(-columns // 64) + item * int((weight != 0).sum()) + 8 * (rows + 1)

    return nbytes


@lru_cache(maxsize=64)
def _stb_size(rows: int, columns: int, n: int) -> int:
    """Of any matrix of this shape: the container's size does not depend on what it holds."""
    padded = torch.zeros(min(rows, 64), columns)
    return STBWeight.from_dense(padded, n=n).nbytes * -(-rows // 64)
