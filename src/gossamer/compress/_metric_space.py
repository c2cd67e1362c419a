"""The space of pruning metrics: random trees, their crossing and mutation, and when two of them are the same.

Trees grow as in Koza's ramped half-and-half. Two metrics are the same if they rank the weights of three fixed random layers
alike: that is what masks depend on, and it catches what no rule of simplification does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gossamer.compress._expression import Expr
from gossamer.compress._metric import BINARY, NAMED_METRICS, TERMINALS, UNARY, evaluate_tree
from gossamer.compress._simplify import constant, simplify

_GROW_LEAF = 0.5
_SHAPE = (6, 16)
_LAYERS = 3


@dataclass(frozen=True)
class MetricSpace:
    """Which trees a search may visit.

    terminals, unary, binary: names. max_initial_depth, max_depth, max_size: of trees, in nodes. oos: mode of
    :func:`~gossamer.compress.simplify`. by_rank: trees that rank alike are one; otherwise trees that print alike.
    """

    terminals: tuple[str, ...] = tuple(TERMINALS)
    unary: tuple[str, ...] = tuple(name for name in UNARY if name not in ("pow", "skp", "neg"))
    binary: tuple[str, ...] = tuple(name for name in BINARY if name != "divn")
    min_depth: int = 2
    max_initial_depth: int = 4
    max_depth: int = 6
    max_size: int = 15
    oos: str = "sound"
    by_rank: bool = True
    _examples: list[dict[str, Tensor]] = field(default_factory=lambda: example_layers(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, names, known in (
            ("terminals", self.terminals, TERMINALS), ("unary", self.unary, UNARY), ("binary", self.binary, BINARY),
        ):  # fmt: skip
            if unknown := sorted(set(names) - set(known)):
                raise ValueError(f"{what} {', '.join(unknown)} unknown; known: {', '.join(known)}")
        if not set(self.terminals) & {"W", "R", "C"} or not self.unary or not self.binary:
            raise ValueError("a space of metrics needs W, R or C among its terminals, and unary and binary operators")
        if not 1 <= self.min_depth <= self.max_initial_depth <= self.max_depth:
            raise ValueError(
                "need 1 <= min_depth <= max_initial_depth <= max_depth, "
                f"got {self.min_depth}, {self.max_initial_depth}, {self.max_depth}"
            )

    def seeds(self) -> list[Expr]:
        """The named metrics whose terminals belong to the space."""
        trees = [Expr.from_string(text) for text in NAMED_METRICS.values()]
        return [self.simplified(tree) for tree in trees if {node.op for node in leaves(tree)} <= set(self.terminals)]

    def random(self, rng: np.random.Generator) -> Expr:
        """A tree of ramped half-and-half."""
        limit = int(rng.integers(self.min_depth, self.max_initial_depth + 1))
        return self.simplified(self._grown(rng, 1, limit, full=bool(rng.integers(2))))

    def _grown(self, rng: np.random.Generator, depth: int, limit: int, full: bool) -> Expr:
        leaf = depth >= limit or (depth >= self.min_depth and not full and rng.random() < _GROW_LEAF)
        if leaf:
            return Expr(_pick(rng, self.terminals))
        name = _pick(rng, self.unary + self.binary)
        return Expr(name, tuple(self._grown(rng, depth + 1, limit, full) for _ in range(1 if name in UNARY else 2)))

    def cross(self, left: Expr, right: Expr, rng: np.random.Generator) -> Expr:
        """``left`` with one of its subtrees replaced by one of ``right``'s."""
        place = int(rng.integers(left.size))
        graft = list(right.nodes())[int(rng.integers(right.size))]
        return self.simplified(left.replaced(place, graft))

    def mutate(self, tree: Expr, rng: np.random.Generator) -> Expr:
        """Replace a subtree by a new one (3 of 5), exchange one name (1), or wrap or unwrap a node (1)."""
        place = int(rng.integers(tree.size))
        node = list(tree.nodes())[place]
        kind = int(rng.integers(5))
        if kind < 3:
            new = self._grown(rng, 1, int(rng.integers(1, 4)), full=False)
        elif kind == 3:
            names = self.terminals if not node.args else self.unary if len(node.args) == 1 else self.binary
            new = Expr(_pick(rng, names), node.args)
        else:
            new = node.args[0] if node.args and rng.random() < 0.5 else Expr(_pick(rng, self.unary), (node,))
        return self.simplified(tree.replaced(place, new))

    def simplified(self, tree: Expr) -> Expr:
        """``tree`` in the form of the space's mode."""
        return simplify(tree, self.oos)

    def key(self, tree: Expr) -> str | None:
        """What makes ``tree`` the same metric as another; None if it is none or does not belong to the space."""
        if tree.size > self.max_size or tree.depth > self.max_depth or constant(tree):
            return None
        if not {node.op for node in leaves(tree)} & {"W", "R", "C"}:
            return None
        signature = ranking_signature(tree, self._examples)
        return signature if signature is None or self.by_rank else str(tree)


def leaves(tree: Expr) -> list[Expr]:
    """The terminals of ``tree``, from left to right."""
    return [node for node in tree.nodes() if not node.args and node.number is None]


def example_layers(seed: int = 20240721) -> list[dict[str, Tensor]]:
    """Values of every terminal for three small random layers, float64."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return [_example(rng, spread) for spread in (0.5, 1.0, 2.0)[:_LAYERS]]


def _example(rng: np.random.Generator, spread: float) -> dict[str, Tensor]:
    weight = np.abs(rng.standard_normal(_SHAPE)) * 0.1
    rows = {name: np.exp(spread * rng.standard_normal((1, _SHAPE[1]))) for name in "XMVDQU"}
    full = {name: np.exp(spread * rng.standard_normal(_SHAPE)) for name in "GF"}
    shares = {"R": weight / weight.sum(1, keepdims=True), "C": weight / weight.sum(0, keepdims=True)}
    return {name: torch.from_numpy(value) for name, value in {"W": weight, **shares, **rows, **full}.items()}


def ranking_signature(tree: Expr, examples: list[dict[str, Tensor]]) -> str | None:
    """A hash of the order of scores in every row; None if scores are not finite or do not differ within rows."""
    digest = hashlib.sha256()
    for values in examples:
        scores = evaluate_tree(tree, values).expand(_SHAPE)
        if not bool(scores.isfinite().all()) or bool((scores.amax(1) == scores.amin(1)).any()):
            return None
        digest.update(torch.argsort(scores, dim=1, stable=True).to(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:20]


def same_ranking(left: Expr, right: Expr) -> bool:
    """Whether both metrics rank the weights of the example layers alike.

    >>> same_ranking(Expr.from_string("mul(W, sqrt(X))"), Expr.from_string("mul(X, sqr(W))"))
    True
    """
    examples = example_layers()
    first = ranking_signature(left, examples)
    return first is not None and first == ranking_signature(right, examples)


def _pick(rng: np.random.Generator, names: tuple[str, ...]) -> str:
    return names[int(rng.integers(len(names)))]
