"""What messages cost: the alpha-beta-gamma model of collectives, its constants, and their calibration.

A message of ``n`` bytes takes ``alpha + beta n`` seconds, adding ``n`` received bytes takes ``gamma n``; collectives are
sums of messages (Thakur et al., IJHPCA 2005). Real networks slow down when all nodes talk at once: a congestion factor
per number of ranks multiplies what a collective sends (not its start-up).

>>> link = preset("1gbe")
>>> round(link.all_reduce(100e6, ranks=8), 3)  # seconds for 25 million float32 gradients
1.581
>>> round(1e3 * link.gtopk_butterfly(25_000, ranks=8), 2)  # milliseconds for one thousandth of them
6.71
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gossamer.core.files import write_json

_PAIR_BYTES = 8  # an int32 index and a float32 value
_FILE_VERSION = 1


@dataclass(frozen=True)
class CommModel:
    """A network between equal ranks.

    alpha: seconds to start a message. beta: seconds per byte sent. gamma: seconds per byte added into another.
    congestion: factor on beta by number of ranks; between the given numbers it follows a straight line in the
        logarithms, outside them the nearest holds. Empty: none.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    congestion: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value}")
        for ranks, factor in self.congestion.items():
            if ranks < 1 or not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"congestion must map ranks >= 1 to positive factors, got {ranks}: {factor}")

    def congestion_at(self, ranks: int) -> float:
        """The factor on beta when ``ranks`` ranks talk at once.

        >>> CommModel(0, 1e-9, congestion={8: 1.0, 32: 4.0}).congestion_at(16)
        2.0
        """
        if not self.congestion:
            return 1.0
        known = sorted(self.congestion)
        logs = [math.log(self.congestion[number]) for number in known]
        return math.exp(float(np.interp(math.log(_ranks(ranks)), [math.log(number) for number in known], logs)))

    def message(self, nbytes: float) -> float:
        """One message between two ranks, in seconds."""
        return self.alpha + self.beta * _nbytes(nbytes)

    def all_reduce(self, nbytes: float, ranks: int) -> float:
        """Ring all-reduce of ``nbytes`` on every rank: ``2(P-1)`` messages of a P-th each, half of them added."""
        p, n = _ranks(ranks), _nbytes(nbytes)
        share = (p - 1) / p * n
        return 2 * (p - 1) * self.alpha + 2 * share * self._beta(p) + share * self.gamma

    def reduce_scatter(self, nbytes: float, ranks: int) -> float:
        """Ring reduce-scatter of ``nbytes`` on every rank."""
        p, n = _ranks(ranks), _nbytes(nbytes)
        return (p - 1) * self.alpha + (p - 1) / p * n * (self._beta(p) + self.gamma)

    def all_gather(self, nbytes: float, ranks: int) -> float:
        """Recursive-doubling all-gather in which every rank gives ``nbytes``."""
        p, n = _ranks(ranks), _nbytes(nbytes)
        return _rounds(p) * self.alpha + (p - 1) * n * self._beta(p)

    def broadcast(self, nbytes: float, ranks: int) -> float:
        """Binomial broadcast of ``nbytes``."""
        p, n = _ranks(ranks), _nbytes(nbytes)
        return _rounds(p) * (self.alpha + n * self._beta(p))

    def all_to_all(self, nbytes: float, ranks: int) -> float:
        """Pairwise all-to-all in which every rank sends ``nbytes`` in total, a P-th of it to each."""
        p, n = _ranks(ranks), _nbytes(nbytes)
        return (p - 1) * (self.alpha + n / p * self._beta(p))

    def topk_all_gather(self, k: int, ranks: int) -> float:
        """Top-k by all-gather: every rank sends its ``k`` pairs to all others."""
        return self.all_gather(_PAIR_BYTES * _nbytes(k), ranks)

    def gtopk_butterfly(self, k: int, ranks: int) -> float:
        """gTop-k by butterfly exchange of ``k`` pairs; two more rounds where P is no power of two."""
        p = _ranks(ranks)
        rounds = int(math.log2(p)) + (0 if p & (p - 1) == 0 else 2)
        return rounds * (self.alpha + _PAIR_BYTES * _nbytes(k) * self._beta(p))

    def gtopk_tree(self, k: int, ranks: int) -> float:
        """gTop-k by tree reduction and broadcast (Shi et al., ICDCS 2019)."""
        return 2 * _rounds(_ranks(ranks)) * (self.alpha + _PAIR_BYTES * _nbytes(k) * self._beta(ranks))

    def _beta(self, ranks: int) -> float:
        return self.beta * self.congestion_at(ranks)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of one kind of collective on a fixed number of ranks: ``a + b nbytes``.

    r2 and errors (relative, one a size) tell how well it fits what was timed; ``where`` says what was timed: host,
    backend, ranks, date.

    >>> LinearCost(1e-3, 1e-9)(1e6)
    0.002
    """

    a: float
    b: float
    r2: float | None = None
    errors: tuple[float, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.a) and self.a >= 0 and math.isfinite(self.b) and self.b >= 0):
            raise ValueError(f"a and b must be finite and at least 0, got a={self.a}, b={self.b}")

    def __call__(self, nbytes: float) -> float:
        """Seconds for ``nbytes``."""
        return self.a + self.b * nbytes


@dataclass(frozen=True)
class TwoPieceCost:
    """Two straight lines that change at ``knee`` bytes: small messages take another protocol than large ones."""

    small: LinearCost
    large: LinearCost
    knee: float

    def __call__(self, nbytes: float) -> float:
        """Seconds for ``nbytes``."""
        return self.small(nbytes) if nbytes < self.knee else self.large(nbytes)


def fit_linear(nbytes: Sequence[float], seconds: Sequence[float], where: Mapping[str, str] | None = None) -> LinearCost:
    """Fit ``a + b nbytes`` by least squares on relative errors, so that small sizes count as much as large ones.

    A start-up that comes out negative is set to 0, with a warning, and the slope fitted again.

    Raises:
        ValueError: fewer than two sizes, lengths that differ, or a time that is not positive.

    >>> fit_linear([1e3, 1e6], [2e-6, 1.001e-3]).a > 0
    True
    """
    n, t = _timings(nbytes, seconds)
    weights = 1 / t
    design = np.stack([np.ones_like(n), n], axis=1) * weights[:, None]
    a, b = np.linalg.lstsq(design, t * weights, rcond=None)[0]
    if b < 0:
        a, b = float(np.sum(weights) / np.sum(weights**2)), 0.0
    elif a < 0:
        warnings.warn(f"the fitted start-up is negative ({a:.3g} s) and set to 0: time smaller messages", stacklevel=2)
        a, b = 0.0, float(np.sum(n / t) / np.sum((n / t) ** 2))
    fitted = a + b * n
    total = float(np.sum((t - t.mean()) ** 2))
    r2 = 1 - float(np.sum((t - fitted) ** 2)) / total if total else 1.0
    return LinearCost(float(a), float(b), r2, tuple(map(float, fitted / t - 1)), dict(where or {}))


def fit_two_pieces(nbytes: Sequence[float], seconds: Sequence[float]) -> TwoPieceCost:
    """Fit two lines; the knee is the size at which the sum of squared relative errors is smallest.

    Raises:
        ValueError: fewer than four sizes, or as :func:`fit_linear`.
    """
    n, t = _timings(nbytes, seconds)
    if len(n) < 4:
        raise ValueError(f"nbytes must hold at least 4 sizes for two pieces, got {len(n)}")
    order = np.argsort(n, kind="stable")
    n, t = n[order], t[order]

    def split(at: int) -> tuple[float, TwoPieceCost]:
        small, large = (fit_linear(a.tolist(), b.tolist()) for a, b in ((n[:at], t[:at]), (n[at:], t[at:])))
        return sum(error**2 for error in (*small.errors, *large.errors)), TwoPieceCost(small, large, float(n[at]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return min((split(at) for at in range(2, len(n) - 1)), key=lambda found: found[0])[1]


def save_cost(path: str | os.PathLike[str], cost: LinearCost) -> None:
    """Write a calibrated cost as JSON, atomically."""
    write_json(path, {"format": "gossamer-comm-cost", "version": _FILE_VERSION, **asdict(cost)})


def load_cost(path: str | os.PathLike[str]) -> LinearCost:
    """Read what :func:`save_cost` wrote.

    Raises:
        ValueError: the file is not one of ours, or of a later version.
    """
    stored: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if stored.pop("format", None) != "gossamer-comm-cost" or stored.pop("version", None) != _FILE_VERSION:
        raise ValueError(f"{path} is not a communication cost that this version of Gossamer wrote")
    return LinearCost(**{**stored, "errors": tuple(stored["errors"])})


def preset(name: str) -> CommModel:
    """A network by name: ``1gbe`` has published constants, the others nominal ones.

    ``1gbe``: point to point, as used in the plots of gTop-k (Shi et al., ICDCS 2019). ``10gbe``, ``ib-100``: line rate
    at 90 % and a start-up usual for TCP and RDMA.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in _PRESETS:
        raise ValueError(f"name must be one of {', '.join(_PRESETS)}, got {name!r}")
    return _PRESETS[name]


def published_cost(name: str, ranks: int) -> LinearCost:
    """Published ``a`` and ``b`` of a collective on one cluster and number of ranks.

    ``1gbe-all-gather`` (OMGS-SGD), ``1gbe-all-gather-large`` (1 MiB and more; MG-WFBP), ``10gbe-all-reduce`` and
    ``ib56-all-reduce`` (MG-WFBP). For ``all-gather``, bytes are those that a rank gives times the ranks.

    Raises:
        ValueError: there is no such table, or it has no such number of ranks.
    """
    table = _PUBLISHED.get(name)
    if table is None:
        raise ValueError(f"name must be one of {', '.join(_PUBLISHED)}, got {name!r}")
    if ranks not in table:
        raise ValueError(f"ranks must be one of {', '.join(map(str, table))} for {name}, got {ranks}")
    return LinearCost(*table[ranks], where={"source": name, "ranks": str(ranks)})


_PRESETS: Mapping[str, CommModel] = MappingProxyType(
    {
        "1gbe": CommModel(alpha=0.436e-3, beta=9e-9),
        "10gbe": CommModel(alpha=50e-6, beta=8 / (0.9 * 10e9)),
        "ib-100": CommModel(alpha=3e-6, beta=8 / (0.9 * 100e9)),
    }
)

_PUBLISHED: Mapping[str, Mapping[int, tuple[float, float]]] = MappingProxyType(
    {
        "1gbe-all-gather": {2: (1.6e-3, 1.0e-8), 4: (2.7e-3, 1.3e-8), 8: (4.0e-3, 1.5e-8), 16: (1.1e-2, 1.7e-8)},
        "1gbe-all-gather-large": {
            2: (4.4e-3, 5.8e-9), 4: (5.6e-3, 7.4e-9), 8: (7.68e-3, 8.2e-9), 16: (2.1e-3, 1.7e-8),
        },
        "10gbe-all-reduce": {
            2: (2.55e-6, 9.84e-11), 4: (4.20e-5, 2.06e-10), 8: (5.23e-4, 8.57e-10), 16: (9.08e-4, 7.40e-10),
            32: (4.04e-3, 8.64e-10),
        },
        "ib56-all-reduce": {
            2: (2.55e-6, 9.84e-11), 4: (4.20e-5, 2.06e-10), 8: (9.75e-5, 3.06e-10), 16: (2.36e-4, 4.06e-10),
            32: (4.06e-4, 4.91e-10),
        },
    }
)  # fmt: skip


def _timings(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    n, t = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if n.shape != t.shape or n.ndim != 1 or len(n) < 2:
        raise ValueError(f"nbytes and seconds must be as long as each other, 2 or more, got {n.shape} and {t.shape}")
    if not (np.all(np.isfinite(t)) and np.all(t > 0)):
        raise ValueError("seconds must all be finite and positive")
    return n, t


def _ranks(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    return ranks


def _nbytes(nbytes: float) -> float:
    if not nbytes >= 0:
        raise ValueError(f"the size of a message must be at least 0, got {nbytes}")
    return nbytes


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()
