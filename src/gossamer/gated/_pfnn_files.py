"""Reading the 50-sample folders of the original phase-functioned network.

A folder holds ``W0_000.bin`` to ``W2_049.bin`` and ``b0_000.bin`` to ``b2_049.bin``: float32, row-major ``(out, in)``,
each the network's matrix at one of equally spaced phases; and ``Xmean``, ``Xstd``, ``Ymean``, ``Ystd``. The samples lie
on a cubic through four control points, which least squares recovers to rounding. (The original demo takes samples 0,
12, 25 and 37 for control points instead, which is off by some percent.)
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from gossamer.gated._basis import fit_control_points

_RESIDUAL = 1e-3


def read_pfnn_folder(
    folder: str | os.PathLike[str],
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, np.ndarray]]:
    """Control points of weights ``(4, in, out)`` and biases ``(4, out)`` of every layer, and the four statistics.

    Raises:
        FileNotFoundError: a file is missing; the message names it.
        ValueError: sizes do not fit, or the samples are not those of a cubic through four points.
    """
    root = Path(folder)
    layers = 0
    while (root / f"W{layers}_000.bin").is_file():
        layers += 1
    if not layers:
        raise FileNotFoundError(f"there is no file {root / 'W0_000.bin'}")
    weights, biases = [], []
    for layer in range(layers):
        count = 0
        while (root / f"W{layer}_{count:03d}.bin").is_file():
            count += 1
        bias = np.stack([_floats(root / f"b{layer}_{number:03d}.bin") for number in range(count)])
        flat = np.stack([_floats(root / f"W{layer}_{number:03d}.bin") for number in range(count)])
        outputs = bias.shape[1]
        if flat.shape[1] % outputs:
            raise ValueError(
                f"{root}: W{layer} holds {flat.shape[1]} numbers, no multiple of the {outputs} of b{layer}"
            )
        weights.append(_fitted(root, f"W{layer}", flat.reshape(count, outputs, -1).transpose(0, 2, 1)))
        biases.append(_fitted(root, f"b{layer}", bias))
    statistics = {name: _floats(root / f"{name}.bin") for name in ("Xmean", "Xstd", "Ymean", "Ystd")}
    for name, size in (("Xmean", weights[0].shape[1]), ("Ymean", weights[-1].shape[2])):
        if len(statistics[name]) != size or len(statistics[f"{name[0]}std"]) != size:
            raise ValueError(f"{root}: {name} and {name[0]}std must hold {size} numbers, got {len(statistics[name])}")
    return weights, biases, statistics


def _fitted(root: Path, name: str, samples: np.ndarray) -> np.ndarray:
    points, residual = fit_control_points(samples)
    if residual > _RESIDUAL:
        raise ValueError(
            f"{root}: the {len(samples)} samples of {name} are off a cubic through four points by {residual:.1e}"
        )
    return points


def _floats(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    numbers = np.fromfile(path, np.float32)
    if not len(numbers) or not np.isfinite(numbers).all():
        raise ValueError(f"{path} must hold finite float32 numbers")
    return numbers
