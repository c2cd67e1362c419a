"""How long one training step takes: compute, gradient accumulation, all-reduce, and what overlaps.

A step of ``s`` sub-batches of ``b`` samples takes::

    T(b, s) = (s - 1) c(b)  +  (c(b)^d + n^d)^(1/d)        c(b) = alpha_c + beta_c b
                                                          n    = alpha + beta max(gpus - 2, 0)

where the all-reduce n has one pair of constants inside a node and one across nodes, and d runs from 1 (nothing
overlaps) to 10 (nearly everything does). The form is that of Pollux (Qiao et al., OSDI 2021) and of SJF-BSBF (arXiv
2407.13088); only the last sub-batch communicates, because gradients are summed locally before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_SLACK = 1e-8
_FIRST_GUESS = (1e-1, 1e-2) * 3 + (1.001,)


@dataclass(frozen=True)
class StepTime:
    """The seven constants; seconds, and seconds per sample (``beta_compute``) or per GPU beyond two (the others).

    Raises:
        ValueError: a constant is negative or not a number, or ``overlap`` is outside 1 to 10.

    >>> alone = StepTime(alpha_compute=0.02, beta_compute=0.001)
    >>> alone.seconds(sub_batch=64)
    0.084
    >>> round(alone.seconds(sub_batch=16, accumulation=4), 3)
    0.144
    """

    alpha_compute: float
    beta_compute: float
    alpha_across: float = 0.0
    beta_across: float = 0.0
    alpha_within: float = 0.0
    beta_within: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} must be a number that is not negative, got {value}")
        if not 1 <= self.overlap <= 10:
            raise ValueError(f"overlap must lie between 1 (none) and 10 (all but full), got {self.overlap}")

    @property
    def constants(self) -> tuple[float, ...]:
        """The seven constants in the order of the fields."""
        return tuple(vars(self).values())

    def compute(self, sub_batch: float) -> float:
        """Forward and backward pass over one sub-batch on one GPU."""
        return self.alpha_compute + self.beta_compute * sub_batch

    def communicate(self, gpus: int, nodes: int) -> float:
        """All-reduce of the gradients."""
        if gpus < 2:
            return 0.0
        if nodes > 1:
            return self.alpha_across + self.beta_across * (gpus - 2)
        return self.alpha_within + self.beta_within * (gpus - 2)

    def seconds(self, sub_batch: float, accumulation: int = 1, gpus: int = 1, nodes: int = 1) -> float:
        """One step of ``accumulation`` sub-batches on ``gpus`` GPUs of ``nodes`` nodes."""
        compute, network = self.compute(sub_batch), self.communicate(gpus, nodes)
        last = compute if network == 0.0 else (compute**self.overlap + network**self.overlap) ** (1 / self.overlap)
        return (accumulation - 1) * compute + last

    @classmethod
    def fit(
        cls,
        nodes: Sequence[int],
        gpus: Sequence[int],
        sub_batch: Sequence[float],
        compute: Sequence[float],
        step: Sequence[float],
    ) -> StepTime:
        """Fit the constants to measured steps (without accumulation), by least squares on logarithms.

        Constants that the measurements cannot tell are taken as zero (no step on several nodes, for instance), and
        across nodes is never assumed cheaper than within one, as in Pollux (Qiao et al., OSDI 2021): what was not
        seen is thought cheap, so that a scheduler tries it.

        nodes, gpus, sub_batch, compute, step: one entry per measurement; seconds of compute and of the whole step.

        Raises:
            ValueError: the lengths differ, there is no measurement, or a time is not positive.
        """
        columns = [np.asarray(column, dtype=float) for column in (nodes, gpus, sub_batch, compute, step)]
        if len({len(column) for column in columns}) != 1 or not len(columns[0]):
            raise ValueError(f"needs as many entries in every column, got {[len(column) for column in columns]}")
        if not (columns[3].min() > 0 and columns[4].min() > 0):
            raise ValueError("compute and step must be positive times")
        return cls(*_fit_constants(*columns))


def _fit_constants(nodes: NDArray, gpus: NDArray, batch: NDArray, compute: NDArray, step: NDArray) -> list[float]:
    from scipy.optimize import minimize

    lower, upper = [_SLACK] * 6 + [1.0], [np.inf] * 6 + [10.0]
    start = list(_FIRST_GUESS)

    def fix(index: int, value: float) -> None:
        start[index] = lower[index] = upper[index] = value

    if len(np.unique(batch)) == 1:  # one batch size cannot tell the constant from the slope: half each
        fix(0, float(compute.mean()) / 2)
    across, within = nodes > 1, (nodes == 1) & (gpus > 1)
    if not across.any():
        fix(2, _SLACK)
        fix(3, _SLACK)
    if not within.any():
        fix(4, _SLACK)
        fix(5, _SLACK)
    if not (gpus > 2).any():
        fix(3, _SLACK)
        fix(5, _SLACK)
    data = across, within, gpus, batch, np.log(compute), np.log(step)
    found = minimize(
        _misfit, start, args=data, jac=True, method="L-BFGS-B", bounds=list(zip(lower, upper, strict=True))
    )
    fitted = [float(value) for value in found.x]
    if not across.any():
        fitted[2] = max(fitted[2], 1.1 * fitted[4])
        fitted[3] = max(fitted[3], 1.1 * fitted[5])
    return [0.0 if value <= _SLACK else value for value in fitted[:6]] + [min(max(fitted[6], 1.0), 10.0)]


def _misfit(
    p: ArrayLike,
    across: NDArray,
    within: NDArray,
    gpus: NDArray,
    batch: NDArray,
    log_compute: NDArray,
    log_step: NDArray,
) -> tuple[float, NDArray]:
    """Root mean square error of the two logarithms, with a pull to no overlap and no slope, and its gradient."""
    a_c, b_c, a_x, b_x, a_w, b_w, d = np.asarray(p)
    beyond = np.maximum(gpus - 2, _SLACK)
    compute = a_c + b_c * batch
    network = np.where(across, a_x + b_x * beyond, np.where(within, a_w + b_w * beyond, _SLACK))
    log_c, log_n = np.log(compute), np.log(network)
    log_step_hat = np.logaddexp(d * log_c, d * log_n) / d
    share = np.exp(d * (log_c - log_step_hat))  # the part of compute in the d-norm; 1 - share is the network's
    r1, r2 = log_c - log_compute, log_step_hat - log_step
    e1, e2 = np.sqrt((r1**2).mean() + 1e-18), np.sqrt((r2**2).mean() + 1e-18)
    w1, w2 = r1 / (len(r1) * e1), r2 / (len(r2) * e2)
    by_compute = (w1 + w2 * share) / compute
    by_network = w2 * (1 - share) / network
    by_overlap = w2 * (share * log_c + (1 - share) * log_n - log_step_hat) / d
    ratio_x, ratio_w = b_x / a_x, b_w / a_w
    value = e1 + e2 + 1e-3 * (d - 1) ** 2 + 1e-2 * (ratio_x**2 + ratio_w**2)
    gradient = np.array([
        by_compute.sum(),
        (by_compute * batch).sum(),
        (by_network * across).sum() - 2e-2 * ratio_x**2 / a_x,
        (by_network * beyond * across).sum() + 2e-2 * ratio_x / a_x,
        (by_network * within).sum() - 2e-2 * ratio_w**2 / a_w,
        (by_network * beyond * within).sum() + 2e-2 * ratio_w / a_w,
        by_overlap.sum() + 2e-3 * (d - 1),
    ])  # fmt: skip
    return float(value), gradient
