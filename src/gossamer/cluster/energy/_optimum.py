"""The best voltage and memory clock of one task, compiled: a schedule asks thousands of times."""

from __future__ import annotations

import math

from numba import njit

_COARSE = 24
_FINE = 36
_GOLDEN = (math.sqrt(5) - 1) / 2


@njit(cache=True)
def core_clock(voltage: float) -> float:
    """The highest core clock that a voltage supports, both relative to the default."""
    return math.sqrt((voltage - 0.5) / 2) + 0.5


@njit(cache=True)
def memory_clock(voltage: float, task: tuple, limit: float, low: float, high: float) -> float:
    """The memory clock of least energy at a voltage, within its bounds and fast enough for ``limit``.

    Energy is ``(a + gamma f)(b + d / f)``, convex in f, so its clipped minimum is exact.
    """
    p0, gamma, c, t0, scaled, delta = task
    core = core_clock(voltage)
    a = p0 + c * voltage * voltage * core
    b = t0 + scaled * delta / core
    d = scaled * (1 - delta)
    if d <= 0.0:
        return low
    if limit < math.inf:
        left = limit - b
        low = max(low, min(high, d / left)) if left > 0 else high
    if gamma * b <= 0.0:
        return high
    return min(high, max(low, math.sqrt(a * d / (gamma * b))))


@njit(cache=True)
def energy_at(voltage: float, task: tuple, limit: float, low: float, high: float) -> float:
    """Joules at a voltage with the best memory clock."""
    p0, gamma, c, t0, scaled, delta = task
    core = core_clock(voltage)
    memory = memory_clock(voltage, task, limit, low, high)
    time = t0 + scaled * (delta / core + (1 - delta) / memory)
    return (p0 + gamma * memory + c * voltage * voltage * core) * time


@njit(cache=True)
def optimum(task: tuple, limit: float, v_low: float, v_high: float, m_low: float, m_high: float) -> float:
    """The voltage of least energy among those that finish within ``limit``; NaN where none does.

    A coarse sweep finds the valley, golden sections its bottom.
    """
    t0, scaled, delta = task[3], task[4], task[5]
    if limit < math.inf:
        left = limit - t0 - scaled * (1 - delta) / m_high
        needed = scaled * delta
        if left < 0 or needed > left * core_clock(v_high) * (1 + 1e-12):
            return math.nan
        if needed > 0:
            slowest = needed / left
            if slowest > 0.5:
                v_low = min(v_high, max(v_low, 2 * (slowest - 0.5) ** 2 + 0.5))
    best, least, step = v_low, math.inf, (v_high - v_low) / _COARSE
    for index in range(_COARSE + 1):
        voltage = v_low + index * step
        energy = energy_at(voltage, task, limit, m_low, m_high)
        if energy < least:
            best, least = voltage, energy
    left_end, right_end = max(v_low, best - step), min(v_high, best + step)
    for _ in range(_FINE):
        width = (right_end - left_end) * _GOLDEN
        lower, upper = right_end - width, left_end + width
        if energy_at(lower, task, limit, m_low, m_high) <= energy_at(upper, task, limit, m_low, m_high):
            right_end = upper
        else:
            left_end = lower
    middle = (left_end + right_end) / 2
    return middle if energy_at(middle, task, limit, m_low, m_high) <= least else best
