"""The only way to time things here, and the claims that a measurement has to meet.

A time alone says little on a shared machine, so every comparison is interleaved: ours, peer, ours, peer, ...; the
figure is the median over rounds of ``peer time / our time``, and its spread is what the middle 80 % of rounds gave.
Data are rotated past the last cache by giving several callables, one per copy (:func:`copies_past_cache` says how
many). A **claim** is a benchmark function with an id, a peer, a bar and a summary; what it measured is written down
by :mod:`gossamer.core.records`.

>>> bench = Bench(samples=5, sample_seconds=1e-4)
>>> row = bench.compare("sum of 1000", ours=lambda: sum(range(1000)), peer=lambda: sum(range(20_000)))
>>> row.ratio > 2
True
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from gossamer.core.cuda_graphs import GraphRacer

Call = Callable[[], object]
Contender = Call | Sequence[Call]
Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Row:
    """One case of a claim.

    case: what was measured, like ``"4096x4096"``.
    ours, peer: medians in ``unit`` (seconds per call for comparisons); ``peer`` is None where there is none.
    ratio: median over rounds of ``peer / ours``, above 1 where ours is faster; None for a plain value.
    spread: the 10 % and 90 % quantiles of the ratio (of the value, where there is no ratio).
    peer_name: the peer behind ``peer``: the fastest of those given.
    others: medians of the peers that were not the fastest.
    counted: whether the summary of the claim takes this row.
    """

    case: str
    ours: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    peer_name: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    samples: int = 1
    counted: bool = True
    note: str = ""

    @property
    def measured(self) -> float:
        """What the claim's summary takes: the ratio, or the value where there is none."""
        return self.ours if self.ratio is None else self.ratio

    def as_json(self) -> dict[str, Any]:
        """The row as JSON scalars, lists and objects."""
        return asdict(self)


class Bench:
    """What a benchmark function measures with.

    samples: interleaved rounds per case, at least 3.
    sample_seconds: calls shorter than this are repeated until one sample takes about as long.
    case_seconds: a case that would take longer gets fewer rounds, but never fewer than 5 (or ``samples``).
    """

    def __init__(self, samples: int = 25, sample_seconds: float = 2e-3, case_seconds: float = 20.0) -> None:
        if samples < 3:
            raise ValueError(f"samples must be at least 3 for a median and a spread, got {samples}")
        self.samples = samples
        self.sample_seconds = sample_seconds
        self.case_seconds = case_seconds
        self._threads = 1
        self._racer: type[_Racer] | type[GraphRacer] = _Racer

    def compare(
        self,
        case: object,
        ours: Contender,
        peer: Contender | Mapping[str, Contender],
        counted: bool = True,
        note: str = "",
    ) -> Row:
        """Time ``ours`` against ``peer`` (or the fastest of several named peers), interleaved.

        A contender is a callable without arguments or a sequence of them; successive calls go through the sequence
        in turn, so that each works on data which the calls before have pushed out of the caches.

        case: a label, or a shape, which is written as ``4096x4096``.
        """
        named = dict(peer) if isinstance(peer, Mapping) else {"": peer}
        if not named:
            raise ValueError("peer must name at least one contender, got an empty mapping")
        racers = [self._racer(ours), *(self._racer(contender) for contender in named.values())]
        rounds = self._interleaved(racers)
        ours_times, *peer_times = zip(*rounds, strict=True)
        medians = {name: statistics.median(times) for name, times in zip(named, peer_times, strict=True)}
        fastest = min(medians, key=medians.__getitem__)
        fastest_times = peer_times[list(named).index(fastest)]
        ratios = [theirs / mine for mine, theirs in zip(ours_times, fastest_times, strict=True)]
        return Row(
            case=_label(case),
            ours=statistics.median(ours_times),
            unit="s",
            peer=medians[fastest],
            ratio=statistics.median(ratios),
            spread=_spread(ratios),
            peer_name=fastest,
            others={name: time for name, time in medians.items() if name != fastest},
            threads=self._threads,
            samples=len(rounds),
            counted=counted,
            note=note,
        )

    def value(
        self, case: object, measured: float | Sequence[float], unit: str, counted: bool = True, note: str = ""
    ) -> Row:
        """A plain figure, or the median of several, for claims that are no ratio of times.

        >>> Bench().value("encode", [210.0, 200.0, 220.0], "MB/s").measured
        210.0
        """
        values = list(measured) if isinstance(measured, Sequence) else [measured]
        return Row(
            case=_label(case),
            ours=statistics.median(values),
            unit=unit,
            spread=_spread(values) if len(values) > 1 else None,
            threads=self._threads,
            samples=len(values),
            counted=counted,
            note=note,
        )

    def seconds(self, call: Contender) -> list[float]:
        """Seconds per call of one contender, a sample each, after warm-up: for throughputs without a peer."""
        return [times[0] for times in self._interleaved([self._racer(call)])]

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Run a block with ``count`` threads in numba, torch and BLAS libraries, whichever are loaded."""
        if count < 1:
            raise ValueError(f"count of threads must be at least 1, got {count}")
        before = self._threads
        try:
            with _library_threads(count):
                self._threads = count
                yield
        finally:
            self._threads = before

    @contextmanager
    def cuda_graphs(self) -> Iterator[None]:
        """Measure a block's contenders by replaying CUDA graphs of them, on the GPU's own clock.

        Their callables launch work on torch's current GPU and must not synchronise.
        """
        self._racer = GraphRacer
        try:
            yield
        finally:
            self._racer = _Racer

    def _interleaved(self, racers: Sequence[_Racer | GraphRacer]) -> list[list[float]]:
        for racer in racers:
            racer.warm_up(self.sample_seconds)
        once = sum(racer.expected for racer in racers)
        rounds = max(min(self.samples, 5), min(self.samples, int(self.case_seconds / once)))
        collecting = gc.isenabled()
        gc.disable()
        try:
            return [[racer.sample() for racer in racers] for _ in range(rounds)]
        finally:
            if collecting:
                gc.enable()


class _Racer:
    """One contender: its callables in rotation, and how many calls make a sample."""

    def __init__(self, contender: Contender) -> None:
        self._calls: list[Call] = [contender] if callable(contender) else list(contender)
        if not self._calls:
            raise ValueError("a contender must be a callable or a non-empty sequence of callables, got an empty one")
        self._turn = cycle(self._calls)
        self._repeats = 1
        self.expected = 0.0

    def warm_up(self, sample_seconds: float) -> None:
        """Call everything once (compiling, first touch), then settle how many calls make a sample."""
        for call in self._calls:
            call()
        single = min(self.sample() for _ in range(3))
        self._repeats = max(1, math.ceil(sample_seconds / max(single, 1e-9)))
        self.expected = max(single, 1e-9) * self._repeats

    def sample(self) -> float:
        """Seconds per call, over one sample."""
        turn, repeats = self._turn, self._repeats
        start = perf_counter()
        for _ in range(repeats):
            next(turn)()
        return (perf_counter() - start) / repeats


Benchmark = Callable[[Bench], Iterator[Row]]
Summary = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Claim:
    """A sentence about speed, size or quality with a bar, and the function that measures it."""

    id: str
    text: str
    system: tuple[str, ...]
    peer: str
    unit: str
    bar: float
    better: Better
    summary: Summary
    peer_package: str | None
    sources: tuple[str, ...]
    function: Benchmark
    file: Path

    def met(self, measured: float) -> bool:
        """Whether a figure reaches the bar."""
        return measured >= self.bar if self.better == "higher" else measured <= self.bar

    def rows(self, bench: Bench) -> Iterator[Row]:
        """Measure, case by case, on one thread unless the benchmark says otherwise.

        Raises:
            ModuleNotFoundError: the peer is NumPy or SciPy, and nothing is there that can hold them to one thread.
        """
        if self.peer_package in ("numpy", "scipy"):
            import threadpoolctl  # noqa: F401
        with bench.threads(1):
            yield from self.function(bench)


_CLAIMS: dict[str, Claim] = {}


def claim(
    id: str,
    *,
    text: str,
    peer: str,
    unit: str,
    bar: float,
    better: Better,
    summary: Summary,
    system: Sequence[str] = (),
    peer_package: str | None = None,
    sources: Sequence[str] = (),
) -> Callable[[Benchmark], Benchmark]:
    """Register a benchmark function as the measurement of a claim.

    id: stable, lower case with dashes; also the name of the records' folder.
    system: names of entries of ``systems.toml`` that the claim speaks for.
    peer_package: the distribution whose version the record gives as the peer's, like ``"torch"``.
    sources: what the figure depends on beside the benchmark's own file, as globs below ``src/gossamer``, like
        ``"weights/_bitmap*.py"``; without it, every room that the benchmark imports. Where one of them has changed
        since a record was written, the record is stale.

    Raises:
        ValueError: the id is taken by another function, or ``better`` is neither "higher" nor "lower".
    """
    if better not in ("higher", "lower"):
        raise ValueError(f"better must be 'higher' or 'lower', got {better!r}")

    def register(function: Benchmark) -> Benchmark:
        file = Path(function.__code__.co_filename).resolve()
        known = _CLAIMS.get(id)
        if known is not None and (known.file, known.function.__name__) != (file, function.__name__):
            raise ValueError(f"claim {id!r} is measured by {known.function.__name__} in {known.file} already")
        _CLAIMS[id] = Claim(
            id, text, tuple(system), peer, unit, bar, better, summary, peer_package, tuple(sources), function, file
        )
        return function

    return register


def registered_claims() -> dict[str, Claim]:
    """All claims whose benchmark file has been imported, by id."""
    return dict(_CLAIMS)


def geometric_mean(values: Sequence[float]) -> float:
    """The mean of ratios.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return statistics.geometric_mean(values)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def worst(values: Sequence[float]) -> float:
    """The smallest: for claims that every case has to meet."""
    return min(values)


def largest(values: Sequence[float]) -> float:
    """The largest: for times or bytes that no case may exceed."""
    return max(values)


def copies_past_cache(nbytes: int, factor: float = 2.0, limit: int = 3 << 30) -> int:
    """How many copies of ``nbytes`` exceed ``factor`` times the last-level cache without exceeding ``limit`` bytes.

    At least 2, so that no call finds its own data of the call before; more copies than ``limit`` allows are never
    advised, a single array beyond it aside.
    """
    from gossamer.core.hardware import hardware

    if nbytes < 1:
        raise ValueError(f"nbytes must be positive, got {nbytes}")
    wanted = math.floor(factor * hardware().llc_bytes / nbytes) + 1
    return max(2, min(wanted, limit // nbytes))


@contextmanager
def _library_threads(count: int) -> Iterator[None]:
    numba, torch = sys.modules.get("numba"), sys.modules.get("torch")
    numba_before = numba.get_num_threads() if numba else None
    torch_before = torch.get_num_threads() if torch else None
    try:
        if numba:
            numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
        if torch:
            torch.set_num_threads(count)
        with _blas_threads(count):
            yield
    finally:
        if numba:
            numba.set_num_threads(numba_before)
        if torch:
            torch.set_num_threads(torch_before)


def _blas_threads(count: int) -> AbstractContextManager[object]:
    """The libraries behind NumPy's and SciPy's products, which take every core unless they are told.

    The extra "dev" has what tells them; without it (on a GPU machine, say), the environment has to have done so.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        return nullcontext()
    return threadpool_limits(count, user_api="blas")


def _spread(values: Sequence[float]) -> tuple[float, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _label(case: object) -> str:
    return "x".join(map(str, case)) if isinstance(case, tuple) else str(case)
