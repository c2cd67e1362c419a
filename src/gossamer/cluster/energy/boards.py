"""Measured boards: what the best of the settings that were really tried saves."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gossamer.cluster.energy.dvfs import DvfsModel

DEFAULT_CLOCKS: Mapping[str, tuple[float, float]] = {"gtx1080ti": (1800.0, 5000.0), "gtx2070s": (1880.0, 6300.0)}
"""Default core and memory clocks of the published boards, in MHz."""


@dataclass(frozen=True)
class Board:
    """One kernel on one board: clocks in MHz, milliseconds, watts, one entry per setting."""

    kernel: str
    core: np.ndarray
    memory: np.ndarray
    milliseconds: np.ndarray
    watts: np.ndarray

    def saving(self, default: tuple[float, float]) -> float:
        """Share of the energy at the default clocks that the best measured setting saves.

        Raises:
            ValueError: the default clocks were not measured.
        """
        energy = self.milliseconds * self.watts
        at_default = (self.core == default[0]) & (self.memory == default[1])
        if not at_default.any():
            raise ValueError(f"{self.kernel} was not measured at {default[0]:g}/{default[1]:g} MHz")
        return float(1 - energy.min() / energy[at_default][0])

    def fit(self, default: tuple[float, float]) -> tuple[DvfsModel, float, float]:
        """The fitted model (milliseconds and watts), and its mean errors of time and power in per cent."""
        core, memory = self.core / default[0], self.memory / default[1]
        model = DvfsModel.fit(core, memory, self.milliseconds, self.watts)
        time = model.fixed + model.scaled * (model.delta / core + (1 - model.delta) / memory)
        power = model.static + model.memory * memory + model.core * (2 * (core - 0.5) ** 2 + 0.5) ** 2 * core
        of_time, of_power = (np.abs(a / b - 1).mean() for a, b in ((time, self.milliseconds), (power, self.watts)))
        return model, 100 * float(of_time), 100 * float(of_power)


def read_board(path: str | os.PathLike[str]) -> list[Board]:
    """Read a table with ``appName, coreF, memF, time/ms, power/W``, one board entry a kernel.

    Raises:
        ValueError: a column is missing, or a number cannot be read.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ("coreF", "memF", "time/ms", "power/W")
    missing = [name for name in ("appName", *columns) if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    kernels: dict[str, list[list[float]]] = {}
    for row in rows:
        kernels.setdefault(row["appName"], []).append([float(row[name]) for name in columns])
    return [Board(kernel, *np.array(numbers).T) for kernel, numbers in kernels.items()]
