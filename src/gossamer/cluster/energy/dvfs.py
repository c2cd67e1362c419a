"""Energy of one GPU task under voltage and frequency scaling, and its best setting in closed form.

With voltage V, core clock fc and memory clock fm, all relative to the default setting::

    power  P = static + memory fm + core V^2 fc            fc <= g(V) = sqrt((V - 0.5) / 2) + 0.5
    time   t = fixed + scaled (delta / fc + (1 - delta) / fm)
    energy E = P t

(Wang, Chu and others, TPDS 2022). At the best setting fc = g(V); for a given V the best fm is a square root; what is
left is a search over V alone. A time limit only moves the lower bounds of both.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossamer.cluster.energy._optimum import core_clock, memory_clock, optimum

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Interval:
    """The settings to choose from, relative to the default: voltages and memory clocks.

    Raises:
        ValueError: a bound is not positive, the wrong way round, or a voltage is below 0.5, where no clock is defined.
    """

    voltage: tuple[float, float]
    memory: tuple[float, float]

    def __post_init__(self) -> None:
        if not 0.5 <= self.voltage[0] <= self.voltage[1]:
            raise ValueError(f"voltage must rise from at least 0.5, got {self.voltage}")
        if not 0 < self.memory[0] <= self.memory[1]:
            raise ValueError(f"memory must rise from above 0, got {self.memory}")


WIDE = Interval((0.5, 1.25), (0.5, 1.2))
"""The interval of the published 33-35 %: wider than any board allows."""

NARROW = Interval((0.8, 1.24), (0.8, 1.1))
"""What boards of that time allowed."""


@dataclass(frozen=True)
class Setting:
    """One setting and what it costs: relative voltage and clocks; seconds, watts, joules."""

    voltage: float
    core: float
    memory: float
    time: float
    power: float
    energy: float


@dataclass(frozen=True)
class DvfsModel:
    """Power and time of one task: watts ``static``, ``memory``, ``core``; seconds ``fixed``, ``scaled``.

    delta: the share of ``scaled`` that follows the core clock, 0 to 1.

    Raises:
        ValueError: a value is negative or not a number, ``delta`` is above 1, or the task takes no time or power.

    >>> task = DvfsModel(static=60, memory=30, core=100, fixed=10, scaled=90, delta=0.5)
    >>> task.default.energy
    19000.0
    >>> best = task.optimal()
    >>> best.energy < 0.75 * task.default.energy, best.time > task.default.time
    (True, True)
    """

    static: float
    memory: float
    core: float
    fixed: float
    scaled: float
    delta: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number that is not negative, got {value}")
        if self.delta > 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta}")
        if self.fixed + self.scaled <= 0 or self.static + self.memory + self.core <= 0:
            raise ValueError("a task must take some time and some power")

    @property
    def constants(self) -> tuple[float, float, float, float, float, float]:
        """Static, memory and core watts, fixed and scaled seconds, delta."""
        return (
            float(self.static), float(self.memory), float(self.core), float(self.fixed), float(self.scaled),
            float(self.delta),
        )  # fmt: skip

    @property
    def default(self) -> Setting:
        """The default setting."""
        return self.at(1.0, 1.0)

    def at(self, voltage: float, memory: float) -> Setting:
        """What a setting costs, with the core as fast as the voltage allows."""
        core = float(core_clock(voltage))
        time = self.fixed + self.scaled * (self.delta / core + (1 - self.delta) / memory)
        power = self.static + self.memory * memory + self.core * voltage**2 * core
        return Setting(float(voltage), core, float(memory), time, power, power * time)

    def shortest(self, interval: Interval = WIDE) -> float:
        """The least time that any setting takes."""
        return self.at(interval.voltage[1], interval.memory[1]).time

    def optimal(self, limit: float = math.inf, interval: Interval = WIDE) -> Setting:
        """The setting of least energy that takes at most ``limit`` seconds.

        Raises:
            ValueError: no setting is that fast; the message says how fast the fastest is.
        """
        bounds = *interval.voltage, *interval.memory
        voltage = optimum(self.constants, float(limit), *map(float, bounds))
        if math.isnan(voltage):
            raise ValueError(f"limit {limit:g} s is below the {self.shortest(interval):g} s of the fastest setting")
        memory = memory_clock(voltage, self.constants, float(limit), *map(float, interval.memory))
        return self.at(voltage, memory)

    @classmethod
    def fit(cls, core: ArrayLike, memory: ArrayLike, seconds: ArrayLike, watts: ArrayLike) -> DvfsModel:
        """Fit to measurements at clocks relative to the default.

        Time is fitted on ``1, 1/fc, 1/fm`` and power on ``1, fm, V^2 fc`` by least squares without negative
        coefficients, with the slight pull to zero (Lasso, 0.01) of the published fit.

        Raises:
            ValueError: fewer than three measurements, or one is not positive.
        """
        fc, fm, t, p = (np.asarray(column, dtype=float) for column in (core, memory, seconds, watts))
        if len(fc) < 3 or not all((column > 0).all() for column in (fc, fm, t, p)):
            raise ValueError("needs at least three measurements, all positive")
        volts = 2 * (fc - 0.5) ** 2 + 0.5
        one = np.ones_like(fc)
        fixed, by_core, by_memory = _lasso(np.stack([one, 1 / fc, 1 / fm], axis=1), t)
        static, gamma, c = _lasso(np.stack([one, fm, volts**2 * fc], axis=1), p)
        scaled = by_core + by_memory
        if scaled == 0:
            warnings.warn("the measured time does not depend on the clocks", stacklevel=2)
        return cls(static, gamma, c, fixed, scaled, by_core / scaled if scaled else 0.0)


def _lasso(x: NDArray, y: NDArray, alpha: float = 0.01) -> list[float]:
    """Coefficients without sign that minimise ``|y - x w|^2 / 2n + alpha |w|``, by coordinate descent."""
    n, w = len(y), np.zeros(x.shape[1])
    gram, target = x.T @ x / n, x.T @ y / n
    for _ in range(100_000):
        before = w.copy()
        for j in range(len(w)):
            w[j] = max(0.0, (target[j] - gram[j] @ w + gram[j, j] * w[j] - alpha) / gram[j, j])
        if np.abs(w - before).max() <= 1e-10 * max(1.0, np.abs(w).max()):
            break
    return [float(value) for value in w]
