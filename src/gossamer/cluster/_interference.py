"""How much two jobs on one GPU slow each other down: measured tables, a constant, or a prediction.

A load is a model's name and its batch per GPU. A factor of 1.5 means that a step takes 1.5 times as long as alone. The
two factors of a pair differ, and each belongs to the whole gang of its job: a step ends when its slowest worker does.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

Load = tuple[str, float]
Factors = tuple[float, float]

SUBSTRATES = ("time-slice", "mps")


class Interference(Protocol):
    """What the simulator and the policies ask."""

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        """Slow-downs of ``a`` and of ``b``; None where the two do not fit on one GPU."""


class ConstantInterference:
    """The same slow-down for every pair.

    Raises:
        ValueError: ``factor`` is below 1 or not a number.
    """

    def __init__(self, factor: float) -> None:
        self._factors = _checked(factor, factor, "factor", faster=False)

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        """Both ``factor``."""
        return self._factors


class InterferenceTable:
    """Measured factors by pair of loads.

    entries: for a pair of loads the factors, or None where the pair does not fit. A pair may be given one way round.
    default: factors of pairs of models that are not in the table; without it they count as not fitting.
    faster: accept factors below 1 (a pair may share a cache); they are mistakes more often than not.

    A batch that the table has not is read at the nearest one, by ratio, of the same model.

    Raises:
        ValueError: a factor is below 1 (unless ``faster``), infinite or not a number.

    >>> table = InterferenceTable({(("resnet", 64), ("lm", 20)): (1.4, 1.2)})
    >>> table.factors(("lm", 16), ("resnet", 64))
    (1.2, 1.4)
    """

    def __init__(
        self, entries: Mapping[tuple[Load, Load], Factors | None], default: Factors | None = None, faster: bool = False
    ) -> None:
        self._entries: dict[tuple[Load, Load], Factors | None] = {}
        for (a, b), pair in entries.items():
            if pair is not None:
                pair = _checked(*pair, f"factors of {a} and {b}", faster)
            self._entries[a, b] = pair
            self._entries.setdefault((b, a), None if pair is None else (pair[1], pair[0]))
        self._batches: dict[str, list[float]] = {}
        for load, _ in self._entries:
            batches = self._batches.setdefault(load[0], [])
            if load[1] not in batches:
                batches.append(load[1])
        self._default = default
        self._found: dict[tuple[Load, Load], Factors | None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Mapping[tuple[Load, Load], Factors | None]:
        """Every pair, both ways round."""
        return self._entries

    def factors(self, a: Load, b: Load, substrate: str = "time-slice") -> Factors | None:
        """Slow-downs of the pair; the table was measured on one substrate, which stands for both."""
        key = (a, b)
        if key not in self._found:
            self._found[key] = self._entries.get((self._nearest(a), self._nearest(b)), self._default)
        return self._found[key]

    def _nearest(self, load: Load) -> Load:
        model, batch = load
        known = self._batches.get(model)
        if not known:
            return load
        return model, min(known, key=lambda other: abs(math.log(other / batch)))

    def scaled(self, by: float) -> InterferenceTable:
        """The same pairs with ``by`` times the slow-down in excess of 1."""
        entries = {
            pair: None if factors is None else (1 + (factors[0] - 1) * by, 1 + (factors[1] - 1) * by)
            for pair, factors in self._entries.items()
        }
        return InterferenceTable(entries, self._default)

    @classmethod
    def from_gavel(cls, path: str | os.PathLike[str], gpu: str = "v100") -> InterferenceTable:
        """Read Gavel's throughput file (Narayanan et al., OSDI 2020): rates alone over rates in pairs, one GPU each.

        Rates in pairs that exceed the rate alone by the noise of the measurement count as no slow-down.

        Raises:
            ValueError: the file has no such GPU; the message names those that it has.
        """
        measured = json.loads(Path(path).read_text(encoding="utf-8"))
        if gpu not in measured:
            raise ValueError(f"gpu must be one of {', '.join(measured)}, got {gpu!r}")
        rates = {ast.literal_eval(key): row for key, row in measured[gpu].items()}
        alone = {key: row["null"] for key, row in rates.items() if key[1] == 1}
        entries: dict[tuple[Load, Load], Factors | None] = {}
        for key, row in rates.items():
            for other, pair in row.items():
                partner = ast.literal_eval(other) if other != "null" else None
                if key[1] != 1 or partner is None or partner[1] != 1:
                    continue
                both = gavel_load(key[0]), gavel_load(partner[0])
                if 0.0 in pair:
                    entries[both] = None
                else:
                    entries[both] = max(1.0, alone[key] / pair[0]), max(1.0, alone[partner] / pair[1])
        return cls(entries)


def gavel_load(name: str) -> Load:
    """``"LM (batch size 20)"`` as ``("LM", 20)``; jobs without a batch size count as 1."""
    model, _, rest = name.partition(" (batch size ")
    return model, float(rest.rstrip(")")) if rest else 1.0


def _checked(a: float, b: float, what: str, faster: bool) -> Factors:
    for factor in (a, b):
        if not (0 < factor < math.inf) or (factor < 1 and not faster):
            raise ValueError(f"{what} must be numbers from 1 on, got {a}, {b}")
    return a, b
