"""Coefficients of control points: the cyclic cubic of phase-functioned networks, and fitting points to its samples."""

from __future__ import annotations

import math

import numpy as np

CONTROL_POINTS = 4


def catmull_rom(phase: np.ndarray) -> np.ndarray:
    """Weights of the four control points at each phase: ``(b,)`` radians, any turn, to float32 ``(b, 4)``.

    The cyclic Catmull-Rom spline (Holden et al., SIGGRAPH 2017): a point at distance d on the circle of four weighs
    1.5 d^3 - 2.5 d^2 + 1 for d < 1 and -0.5 d^3 + 2.5 d^2 - 4 d + 2 for d < 2. Weights sum to one.

    Raises:
        ValueError: a phase is not finite.

    >>> catmull_rom(np.array([0.0, np.pi / 4])).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.5625, 0.5625, -0.0625, -0.0625]]
    """
    angles = np.asarray(phase, np.float64)
    if not np.isfinite(angles).all():
        raise ValueError(
            f"phase must be finite, got {angles[~np.isfinite(angles)][0]} at entry {int((~np.isfinite(angles)).argmax())}"
        )
    turns = angles * (CONTROL_POINTS / (2 * math.pi))
    distance = abs(np.mod(turns[:, None] - np.arange(CONTROL_POINTS) + 2, CONTROL_POINTS) - 2)
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return np.where(distance < 1, near, far).astype(np.float32)


def fit_control_points(samples: np.ndarray) -> tuple[np.ndarray, float]:
    """Control points whose cubic runs through equally spaced samples: ``(samples, ...)`` to ``(4, ...)``, least squares.

    The second value is the largest residual over the largest sample.

    Raises:
        ValueError: fewer than four samples.
    """
    count = len(samples)
    if count < CONTROL_POINTS:
        raise ValueError(f"samples must be at least {CONTROL_POINTS}, got {count}")
    matrix = catmull_rom(np.arange(count) * (2 * math.pi / count)).astype(np.float64)
    flat = samples.reshape(count, -1).astype(np.float64)
    points = np.linalg.lstsq(matrix, flat, rcond=None)[0]
    residual = float(abs(matrix @ points - flat).max(initial=0) / max(abs(flat).max(initial=0), 1e-30))
    return points.reshape(CONTROL_POINTS, *samples.shape[1:]).astype(np.float32), residual
