"""Expressions, the operators of pruning metrics against NumPy, and the metrics that people published."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.compress._expression import Expr
from gossamer.compress._metric import (
    BINARY,
    METRIC_VOCABULARY,
    NAMED_METRICS,
    TERMINALS,
    UNARY,
    SymbolicMetric,
    evaluate_tree,
)
from gossamer.compress._metric_space import MetricSpace
from gossamer.compress._statistics import LinearStatistics

VALUES = np.array([[0.0, -0.0, 1.0, -1.0, 0.5, -3.25], [1e4, -1e4, 1e-4, 2.0, 7.0, -0.1]])
ORACLES_OF_ONE = {
    "sqr": lambda x: x * x,
    "pow": lambda x: x**2,
    "neg": lambda x: -x,
    "abs": np.abs,
    "log": lambda x: np.log(np.abs(x) + 1e-3),
    "exp": lambda x: np.exp(np.minimum(x, 100)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "tanh": np.tanh,
    "skp": lambda x: x,
    "mms": lambda x: (x - x.min()) / (x.max() - x.min()),
    "zsn": lambda x: (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean()),
}
ORACLES_OF_TWO = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (np.abs(y) + 1e-8),
    "divn": lambda x, y: x / np.sqrt((y**2).sum()),
}


def random_trees(count: int, seed: int = 0) -> list[Expr]:
    space = MetricSpace(oos="off", unary=tuple(UNARY), binary=tuple(BINARY))
    rng = np.random.default_rng(seed)
    return [space.random(rng) for _ in range(count)]


def test_every_operator_equals_its_formula_in_numpy() -> None:
    assert ORACLES_OF_ONE.keys() == UNARY.keys()
    assert ORACLES_OF_TWO.keys() == BINARY.keys()
    x = torch.from_numpy(VALUES)
    for name, oracle in ORACLES_OF_ONE.items():
        np.testing.assert_allclose(UNARY[name](x).numpy(), oracle(VALUES), rtol=1e-6, err_msg=name)
    row = VALUES[1:2, ::-1].copy()  # broadcast over rows, as the statistics of inputs are
    for name, oracle in ORACLES_OF_TWO.items():
        found = BINARY[name](x, torch.from_numpy(row)).numpy()
        np.testing.assert_allclose(found, oracle(VALUES, row), rtol=1e-6, err_msg=name)


def test_normalising_a_constant_gives_zeros() -> None:
    for name in ("mms", "zsn"):
        assert not UNARY[name](torch.full((2, 3), 7.0)).any()


def test_a_thousand_trees_survive_text_and_json() -> None:
    for tree in random_trees(1000):
        METRIC_VOCABULARY.kind(tree)
        assert Expr.from_string(str(tree)) == tree
        assert Expr.from_json(tree.to_json()) == tree
        latex = METRIC_VOCABULARY.latex(tree)
        assert latex.count("{") == latex.count("}")
        assert "{0}" not in latex


def test_replacing_a_node_changes_that_node_only() -> None:
    for tree in random_trees(50, seed=3):
        for place, node in enumerate(tree.nodes()):
            changed = tree.replaced(place, Expr("X"))
            assert list(changed.nodes())[place] == Expr("X")
            assert changed.size == tree.size - node.size + 1
            assert changed.replaced(place, node) == tree


def test_the_published_metric_is_read_from_its_json() -> None:
    published = (
        '{"data": "mul", "left": {"data": "abs", "left": {"data": "mul", "left": {"data": "W"}, "right": {"data": "W"}}},'
        ' "right": {"data": "mms", "left": {"data": "G"}}}'
    )
    assert SymbolicMetric.parse(published) == SymbolicMetric.parse("pruner-zero")
    divided = SymbolicMetric.parse('{"data": "div", "left": {"data": "W"}, "right": {"data": "X"}}')
    assert str(divided.tree) == "divn(W, X)"


def layer(seed: int = 0) -> tuple[torch.Tensor, LinearStatistics]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(12, 40, generator=generator)
    statistics = LinearStatistics(40, hessian=True)
    statistics.update(torch.randn(100, 40, generator=generator) * torch.rand(40, generator=generator).exp())
    return weight, statistics


def test_named_metrics_equal_their_formulas() -> None:
    weight, statistics = layer()
    size, second = weight.abs().double(), statistics.second_moment
    expected = {
        "magnitude": size,
        "wanda": size * second.sqrt(),
        "ria": (size / size.sum(1, keepdim=True) + size / size.sum(0)) * second**0.25,
    }
    hessian = statistics.hessian
    assert hessian is not None
    damped = hessian.double() + 0.01 * hessian.diagonal().mean() * torch.eye(40)
    expected["obs"] = size.square() / torch.linalg.inv(damped).diagonal()
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    expected["sparsegpt-diagonal"] = size.square() / factor.diagonal().square()
    for name, scores in expected.items():
        found = SymbolicMetric.parse(name)(weight, statistics)
        torch.testing.assert_close(found.double(), scores, rtol=1e-3, atol=1e-6, msg=name)


def test_the_terminals_are_documented_and_named_metrics_use_only_them() -> None:
    assert METRIC_VOCABULARY.terminals.keys() == TERMINALS.keys()
    for name in NAMED_METRICS:
        assert SymbolicMetric.parse(name).leaves <= TERMINALS.keys()


def test_a_number_may_stand_for_a_leaf() -> None:
    tree = Expr.from_string("add(W, mul(2.5, X))")
    found = evaluate_tree(tree, {"W": torch.ones(2, 2), "X": torch.tensor([[1.0, 2.0]])})
    assert found.tolist() == [[3.5, 6.0], [3.5, 6.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mul(W)", "takes 2 operands"),
        ("foo(W)", "unknown operator 'foo'"),
        ("mul(W, Z)", "no such terminal"),
        ("mul(W, X", "closing parenthesis"),
        ("mul(W X)", "expected"),
        ("mul(W, )", "lacks an operand"),
        ("mul", "lacks operands"),
        ("W X", "ends before"),
        ("W $", "cannot be read"),
        ("sqrt(X)", "does not contain the weight"),
        ('{"left": 1}', '"data"'),
        ('{"data": "mul", "right": {"data": "W"}}', "right child but no left"),
    ],
)
def test_bad_metrics_are_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SymbolicMetric.parse(text)


def test_a_tree_that_contains_itself_is_refused() -> None:
    node: dict[str, object] = {"data": "neg"}
    node["left"] = node
    with pytest.raises(ValueError, match="may contain itself"):
        Expr.from_json(node)


def test_missing_statistics_are_named() -> None:
    weight, _ = layer()
    with pytest.raises(ValueError, match="terminal G needs gradient statistics"):
        SymbolicMetric.parse("gblm")(weight, LinearStatistics(40))
    with pytest.raises(ValueError, match="terminal D needs statistics with a Hessian"):
        SymbolicMetric.parse("obs")(weight, LinearStatistics(40))
    with pytest.raises(ValueError, match="not finite"):
        SymbolicMetric.parse("exp(exp(exp(add(W, 9))))")(weight, LinearStatistics(40))
