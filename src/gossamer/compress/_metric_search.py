"""Find the pruning metric that suits one model: genetic programming on a workbench (Dong et al., ICML 2024).

A metric is judged in stages. The screen prunes a dozen sampled layers and adds up the loss that this costs to second order,
``tr(Δᵀ diag(g) Δ H)`` with ``g`` the mean squared gradient at the layer's outputs. The score prunes the whole model by the
statistics of the dense one and takes the perplexity of a short text; the last few are judged on a longer text. If screens
turn out not to rank as scores do, the search goes on without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gossamer.compress._expression import Expr
from gossamer.compress._masks import keep_n_of_m, keep_per_row
from gossamer.compress._metric import HESSIAN_TERMINALS, evaluate_tree, terminal
from gossamer.compress._metric_space import MetricSpace, leaves
from gossamer.compress._workbench import BenchLayer, Workbench

SCREENED_LAYERS = 12
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Texts:
    """Token ids ``(windows, seqlen)`` on which candidates are judged: ``short`` for scores, ``long`` for the last few."""

    short: Tensor
    long: Tensor


class MetricProblem:
    """What :class:`Evolution` needs to know to search for a metric.

    Args:
        bed: with gradients and Hessians, unless ``space`` does without them and screens are not used.
        sparsity: share of zeros per row; ``pattern``: N and M instead.
        log: told every score as it is found, ``log(tree, perplexity)``.
    """

    def __init__(
        self,
        bed: Workbench,
        texts: Texts,
        space: MetricSpace | None = None,
        sparsity: float = 0.5,
        pattern: tuple[int, int] | None = None,
        seeded: bool = True,
        log: Callable[[str, float], None] = lambda tree, score: None,
    ) -> None:
        if not 0.0 < sparsity < 1.0:
            raise ValueError(f"sparsity must be in (0, 1), got {sparsity}")
        self.bed, self.texts, self.space = bed, texts, space or MetricSpace()
        self.sparsity, self.pattern, self.seeded, self.log = sparsity, pattern, seeded, log
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._known: dict[tuple[str, str], float] = {}  # searches with other seeds meet the same trees
        self._sample = _spread_sample(bed.layers, SCREENED_LAYERS)
        self._values = [{name: self._terminal(layer, name) for name in self.space.terminals} for layer in self._sample]

    def seeds(self) -> list[Expr]:
        """The named metrics of the space."""
        return self.space.seeds() if self.seeded else []

    def random(self, rng: np.random.Generator) -> Expr:
        """A random tree."""
        return self.space.random(rng)

    def cross(self, left: Expr, right: Expr, rng: np.random.Generator) -> Expr:
        """See :meth:`MetricSpace.cross`."""
        return self.space.cross(left, right, rng)

    def mutate(self, genome: Expr, rng: np.random.Generator) -> Expr:
        """See :meth:`MetricSpace.mutate`."""
        return self.space.mutate(genome, rng)

    def key(self, genome: Expr) -> str | None:
        """See :meth:`MetricSpace.key`."""
        return self.space.key(genome)

    def size(self, genome: Expr) -> int:
        """Nodes."""
        return genome.size

    def encode(self, genome: Expr) -> str:
        """As printed."""
        return str(genome)

    def decode(self, text: str) -> Expr:
        """The inverse of :meth:`encode`."""
        return Expr.from_string(text)

    def screen(self, genome: Expr) -> float:
        """Loss to second order that pruning the sampled layers costs; infinite if scores are not finite."""
        total = 0.0
        for layer, values in zip(self._sample, self._values, strict=True):
            scores = evaluate_tree(genome, values).expand(layer.weight.shape)
            if not bool(scores.isfinite().all()):
                return math.inf
            total += second_order_loss(layer, layer.weight * ~self._keep(scores))
        return total

    def score(self, genome: Expr) -> float:
        """Perplexity of the short text."""
        found = self._perplexity(genome, "short")
        self.log(str(genome), found)
        return found

    def final(self, genome: Expr) -> float:
        """Perplexity of the long text."""
        return self._perplexity(genome, "long")

    def weights(self, tree: Expr) -> Iterator[tuple[BenchLayer, Tensor]]:
        """Every layer pruned by ``tree``.

        Raises:
            ValueError: scores of a layer are not finite.
        """
        for layer in self.bed.layers:
            yield layer, layer.weight * self._keep(self._scores(layer, tree))

    def _perplexity(self, tree: Expr, text: str) -> float:
        key = (text, str(tree))
        if key not in self._known:
            try:
                self._known[key] = self.bed.perplexity(self.weights(tree), getattr(self.texts, text))
            except FloatingPointError:
                self._known[key] = math.inf
        return self._known[key]

    def _scores(self, layer: BenchLayer, tree: Expr) -> Tensor:
        values = {name: self._terminal(layer, name) for name in {leaf.op: None for leaf in leaves(tree)}}
        scores = evaluate_tree(tree, values).expand(layer.weight.shape)
        if not bool(scores.isfinite().all()):
            raise FloatingPointError(f"metric {tree} is not finite on layer {layer.name}")
        return scores

    def _terminal(self, layer: BenchLayer, name: str) -> Tensor:
        """What needs a factorisation is kept: layers that share their inputs share it."""
        if name not in HESSIAN_TERMINALS:
            return terminal(name, layer.weight, layer.statistics, layer.gradients)
        key = (id(layer.statistics), name)
        if key not in self._rows:
            self._rows[key] = terminal(name, layer.weight, layer.statistics, layer.gradients)
        return self._rows[key]

    def _keep(self, scores: Tensor) -> Tensor:
        return keep_per_row(scores, self.sparsity) if self.pattern is None else keep_n_of_m(scores, *self.pattern)


def second_order_loss(layer: BenchLayer, removed: Tensor) -> float:
    """``tr(Δᵀ diag(g) Δ H) / 4``: what removing ``removed`` ``(out, in)`` costs, inputs and outputs taken as independent.

    ``H`` is ``2 E xxᵀ``, so that this is half of ``E Σ_i g_i (Δ x)_i²``, in nats per token.

    Raises:
        ValueError: the layer has no Hessian or no gradient statistics.
    """
    hessian, gradients = layer.statistics.hessian, layer.gradients
    if hessian is None or gradients is None:
        raise ValueError("the screen needs a workbench with Hessians and gradients")
    per_row = (removed @ hessian * removed).sum(1)
    return float((per_row * gradients.output_fisher).sum()) / 4


def _spread_sample(layers: list[BenchLayer], count: int) -> list[BenchLayer]:
    """``count`` layers spread over the model by the golden ratio, so that all depths and kinds of layers occur."""
    places = sorted({int((index + 0.5) * _GOLDEN % 1 * len(layers)) for index in range(count)})
    return [layers[place] for place in places]
