"""How bursty arrivals are, and models that are as bursty: gaps, counts, lengths.

A Poisson stream has a coefficient of variation of 1 and a Fano factor of 1 at every scale. Services have neither. The
model here keeps the counts of short windows in stretches, so that bursts and lulls follow each other as in the trace,
and draws Gamma gaps inside a window (Wang et al., KDD 2025, fit Gamma gaps per 20 minutes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossamer.cluster.traces.requests import RequestTrace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FEW = 50
_BATCH = 1e-3


def coefficient_of_variation(gaps: NDArray) -> float:
    """Standard deviation of the gaps over their mean: 1 for Poisson."""
    if len(gaps) < 2 or not gaps.mean() > 0:
        raise ValueError("gaps must be at least two, with a positive mean")
    return float(gaps.std() / gaps.mean())


def counts_per(arrival: NDArray, window: float, duration: float | None = None) -> NDArray:
    """Arrivals in each full window of ``window`` seconds."""
    if not window > 0:
        raise ValueError(f"window must be positive, got {window}")
    end = duration if duration is not None else float(arrival[-1]) if len(arrival) else 0.0
    windows = max(1, int(end / window))
    return np.bincount((arrival[arrival < windows * window] / window).astype(np.int64), minlength=windows)


def fano(arrival: NDArray, window: float) -> float:
    """Variance over mean of the counts per window: 1 for Poisson at every window."""
    counts = counts_per(arrival, window)
    return float(counts.var() / counts.mean())


def autocorrelation(arrival: NDArray, window: float, lags: int) -> NDArray:
    """Correlation of the counts per window with those 1 to ``lags`` windows later."""
    counts = counts_per(arrival, window).astype(float)
    centred = counts - counts.mean()
    power = (centred**2).sum()
    return np.array([(centred[lag:] * centred[:-lag]).sum() / power for lag in range(1, lags + 1)])


def hurst(arrival: NDArray, shortest: float = 1.0) -> float:
    """Hurst exponent by the variance of counts over growing windows: 0.5 without memory, towards 1 with much."""
    counts = counts_per(arrival, shortest).astype(float)
    sizes = [2**power for power in range(0, int(np.log2(len(counts) / 16)) + 1)]
    variances = [counts[: len(counts) // size * size].reshape(-1, size).mean(axis=1).var() for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(np.maximum(variances, 1e-300)), 1)[0]
    return float(1 + slope / 2)


def spread_whole_seconds(arrival: NDArray, seed: int = 0) -> NDArray:
    """Arrivals known to the second, put anywhere within it: zero gaps of a rounded trace are no bursts."""
    if (arrival != np.floor(arrival)).any():
        raise ValueError("arrival is not in whole seconds")
    return np.sort(arrival + np.random.default_rng(seed).uniform(0, 1, len(arrival)))


@dataclass(frozen=True)
class GammaGaps:
    """Gamma gaps: ``shape`` k (1 is Poisson; below, bursty) and ``rate`` in requests per second."""

    shape: float
    rate: float

    @property
    def variation(self) -> float:
        """Coefficient of variation, ``1 / sqrt(k)``."""
        return self.shape**-0.5

    def sample(self, count: int, seed: int) -> NDArray:
        """Arrival times of ``count`` requests: the same gaps as ``vllm bench serve --burstiness``."""
        scale = 1.0 / (self.rate * self.shape)
        return np.cumsum(np.random.default_rng(seed).gamma(shape=self.shape, scale=scale, size=count))

    @classmethod
    def fit(cls, gaps: NDArray) -> GammaGaps:
        """Maximum likelihood; zero gaps are read as the smallest positive one.

        Raises:
            ValueError: fewer than 50 gaps, or one is negative, or all are zero.
        """
        gaps = np.asarray(gaps, dtype=float)
        if len(gaps) < _FEW or (gaps < 0).any() or not gaps.max(initial=0) > 0:
            raise ValueError(f"gaps must be at least {_FEW}, none negative and not all zero, got {len(gaps)}")
        positive = np.where(gaps > 0, gaps, gaps[gaps > 0].min())
        return cls(_gamma_shape(np.log(positive.mean()) - np.log(positive).mean()), float(1 / gaps.mean()))

    @classmethod
    def by_moments(cls, gaps: NDArray) -> GammaGaps:
        """The Gamma of the same mean and coefficient of variation."""
        return cls(coefficient_of_variation(gaps) ** -2, float(1 / np.mean(gaps)))


def _gamma_shape(s: float) -> float:
    """Newton's iteration of Minka for the shape, from ``s = log(mean) - mean(log)``."""
    from scipy.special import digamma, polygamma

    k = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for _ in range(30):
        step = (np.log(k) - digamma(k) - s) / (1 / k - polygamma(1, k)) / k**2
        k = 1 / (1 / k + step)
    return float(k)


def gap_criteria(gaps: NDArray) -> dict[str, float]:
    """Akaike's criterion of four families fitted to positive gaps; the smallest describes them best."""
    from scipy import stats

    gaps = np.asarray(gaps, dtype=float)
    gaps = gaps[gaps > 0]
    families = {
        "exponential": stats.expon,
        "gamma": stats.gamma,
        "weibull": stats.weibull_min,
        "log-normal": stats.lognorm,
    }
    found = {}
    for name, family in families.items():
        parameters = family.fit(gaps, floc=0)
        found[name] = float(2 * (len(parameters) - 1) - 2 * family.logpdf(gaps, *parameters).sum())
    return found


@dataclass(frozen=True)
class ZipfLengths:
    """Token counts with probability in proportion to ``n ** -exponent``, for n from 1 to ``longest``."""

    exponent: float
    longest: int

    def probabilities(self) -> NDArray:
        """Of 1, 2, ... tokens."""
        weights = np.arange(1, self.longest + 1, dtype=float) ** -self.exponent
        return weights / weights.sum()

    def sample(self, count: int, seed: int) -> NDArray:
        """``count`` token counts."""
        edges = np.cumsum(self.probabilities())
        return np.searchsorted(edges, np.random.default_rng(seed).uniform(0, edges[-1], count), side="right") + 1

    @classmethod
    def fit(cls, lengths: NDArray, longest: int | None = None) -> ZipfLengths:
        """Maximum likelihood of the exponent; failures (0 tokens) must be taken out before.

        Raises:
            ValueError: a length is below 1 or above ``longest``.
        """
        from scipy.optimize import minimize_scalar

        lengths = np.asarray(lengths)
        top = int(longest or lengths.max())
        if lengths.min() < 1 or lengths.max() > top:
            raise ValueError(f"lengths must lie between 1 and {top}, got {lengths.min()} to {lengths.max()}")
        logs, mean = np.log(np.arange(1, top + 1)), float(np.log(lengths).mean())

        def unlikelihood(exponent: float) -> float:
            return exponent * mean + float(np.log(np.exp(-exponent * logs).sum()))

        return cls(float(minimize_scalar(unlikelihood, bounds=(-2.0, 6.0), method="bounded").x), top)


@dataclass(frozen=True)
class ArrivalModel:
    """A trace's arrivals and lengths, to draw traces like it from.

    window: seconds. counts: arrivals in each window, in order. gaps: Gamma gaps inside busy windows. lengths:
    ``(prompt, output)`` pairs as they were, in order.
    """

    window: float
    counts: NDArray
    gaps: GammaGaps
    lengths: NDArray

    @classmethod
    def fit(cls, trace: RequestTrace, window: float = 1.0) -> ArrivalModel:
        """Learn from a trace.

        Raises:
            ValueError: fewer than 50 requests, or a window that is not positive.
        """
        if len(trace) <= _FEW:
            raise ValueError(f"trace must have more than {_FEW} requests, got {len(trace)}")
        counts = counts_per(trace.arrival, window, duration=float(trace.arrival[-1]) + window)
        index = (trace.arrival / window).astype(np.int64)
        inside = trace.gaps[index[1:] == index[:-1]]
        if len(inside) < _FEW:
            gaps = GammaGaps(1.0, 1 / window)
        elif not inside.max() > 0:  # every window holds one batch
            gaps = GammaGaps(_BATCH, 1 / window)
        else:
            gaps = GammaGaps.fit(inside)
        return cls(window, counts, gaps, np.stack([trace.prompt, trace.output], axis=1))

    @property
    def rate(self) -> float:
        """Requests per second."""
        return float(self.counts.sum() / (len(self.counts) * self.window))

    def sample(self, duration: float, seed: int, rate: float | None = None, stretch: float = 300.0) -> RequestTrace:
        """Draw a trace of ``duration`` seconds.

        Stretches of consecutive windows are drawn from the model with wrap-around; inside a window gaps are Gamma,
        scaled to fill it. Lengths are consecutive pairs from the same place, so that their correlation is kept.

        rate: requests per second; time is compressed or stretched to it.
        stretch: seconds drawn at a time; longer keeps slower rhythms.

        Raises:
            ValueError: a duration, rate or stretch is not positive.
        """
        factor = 1.0 if rate is None else self.rate / rate
        if not (duration > 0 and factor > 0 and stretch > 0):
            raise ValueError(f"duration, rate and stretch must be positive, got {duration}, {rate}, {stretch}")
        rng = np.random.default_rng(seed)
        windows = max(1, int(np.ceil(duration / factor / self.window)))
        size = max(1, min(len(self.counts), round(stretch / self.window)))
        starts = rng.integers(len(self.counts), size=-(-windows // size))
        order = ((starts[:, None] + np.arange(size)) % len(self.counts)).ravel()[:windows]
        counts, before = self.counts[order], np.concatenate([[0], np.cumsum(self.counts)])
        total = int(counts.sum())
        arrival = np.repeat(np.arange(windows), counts) + self._inside(counts, total, rng)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(before[order], counts) + np.arange(total) - first
        arrival = np.maximum.accumulate(arrival * self.window * factor)
        keep = arrival < duration
        lengths = self.lengths[rows[keep]]
        return RequestTrace(arrival[keep], lengths[:, 0], lengths[:, 1])

    def _inside(self, counts: NDArray, total: int, rng: np.random.Generator) -> NDArray:
        """Places within the windows, 0 to 1: Gamma gaps, one more than arrivals, normed to the window."""
        busy = counts[counts > 0]
        if not total:
            return np.zeros(0)
        gaps = rng.gamma(self.gaps.shape, size=total + len(busy))
        ends = np.cumsum(busy + 1)
        sums = np.add.reduceat(gaps, ends - busy - 1)
        running = np.cumsum(gaps) - np.repeat(np.concatenate([[0.0], np.cumsum(sums)[:-1]]), busy + 1)
        places = running / np.repeat(np.maximum(sums, 1e-300), busy + 1)
        return np.clip(np.delete(places, ends - 1), 0.0, 1 - 1e-12)
