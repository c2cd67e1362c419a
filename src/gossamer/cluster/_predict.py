"""Predicted interference: factors of pairs that nobody has measured, learned from pairs that somebody has.

Every load has a pressure (how much it takes from a partner) and a sensitivity (how much it suffers). A factor is::

    xi(a beside b) = 1 + mean * sensitivity(a) * pressure(b)

All are estimated from measured pairs by least squares on ``log(xi - 1)``, with a pull to the mean that grows as a load
has fewer pairs. A new load needs a handful of measured pairs, or one, or none: then it counts as the average.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from gossamer.cluster._interference import Factors, Interference, Load

_LEAST = 0.02


@dataclass
class PredictedInterference:
    """A model of log slow-downs, additive in both loads, and what has been observed since.

    known: measured pairs, which are given back as they are. smoothing: weight of an observation, against what was
    known, in the moving average (0.3 in Castor). tolerance: a pair that was off by more is denied.
    """

    mean: float
    sensitivity: dict[Load, float]
    pressure: dict[Load, float]
    smoothing: float = 0.3
    tolerance: float = 0.25
    seen: dict[tuple[Load, Load, str], float] = field(default_factory=dict)
    denied: set[tuple[Load, Load, str]] = field(default_factory=set)

    @classmethod
    def learn(
        cls, entries: Mapping[tuple[Load, Load], Factors | None], without: Collection[str] = (), pull: float = 1.0
    ) -> PredictedInterference:
        """Learn from measured pairs.

        without: models whose pairs are not looked at, to see how well the others predict them.
        pull: pairs' worth of pull to the mean.

        Raises:
            ValueError: no pair is left.
        """
        pairs = [
            (a, b, math.log(max(_LEAST, factors[0] - 1)))
            for (a, b), factors in entries.items()
            if factors is not None and a[0] not in without and b[0] not in without
        ]
        if not pairs:
            raise ValueError("entries must hold at least one measured pair of models that are not left out")
        mean = float(np.mean([value for _, _, value in pairs]))
        sensitivity = dict.fromkeys({a for a, _, _ in pairs}, 0.0)
        pressure = dict.fromkeys({b for _, b, _ in pairs}, 0.0)
        for _ in range(50):
            left: dict[Load, list[float]] = {load: [] for load in sensitivity}
            for a, b, value in pairs:
                left[a].append(value - mean - pressure[b])
            sensitivity = {load: sum(rest) / (len(rest) + pull) for load, rest in left.items()}
            left = {load: [] for load in pressure}
            for a, b, value in pairs:
                left[b].append(value - mean - sensitivity[a])
            pressure = {load: sum(rest) / (len(rest) + pull) for load, rest in left.items()}
        return cls(mean, sensitivity, pressure)

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        """Predicted factors, corrected by what was observed; None where the pair was found to be far off."""
        if (a, b, substrate) in self.denied:
            return None
        return self._one(a, b, substrate), self._one(b, a, substrate)

    def _one(self, a: Load, b: Load, substrate: str) -> float:
        known = self.seen.get((a, b, substrate))
        if known is not None:
            return known
        effects = _effect(self.sensitivity, a) + _effect(self.pressure, b)
        return 1 + math.exp(self.mean + effects)

    def observe(self, a: Load, b: Load, factor: float, substrate: str = "time-slice") -> None:
        """Take in a measured slow-down of ``a`` beside ``b``; deny the pair where it was worse than thought by far.

        Raises:
            ValueError: the factor is not a positive number.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be a positive number, got {factor}")
        before = self._one(a, b, substrate)
        if factor > (1 + self.tolerance) * before:
            self.denied |= {(a, b, substrate), (b, a, substrate)}
        weight = self.smoothing if (a, b, substrate) in self.seen else 1 - self.smoothing
        self.seen[a, b, substrate] = max(1.0, before + weight * (factor - before))


def _effect(effects: Mapping[Load, float], load: Load) -> float:
    """The effect of a load, of its model's nearest batch, or none."""
    if load in effects:
        return effects[load]
    same = [known for known in effects if known[0] == load[0]]
    if not same:
        return 0.0
    return effects[min(same, key=lambda known: abs(math.log(known[1] / load[1])))]


def held_out_errors(
    entries: Mapping[tuple[Load, Load], Factors | None], shown: int = 1, seed: int = 0
) -> dict[str, float]:
    """How well pairs of models that were left out are predicted, one model left out at a time.

    shown: measured pairs of each load of the left-out model that the predictor sees, as profiling would give.

    Gives mean absolute errors in per cent (``mape``, and ``median_mape`` of always saying the median), and the rank
    correlation (``spearman``).
    """
    from scipy.stats import spearmanr

    rng = np.random.default_rng(seed)
    measured = {pair: factors for pair, factors in entries.items() if factors is not None}
    truth, guess, constant = [], [], []
    for model in sorted({a[0] for a, _ in measured}):
        rest = {pair: f for pair, f in measured.items() if model not in (pair[0][0], pair[1][0])}
        own = [pair for pair in measured if pair[0][0] == model and pair[1][0] != model]
        loads = sorted({a for a, _ in own})
        peek = set()
        for load in loads:
            pairs = [pair for pair in own if pair[0] == load]
            peek |= {pairs[index] for index in rng.permutation(len(pairs))[:shown]}
        known = {
            **rest,
            **{pair: measured[pair] for pair in peek},
            **{pair[::-1]: measured[pair[::-1]] for pair in peek},
        }
        predictor = PredictedInterference.learn(known)
        middle = float(np.median([factors[0] for factors in rest.values()]))
        for pair in own:
            if pair not in peek:
                for a, b in (pair, pair[::-1]):
                    predicted = predictor.factors(a, b)
                    assert predicted is not None
                    truth.append(measured[a, b][0])
                    guess.append(predicted[0])
                    constant.append(middle)
    t, g, c = np.array(truth), np.array(guess), np.array(constant)
    return {
        "mape": float(100 * np.abs(g / t - 1).mean()),
        "median_mape": float(100 * np.abs(c / t - 1).mean()),
        "spearman": float(spearmanr(t, g).statistic),
    }


def noisy(truth: Interference, share: float, seed: int) -> Interference:
    """Factors that are off by up to ``share`` of their excess, the same for a pair every time."""
    return _Noisy(truth, share, seed)


@dataclass(frozen=True)
class _Noisy:
    truth: Interference
    share: float
    seed: int

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        found = self.truth.factors(a, b, substrate)
        if found is None:
            return None
        rng = np.random.default_rng([self.seed, *map(ord, f"{a}{b}{substrate}")])
        off = 1 + self.share * rng.uniform(-1, 1, 2)
        return 1 + (found[0] - 1) * off[0], 1 + (found[1] - 1) * off[1]
