"""What a genetic search asks of the thing that it searches for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

import numpy as np

G = TypeVar("G", bound=Hashable)


class Problem(Protocol[G]):
    """What is searched for. Genomes are immutable values."""

    def seeds(self) -> list[G]:
        """Known good genomes, which the first population contains."""

    def random(self, rng: np.random.Generator) -> G:
        """A new genome, not always valid."""

    def cross(self, left: G, right: G, rng: np.random.Generator) -> G:
        """A child of two."""

    def mutate(self, genome: G, rng: np.random.Generator) -> G:
        """A variation of one."""

    def key(self, genome: G) -> str | None:
        """Equal for genomes that mean the same; None for invalid ones."""

    def size(self, genome: G) -> int:
        """How complex it is: decides between nearly equal ones."""

    def screen(self, genome: G) -> float:
        """A cheap guess of the score's order; infinite where it cannot be computed."""

    def score(self, genome: G) -> float:
        """The fitness on the search text."""

    def final(self, genome: G) -> float:
        """The fitness on more text, for the last few."""

    def encode(self, genome: G) -> str:
        """As text."""

    def decode(self, text: str) -> G:
        """The inverse of :meth:`encode`."""
