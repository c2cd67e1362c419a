"""The genetic search on a problem whose optimum is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from gossamer.compress._correlation import spearman
from gossamer.compress._evolution import Evolution, EvolutionSettings

TARGET = (3, 1, 4, 1, 5, 9, 2, 6)


class Digits:
    """Find TARGET; the screen is noisy by ``noise``, or useless."""

    def __init__(self, useless: bool = False, stop_after: int | None = None) -> None:
        self.useless, self.stop_after, self.scored = useless, stop_after, 0

    def seeds(self) -> list[tuple[int, ...]]:
        return [(0,) * len(TARGET)]

    def random(self, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(int(digit) for digit in rng.integers(0, 10, len(TARGET)))

    def cross(self, left: Any, right: Any, rng: np.random.Generator) -> tuple[int, ...]:
        return tuple(a if rng.integers(2) else b for a, b in zip(left, right, strict=True))

    def mutate(self, genome: Any, rng: np.random.Generator) -> tuple[int, ...]:
        digits = list(genome)
        digits[int(rng.integers(len(digits)))] = int(rng.integers(10))
        return tuple(digits)

    def key(self, genome: Any) -> str | None:
        return None if genome[0] == 7 else self.encode(genome)

    def size(self, genome: Any) -> int:
        return sum(digit != 0 for digit in genome)

    def screen(self, genome: Any) -> float:
        digest = float(sum(place * digit for place, digit in enumerate(genome)) % 11)
        return digest if self.useless else self._distance(genome) + 0.1 * digest

    def score(self, genome: Any) -> float:
        self.scored += 1
        if self.scored == self.stop_after:
            raise KeyboardInterrupt
        return self._distance(genome)

    def final(self, genome: Any) -> float:
        return self._distance(genome)

    def encode(self, genome: Any) -> str:
        return " ".join(map(str, genome))

    def decode(self, text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split()))

    def _distance(self, genome: Any) -> float:
        return 1.0 + sum(abs(a - b) for a, b in zip(genome, TARGET, strict=True))


SETTINGS = EvolutionSettings(population=24, generations=30, patience=30, seed=5)


def test_the_search_beats_random_drawing_with_as_many_scores() -> None:
    gains = []
    for seed in range(3):
        settings = replace(SETTINGS, seed=seed)
        found = Evolution(Digits(), settings).run()
        spent = found.history[-1]["scored"]
        drawn = Evolution(Digits(), replace(settings, control=True, evaluations=spent)).run()
        gains.append((drawn.finalists[0].final or 0) - (found.finalists[0].final or 0))
    assert min(gains) > 0


def test_the_same_seed_gives_the_same_search_and_another_one_another() -> None:
    one, two, other = (Evolution(Digits(), replace(SETTINGS, seed=seed)).run() for seed in (5, 5, 6))
    assert one == two
    assert one.history != other.history


@pytest.mark.parametrize("stop_after", [3, 60])
def test_an_interrupted_search_goes_on_as_if_nothing_had_happened(tmp_path: Path, stop_after: int) -> None:
    undisturbed = Evolution(Digits(), SETTINGS).run()
    checkpoint = tmp_path / "search.json"
    with pytest.raises(KeyboardInterrupt):
        Evolution(Digits(stop_after=stop_after), SETTINGS, checkpoint).run()
    problem = Digits()
    assert Evolution(problem, SETTINGS, checkpoint).run() == undisturbed
    assert problem.scored <= undisturbed.history[-1]["scored"]


def test_a_finished_search_costs_nothing_again_and_may_be_prolonged(tmp_path: Path) -> None:
    checkpoint = tmp_path / "search.json"
    short = Evolution(Digits(), replace(SETTINGS, generations=4), checkpoint).run()
    again = Digits()
    assert Evolution(again, replace(SETTINGS, generations=4), checkpoint).run() == short
    assert again.scored == 0
    assert Evolution(Digits(), SETTINGS, checkpoint).run() == Evolution(Digits(), SETTINGS).run()


def test_a_checkpoint_of_another_search_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "search.json"
    Evolution(Digits(), replace(SETTINGS, generations=1), checkpoint, {"model": "a"}).run()
    with pytest.raises(ValueError, match="holds another search .differing model"):
        Evolution(Digits(), SETTINGS, checkpoint, {"model": "b"}).run()
    checkpoint.write_text(json.dumps({"other": 1}))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        Evolution(Digits(), SETTINGS, checkpoint).run()


def test_screens_that_do_not_rank_as_scores_do_are_dropped() -> None:
    trusted, dropped = (Evolution(Digits(useless), SETTINGS).run() for useless in (False, True))
    assert trusted.screened
    assert (trusted.correlation or 0) > 0.6
    assert not dropped.screened
    last, first = dropped.history[-1], dropped.history[0]
    assert last["scored"] - first["scored"] == last["judged"] - first["judged"]


def test_invalid_genomes_are_counted_and_nothing_is_scored_twice() -> None:
    problem = Digits()
    found = Evolution(problem, SETTINGS).run()
    assert found.invalid > 0
    assert problem.scored == found.history[-1]["scored"]
    assert len({own.key for own in found.judged}) == len(found.judged)


def test_limits_stop_the_search_and_say_so() -> None:
    assert "evaluations" in Evolution(Digits(), replace(SETTINGS, evaluations=40)).run().stopped
    assert "seconds" in Evolution(Digits(), replace(SETTINGS, seconds=0.0)).run().stopped
    assert "no gain" in Evolution(Digits(), replace(SETTINGS, patience=1)).run().stopped


def test_the_rank_correlation_is_scipys() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 6, 40).tolist(), rng.normal(size=40).tolist()
    assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)
    assert spearman([1.0] * 9, right[:9]) is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("population", 0, "population"), ("elites", 40, "elites"), ("scored", 0.0, "scored"), ("cross", 1.5, "cross")],
)
def test_bad_settings_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvolutionSettings(**{field: value})
