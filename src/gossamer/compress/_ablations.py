"""The same search for a metric with one of its parts taken away, to see what each part is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gossamer.compress._evolution import EvolutionSettings
from gossamer.compress._expression import Expr
from gossamer.compress._metric import BINARY, CLASSIC_TERMINALS, GRADIENT_TERMINALS, UNARY
from gossamer.compress._metric_search import MetricProblem
from gossamer.compress._metric_space import MetricSpace

_INPUT_TERMINALS = ("X", "M", "V", "D", "Q")


class _ScreenOnly(MetricProblem):
    """Takes the screen for the score, and the score for nothing."""

    def score(self, genome: Expr) -> float:
        """The screen; the final score stays a perplexity."""
        return self.screen(genome)


def ablations(
    problem: MetricProblem, settings: EvolutionSettings
) -> Iterator[tuple[str, MetricProblem, EvolutionSettings]]:
    """Name, problem and settings of every search with a part missing; all may spend as many scores.

    ``classic`` is the published space: three terminals, norm division, no terminals of ours.
    """
    space = problem.space
    classic = tuple(name for name in BINARY if name != "div")
    spaces = {
        "no simplification": replace(space, oos="off", by_rank=False),
        "no gradients": _without(space, GRADIENT_TERMINALS),
        "no inputs": _without(space, _INPUT_TERMINALS),
        "classic": replace(space, terminals=CLASSIC_TERMINALS, unary=tuple(UNARY), binary=classic),
    }
    for name, own in spaces.items():
        yield name, _with_space(problem, own, MetricProblem), settings
    yield "perplexity only", problem, replace(settings, scored=1.0, population=_fewer(settings))
    yield "screen only", _with_space(problem, space, _ScreenOnly), replace(settings, scored=1.0)


def _without(space: MetricSpace, names: tuple[str, ...]) -> MetricSpace:
    return replace(space, terminals=tuple(name for name in space.terminals if name not in names))


def _with_space(problem: MetricProblem, space: MetricSpace, kind: type[MetricProblem]) -> MetricProblem:
    return kind(problem.bed, problem.texts, space, problem.sparsity, problem.pattern, problem.seeded, problem.log)


def _fewer(settings: EvolutionSettings) -> int:
    """A population that costs per generation what the scored share of the full one does."""
    return max(settings.elites + 1, math.ceil(settings.population * settings.scored))
