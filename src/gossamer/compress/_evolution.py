"""A genetic search with staged fitness that can be stopped, resumed and replayed bit by bit.

Genomes are judged in stages: a cheap screen for all, a score for the best of each generation, a final score for the few
that are left at the end. Fitness values are lower-is-better. Everything random comes from one NumPy generator whose
state is part of the checkpoint, nothing depends on hash order, and no genome is judged twice: the same seed gives the
same search, interrupted or not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from gossamer.compress._correlation import spearman
from gossamer.compress._problem import Problem
from gossamer.core.files import write_json

CHECKPOINT_VERSION = 1
_TRIES_PER_CHILD = 10
_SMALL_GAIN = 0.002
_FIRST_SCORES = 30


@dataclass(frozen=True)
class EvolutionSettings:
    """How to search.

    population, generations, tournament, elites: as usual. cross, mutate: probabilities that a child is crossed and
        that it is mutated; at least one of the two happens.
    scored: share of new genomes in a generation that are scored, best screens first; at 1 the screen is not used.
    trust: least rank correlation of screens with scores, over the first generation, with which screens are used at all;
        without them a generation breeds only as many children as it can score.
    finalists: how many get a final score.
    patience: generations without a gain of 0.2 % after which to stop.
    evaluations: most scores in all. seconds: wall clock after which no new generation begins.
    control: draw children at random instead of breeding them: the honest comparison of any search.
    tie: scores within this share of each other are equal; the smaller genome is then better.
    """

    population: int = 40
    generations: int = 30
    tournament: int = 5
    elites: int = 2
    cross: float = 0.5
    mutate: float = 0.5
    scored: float = 0.25
    trust: float = 0.6
    finalists: int = 5
    patience: int = 8
    evaluations: int = 10_000
    seconds: float = math.inf
    control: bool = False
    tie: float = 0.005
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("population", "tournament", "finalists", "patience", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.generations < 0 or not 0 <= self.elites < self.population:
            raise ValueError(
                f"need generations >= 0 and 0 <= elites < population, got {self.generations}, {self.elites}"
            )
        for name in ("cross", "mutate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be a probability, got {getattr(self, name)}")
        if not 0.0 < self.scored <= 1.0:
            raise ValueError(f"scored must be a share in (0, 1], got {self.scored}")


@dataclass
class Judged:
    """A genome as text with what is known of it; ``score`` and ``final`` are None until computed."""

    genome: str
    key: str
    size: int
    screen: float
    score: float | None = None
    final: float | None = None


@dataclass
class SearchResult:
    """What a search found.

    best: the genome with the least final score, as text. finalists: best first. history: one record a generation, with
        ``generation, best, median, scored, judged, new, leader``. judged: every genome that was judged. invalid: how
    many were not. correlation: Spearman's of screens with scores over the first generation, None if it was not computed.
    screened: whether screens were used after that.
    """

    best: str
    finalists: list[Judged]
    history: list[dict[str, Any]]
    judged: list[Judged]
    invalid: int
    correlation: float | None
    screened: bool
    stopped: str


@dataclass
class _State:
    """Everything that a checkpoint holds."""

    generation: int = 0
    population: list[str] = field(default_factory=list)  # keys
    judged: dict[str, Judged] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    invalid: int = 0
    best: float = math.inf
    stalled: int = 0
    seconds: float = 0.0
    correlation: float | None = None
    screened: bool = False


Report = Callable[[dict[str, Any]], None]
"""Called with every record of the history."""


class Evolution:
    """A search for a genome of ``problem``.

    checkpoint: file that is written after every generation and taken up again if it is there and has the same
        ``identity`` (everything besides the settings that determines the result).
    """

    def __init__(
        self,
        problem: Problem[Any],
        settings: EvolutionSettings,
        checkpoint: Path | None = None,
        identity: dict[str, Any] | None = None,
        report: Report = lambda record: None,
    ) -> None:
        self.problem, self.settings, self.checkpoint, self.report = problem, settings, checkpoint, report
        self.identity = {"version": CHECKPOINT_VERSION, "settings": _lasting(settings), **(identity or {})}
        self.rng = np.random.Generator(np.random.PCG64(settings.seed))
        self.state = _State()

    def run(self) -> SearchResult:
        """Search until a limit is reached.

        Raises:
            ValueError: the checkpoint belongs to another search, or no valid genome was found.
        """
        self._resume()
        began = monotonic() - self.state.seconds
        if not self.state.history:
            self._first_generation()
            self._save(began)
        while (stopped := self._stop(began)) is None:
            self._next_generation()
            self._save(began)
        return self._finish(stopped)

    def _first_generation(self) -> None:
        new: list[str] = []
        for genome in self.problem.seeds():
            self._admit(genome, new)
        self._fill(new, self.settings.population, lambda: self.problem.random(self.rng))
        if not new:
            raise ValueError("the problem gave no valid genome: check its vocabulary and settings")
        self._judge_first(new)
        self.state.population = new
        self._record(len(new))

    def _judge_first(self, new: list[str]) -> None:
        """Score up to 30 genomes over the whole range of screens, and see whether screens can be trusted."""
        if self.settings.scored == 1:
            self._judge(new)
            return
        ordered = sorted(new, key=lambda key: (self.state.judged[key].screen, key))
        usable = [key for key in ordered if math.isfinite(self.state.judged[key].screen)]
        count = min(len(usable), _FIRST_SCORES, self.settings.evaluations)
        places = [round(index * (len(usable) - 1) / max(count - 1, 1)) for index in range(count)]
        for place in places:
            self._score(self.state.judged[usable[place]])
        pairs = [(own.screen, own.score) for own in self.state.judged.values() if own.score is not None]
        self.state.correlation = spearman([screen for screen, _ in pairs], [score for _, score in pairs])
        self.state.screened = (self.state.correlation or 0.0) >= self.settings.trust

    def _next_generation(self) -> None:
        state, settings = self.state, self.settings
        state.generation += 1
        ranked = self._ranked(state.population)
        new: list[str] = []
        breed = (lambda: self.problem.random(self.rng)) if settings.control else (lambda: self._child(ranked))
        children = settings.population - settings.elites
        if settings.scored < 1 and not state.screened:
            children = max(1, round(settings.scored * children))
        self._fill(new, children, breed)
        self._judge(new)
        elites = ranked[: settings.elites]
        others = self._ranked(ranked[settings.elites :] + new)
        state.population = elites + others[: settings.population - settings.elites]
        self._record(len(new))

    def _child(self, ranked: list[str]) -> Any:
        """Cross two winners of tournaments, or take one, and mutate; at least one of the two happens."""
        chosen = self._genome(self._winner(ranked))
        crossed = self.rng.random() < self.settings.cross
        if crossed:
            chosen = self.problem.cross(chosen, self._genome(self._winner(ranked)), self.rng)
        if not crossed or self.rng.random() < self.settings.mutate:
            chosen = self.problem.mutate(chosen, self.rng)
        return chosen

    def _winner(self, ranked: list[str]) -> str:
        places = self.rng.integers(0, len(ranked), self.settings.tournament)
        return ranked[int(places.min())]

    def _genome(self, key: str) -> Any:
        return self.problem.decode(self.state.judged[key].genome)

    def _fill(self, new: list[str], count: int, make: Callable[[], Any]) -> None:
        for _ in range(_TRIES_PER_CHILD * count):
            if len(new) >= count:
                return
            self._admit(make(), new)

    def _admit(self, genome: Any, new: list[str]) -> None:
        """Screen ``genome`` and put its key into ``new``, unless it is invalid or known."""
        key = self.problem.key(genome)
        if key is None:
            self.state.invalid += 1
        elif key not in self.state.judged:
            wanted = self.settings.scored < 1 and (self.state.screened or not self.state.history)
            screen = self.problem.screen(genome) if wanted else 0.0
            own = Judged(self.problem.encode(genome), key, self.problem.size(genome), screen)
            self.state.judged[key] = own
            new.append(key)

    def _judge(self, new: list[str]) -> None:
        """Score the most promising share of ``new``; all of them where there are no screens."""
        share = round(self.settings.scored * len(new)) if self.state.screened else len(new)
        left = self.settings.evaluations - self._scores()
        promising = sorted(new, key=lambda key: (self.state.judged[key].screen, key))
        for key in promising[: min(max(share, 1), left)]:
            self._score(self.state.judged[key])

    def _score(self, own: Judged) -> None:
        if math.isfinite(own.screen):
            own.score = self.problem.score(self.problem.decode(own.genome))

    def _scores(self) -> int:
        return sum(own.score is not None for own in self.state.judged.values())

    def _ranked(self, keys: list[str]) -> list[str]:
        """Best first. What was only screened stands where its screen would put it among the scored."""
        judged = [self.state.judged[key] for key in dict.fromkeys(keys)]
        guess = _guesser(self.state.judged.values()) if self.state.screened else _unknown
        values = [guess(own.screen) if own.score is None else own.score for own in judged]
        order = sorted(range(len(judged)), key=lambda place: (values[place], judged[place].size, judged[place].key))
        self._prefer_small(order, values, judged)
        return [judged[place].key for place in order]

    def _prefer_small(self, order: list[int], values: list[float], judged: list[Judged]) -> None:
        """Let a smaller genome pass the one before it where their values are nearly equal."""
        for here in range(1, len(order)):
            for place in range(here, 0, -1):
                before, after = order[place - 1], order[place]
                near = values[after] <= values[before] * (1 + self.settings.tie)
                if not (near and judged[after].size < judged[before].size):
                    break
                order[place - 1], order[place] = after, before

    def _record(self, new: int) -> None:
        state = self.state
        scores = [own.score for own in state.judged.values() if own.score is not None and math.isfinite(own.score)]
        best = min(scores, default=math.inf)
        state.stalled = 0 if best < state.best * (1 - _SMALL_GAIN) else state.stalled + 1
        state.best = min(state.best, best)
        top = self._ranked(state.population)[0]
        record = {
            "generation": state.generation,
            "best": None if math.isinf(best) else best,
            "median": float(np.median(scores)) if scores else None,
            "scored": self._scores(),
            "judged": len(state.judged),
            "new": new,
            "leader": state.judged[top].genome,
        }
        state.history.append(record)
        self.report(record)

    def _stop(self, began: float) -> str | None:
        state, settings = self.state, self.settings
        if state.generation >= settings.generations:
            return f"all {settings.generations} generations are done"
        if state.stalled >= settings.patience:
            return f"no gain in {settings.patience} generations"
        if self._scores() >= settings.evaluations:
            return f"all {settings.evaluations} evaluations are spent"
        if monotonic() - began >= settings.seconds:
            return f"{settings.seconds:.0f} seconds are over"
        return None

    def _finish(self, stopped: str) -> SearchResult:
        judged = list(self.state.judged.values())
        scored = [own for own in judged if own.score is not None and math.isfinite(own.score)]
        if not scored:
            raise ValueError("no genome has a finite score: the model breaks down under every one of them")
        scored.sort(key=lambda own: (own.score, own.size, own.key))
        finalists = scored[: self.settings.finalists]
        for own in finalists:
            own.final = self.problem.final(self.problem.decode(own.genome)) if own.final is None else own.final
        finalists.sort(key=lambda own: (own.final, own.size, own.key))
        state = self.state
        return SearchResult(
            finalists[0].genome,
            finalists,
            state.history,
            judged,
            state.invalid,
            state.correlation,
            state.screened,
            stopped,
        )

    def _save(self, began: float) -> None:
        self.state.seconds = monotonic() - began
        if self.checkpoint is not None:
            state = asdict(self.state)
            state["judged"] = list(state["judged"].values())
            state["population"] = list(state["population"])
            write_json(
                self.checkpoint,
                {"identity": self.identity, "generator": self.rng.bit_generator.state, "state": state},
            )

    def _resume(self) -> None:
        if self.checkpoint is None or not self.checkpoint.is_file():
            return
        try:
            found = json.loads(self.checkpoint.read_text())
            identity, stored, generator = found["identity"], found["state"], found["generator"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.checkpoint} is not a checkpoint of a search: {error}") from error
        if identity != json.loads(json.dumps(self.identity)):
            wanted = json.loads(json.dumps(self.identity))
            differing = sorted(key for key in wanted | identity if wanted.get(key) != identity.get(key))
            raise ValueError(
                f"{self.checkpoint} holds another search (differing {', '.join(differing)}); remove it or name another file"
            )
        judged = {own["key"]: Judged(**own) for own in stored.pop("judged")}
        self.state = _State(judged=judged, **stored)
        self.rng.bit_generator.state = generator


def _lasting(settings: EvolutionSettings) -> dict[str, Any]:
    """Settings that shape the search; limits may be raised when it is taken up again."""
    limits = ("generations", "patience", "evaluations", "seconds", "finalists")
    return {key: value for key, value in asdict(settings).items() if key not in limits}


def _unknown(screen: float) -> float:
    return math.inf


def _guesser(judged: Any) -> Callable[[float], float]:
    """Maps a screen to the score that genomes with such screens had, or a little worse."""
    pairs = sorted(
        (own.screen, own.score)
        for own in judged
        if own.score is not None and math.isfinite(own.score) and math.isfinite(own.screen)
    )
    if not pairs:
        return lambda screen: screen
    screens, scores = (np.array(column) for column in zip(*pairs, strict=True))
    smooth = np.maximum.accumulate(scores)
    return lambda screen: 1.01 * float(np.interp(screen, screens, smooth)) if math.isfinite(screen) else math.inf
