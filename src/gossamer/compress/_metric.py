"""Pruning metrics as expressions: what Pruner-Zero searches (Dong et al., ICML 2024).

A metric turns the weights of a layer and the statistics of its inputs and gradients into one number per weight; the
lowest of every row, or of every window, are pruned. Operators follow the published ones, protected forms included: they
are total functions, so that every tree has a value. The published division is by a norm and therefore only a change of
scale; it is ``divn`` here, and ``div`` divides elementwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gossamer.compress._expression import Expr, Operator, Terminal, Vocabulary
from gossamer.compress._gradients import GradientStatistics
from gossamer.compress._sparsegpt import inverse_factor
from gossamer.compress._statistics import LinearStatistics

EPSILON = 1e-3
"""Of the protected logarithm, ``ln(|x| + 0.001)``."""
DIVISION_EPSILON = 1e-8
"""Of the protected division, ``x / (|y| + 1e-8)``."""
EXPONENT_LIMIT = 100.0

UNARY: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({
    "sqr": torch.square,
    "neg": torch.neg,
    "abs": torch.abs,
    "log": lambda x: (x.abs() + EPSILON).log(),
    "exp": lambda x: x.clamp(max=EXPONENT_LIMIT).exp(),
    "sqrt": lambda x: x.abs().sqrt(),
    "tanh": torch.tanh,
    "pow": torch.square,
    "skp": lambda x: x,
    "mms": lambda x: _ratio(x - x.min(), x.max() - x.min()),
    "zsn": lambda x: _ratio(x - x.mean(), x.std(correction=0)),
})  # fmt: skip
BINARY: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + DIVISION_EPSILON),
    "divn": lambda x, y: _ratio(x, torch.linalg.vector_norm(y)),
})  # fmt: skip

METRIC_VOCABULARY = Vocabulary(
    operators={
        "sqr": Operator(1, r"\left({0}\right)^{2}"),
        "neg": Operator(1, r"-\left({0}\right)"),
        "abs": Operator(1, r"\left|{0}\right|"),
        "log": Operator(1, r"\ln\left(\left|{0}\right|+\epsilon\right)"),
        "exp": Operator(1, r"e^{{0}}"),
        "sqrt": Operator(1, r"\sqrt{\left|{0}\right|}"),
        "tanh": Operator(1, r"\tanh\left({0}\right)"),
        "pow": Operator(1, r"\left({0}\right)^{2}"),
        "skp": Operator(1, r"{0}"),
        "mms": Operator(1, r"\operatorname{mms}\left({0}\right)"),
        "zsn": Operator(1, r"\operatorname{zsn}\left({0}\right)"),
        "add": Operator(2, r"\left({0} + {1}\right)"),
        "sub": Operator(2, r"\left({0} - {1}\right)"),
        "mul": Operator(2, r"{0} \cdot {1}"),
        "div": Operator(2, r"\frac{{0}}{\left|{1}\right|+\epsilon}"),
        "divn": Operator(2, r"\frac{{0}}{\left\|{1}\right\|_F}"),
    },
    terminals={
        "W": Terminal(r"|W|"),
        "G": Terminal(r"G"),
        "X": Terminal(r"\mathbb{E}x^2"),
        "F": Terminal(r"F"),
        "U": Terminal(r"\mathbb{E}_g x^2"),
        "R": Terminal(r"\frac{|W|}{\sum_j|W|}"),
        "C": Terminal(r"\frac{|W|}{\sum_i|W|}"),
        "M": Terminal(r"\mathbb{E}|x|"),
        "V": Terminal(r"\operatorname{Var}x"),
        "D": Terminal(r"\frac{1}{[H^{-1}]_{jj}}"),
        "Q": Terminal(r"u^2"),
    },
    commutative=("add", "mul"),
)

TERMINALS: Mapping[str, str] = MappingProxyType({
    "W": "|W|",
    "G": "sqrt of summed squared sequence gradients, (out, in)",
    "X": "mean squared input, (1, in)",
    "F": "mean squared input over tokens weighted by the output's squared gradient (Fisher, per row), (out, in)",
    "U": "mean squared input over tokens weighted by the squared gradient of all outputs, (1, in)",
    "R": "|W| over the sum of its row",
    "C": "|W| over the sum of its column",
    "M": "mean magnitude of the input, (1, in)",
    "V": "variance of the input, (1, in)",
    "D": "1 over the diagonal of the inverse Hessian, (1, in)",
    "Q": "squared diagonal of the Cholesky factor of the inverse Hessian, inverted: what SparseGPT divides by, (1, in)",
})  # fmt: skip
CLASSIC_TERMINALS = ("W", "G", "X")
"""What the published search knows."""
GRADIENT_TERMINALS = ("G", "F", "U")
HESSIAN_TERMINALS = ("D", "Q")

NAMED_METRICS: Mapping[str, str] = MappingProxyType({
    "magnitude": "W",
    "wanda": "mul(W, sqrt(X))",
    "ria": "mul(add(C, R), sqrt(sqrt(X)))",
    "gblm": "mul(W, add(G, sqrt(X)))",
    "pruner-zero": "mul(abs(mul(W, W)), mms(G))",
    "fisher": "mul(sqr(W), F)",
    "fisher-wanda": "mul(W, add(sqrt(F), sqrt(X)))",
    "obs": "mul(sqr(W), D)",
    "sparsegpt-diagonal": "mul(sqr(W), Q)",
})  # fmt: skip
"""Published and hand-made metrics as trees (sources: docs/systems/pruner_zero.md)."""


def _ratio(x: Tensor, by: Tensor) -> Tensor:
    """``x / by``; zeros where the scalar ``by`` is zero."""
    return x / by if float(by) > 0 else torch.zeros_like(x)


def evaluate_tree(tree: Expr, terminals: Mapping[str, Tensor]) -> Tensor:
    """The value of ``tree``; leaves are looked up in ``terminals``, whose shapes may broadcast."""
    if not tree.args:
        if (number := tree.number) is not None:
            some = next(iter(terminals.values()))
            return torch.tensor(number, dtype=some.dtype, device=some.device)
        return terminals[tree.op]
    args = [evaluate_tree(arg, terminals) for arg in tree.args]
    return UNARY[tree.op](args[0]) if len(args) == 1 else BINARY[tree.op](args[0], args[1])


@dataclass(frozen=True)
class SymbolicMetric:
    """A metric given by a tree; called like any score of this room.

    >>> statistics = LinearStatistics(2)
    >>> statistics.update(torch.tensor([[1.0, 2.0]]))
    >>> SymbolicMetric.parse("wanda")(torch.tensor([[3.0, -1.0]]), statistics)
    tensor([[3., 2.]])
    """

    tree: Expr

    def __post_init__(self) -> None:
        METRIC_VOCABULARY.kind(self.tree)
        if not self.leaves & {"W", "R", "C"}:
            raise ValueError(f"metric {self.tree} does not contain the weight: need W, R or C")

    @classmethod
    def parse(cls, text: str) -> SymbolicMetric:
        """A name of :data:`NAMED_METRICS`, an expression as text, or its JSON (with the published ``div``, by a norm).

        Raises:
            ValueError: it is none of these.
        """
        if text.lstrip().startswith("{"):
            return cls(Expr.from_json(text, {"div": "divn"}))
        return cls(Expr.from_string(NAMED_METRICS.get(text, text)))

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the terminals in the tree."""
        return frozenset(node.op for node in self.tree.nodes() if not node.args and node.number is None)

    @property
    def needs_gradients(self) -> bool:
        """Whether gradient statistics are needed."""
        return bool(self.leaves & set(GRADIENT_TERMINALS))

    @property
    def needs_hessian(self) -> bool:
        """Whether Hessians are needed."""
        return bool(self.leaves & set(HESSIAN_TERMINALS))

    def __call__(
        self, weight: Tensor, statistics: LinearStatistics, gradients: GradientStatistics | None = None
    ) -> Tensor:
        """Scores ``(out, in)`` float32.

        Raises:
            ValueError: statistics that the tree needs are missing, or the scores are not finite.
        """
        values = {name: terminal(name, weight, statistics, gradients) for name in sorted(self.leaves)}
        scores = evaluate_tree(self.tree, values).expand(weight.shape)
        if not bool(scores.isfinite().all()):
            raise ValueError(f"metric {self.tree} has values that are not finite on a layer of {tuple(weight.shape)}")
        return scores


def terminal(name: str, weight: Tensor, statistics: LinearStatistics, gradients: GradientStatistics | None) -> Tensor:
    """The value of terminal ``name`` for one layer, float32, ``(out, in)`` or ``(1, in)``.

    Raises:
        ValueError: the statistics that it needs are missing.
    """
    if name in GRADIENT_TERMINALS:
        if gradients is None:
            raise ValueError(f"terminal {name} needs gradient statistics, which were not collected")
        if name == "G":
            return gradients.l2
        if name == "U":
            return gradients.weighted_moment[None]
        return gradients.fisher / gradients.output_fisher.clamp_min(1e-30)[:, None]
    if name in HESSIAN_TERMINALS:
        if statistics.hessian is None:
            raise ValueError(f"terminal {name} needs statistics with a Hessian: calibrate(..., hessian=True)")
        factor = inverse_factor(statistics.hessian)
        inverse = factor.square().sum(0) if name == "D" else factor.diagonal().square()
        return inverse.reciprocal()[None]
    size = weight.detach().float().abs()
    if name == "W":
        return size
    if name in "RC":
        return size / size.sum(1 if name == "R" else 0, keepdim=True).clamp_min(1e-30)
    row = {"X": statistics.second_moment, "M": statistics.mean_magnitude, "V": statistics.variance}[name]
    return row.float()[None]
