"""Opposing operations cancel: one form for the many trees that mean the same metric (Pruner-Zero's OOS).

The paper names the idea and gives no rules; the rules here are ours. Mode ``sound`` applies only identities of the
protected operators, exact in real arithmetic. Mode ``paper`` also cancels pairs that are opposites by name only, such as
``exp(log(a))``, whose protected forms are not. Rules are applied from the leaves up until nothing changes; no rule
makes a tree larger.

:func:`rank_form` goes further: a mask depends on the order of the scores alone, so that a root which keeps the order
can go.
"""

from __future__ import annotations

from collections.abc import Callable

from gossamer.compress._expression import Expr
from gossamer.compress._metric import EPSILON, METRIC_VOCABULARY

MODES = ("sound", "paper", "off")

ZERO, ONE = Expr("0"), Expr("1")
_EVEN = frozenset({"sqr", "sqrt", "abs", "log"})
"""Operators that see the magnitude of their operand only."""
_NEVER_NEGATIVE = frozenset({"abs", "sqr", "pow", "exp", "sqrt", "mms"})
_SIGN_KEEPING = frozenset({"tanh", "skp", "div", "divn"})
_OPPOSITES = frozenset({("exp", "log"), ("log", "exp")})

Rule = Callable[[Expr], Expr | None]


def simplify(tree: Expr, mode: str = "sound") -> Expr:
    """The simplest form that the rules of ``mode`` reach, operands in canonical order; "off" only orders them.

    Raises:
        ValueError: unknown ``mode``.

    >>> str(simplify(Expr.from_string("sqrt(mul(sub(W, neg(X)), add(X, W)))")))
    'add(W, X)'
    >>> tree = Expr.from_string("exp(log(W))")
    >>> str(simplify(tree)), str(simplify(tree, "paper"))
    ('add(0.001, W)', 'W')
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "off":
        return METRIC_VOCABULARY.ordered(tree)
    rules = _SOUND if mode == "sound" else _PAPER + _SOUND
    return _settled(tree, rules)


def _settled(tree: Expr, rules: tuple[Rule, ...]) -> Expr:
    args = tuple(_settled(arg, rules) for arg in tree.args)
    if tree.op in METRIC_VOCABULARY.commutative:
        args = tuple(sorted(args, key=str))
    tree = Expr(tree.op, args)
    for rule in rules:
        if (simpler := rule(tree)) is not None and simpler != tree:
            return _settled(simpler, rules)
    return tree


def never_negative(tree: Expr) -> bool:
    """Whether no value of ``tree`` can be below zero, as far as its signs tell."""
    if not tree.args:
        number = tree.number
        return METRIC_VOCABULARY.terminals[tree.op].nonnegative if number is None else number >= 0
    if tree.op in ("add", "mul"):
        return all(map(never_negative, tree.args))
    return tree.op in _NEVER_NEGATIVE or (tree.op in _SIGN_KEEPING and never_negative(tree.args[0]))


def rank_form(tree: Expr) -> Expr:
    """``tree`` without what keeps the order of scores inside every layer: metrics with equal forms give equal masks.

    Dropped at the root: mms, zsn, division by a norm, a positive factor or summand; exp of what is bounded; log, sqrt
    and sqr of what is never negative. exp of anything else stays, because it saturates.

    >>> str(rank_form(Expr.from_string("sqr(mul(2.5, mms(W)))")))
    'W'
    """
    tree = simplify(tree)
    while (inner := _order_kept(tree)) is not None:
        tree = simplify(inner)
    return tree


def _order_kept(tree: Expr) -> Expr | None:
    """An operand that has the order of ``tree`` in every layer, if the root allows."""
    first = tree.args[0] if tree.args else tree
    if tree.op in ("mms", "zsn", "divn"):
        return first
    if tree.op == "exp" and first.op in ("mms", "tanh"):
        return first
    if tree.op in ("log", "sqrt", "sqr") and never_negative(first):
        return first
    if tree.op in ("mul", "add"):
        for number, other in (tree.args, tree.args[::-1]):
            if number.number is not None and (tree.op == "add" or number.number > 0):
                return other
    return None


def _identity(tree: Expr) -> Expr | None:
    return tree.args[0] if tree.op == "skp" else None


def _power_is_square(tree: Expr) -> Expr | None:
    return Expr("sqr", tree.args) if tree.op == "pow" else None


def _product_with_itself(tree: Expr) -> Expr | None:
    return Expr("sqr", tree.args[:1]) if tree.op == "mul" and tree.args[0] == tree.args[1] else None


def _opposing_pair(tree: Expr) -> Expr | None:
    """Square and root, double minus, and ``exp(log a) = |a| + 0.001``."""
    if len(tree.args) != 1 or not tree.args[0].args:
        return None
    inner, below = tree.args[0], tree.args[0].args[0]
    if (tree.op, inner.op) in (("sqr", "sqrt"), ("sqrt", "sqr")):
        return Expr("abs", (below,))
    if tree.op == inner.op == "neg":
        return below
    if (tree.op, inner.op) == ("exp", "log"):
        return Expr("add", (Expr(str(EPSILON)), below)) if never_negative(below) else None
    return None


def _sign_inside_even(tree: Expr) -> Expr | None:
    """``f(|a|) = f(-a) = f(a)`` where f sees magnitudes only."""
    if tree.op in _EVEN and tree.args[0].op in ("abs", "neg"):
        return Expr(tree.op, tree.args[0].args)
    return None


def _magnitude_of_nonnegative(tree: Expr) -> Expr | None:
    return tree.args[0] if tree.op == "abs" and never_negative(tree.args[0]) else None


def _normalised_again(tree: Expr) -> Expr | None:
    """Both normalisations forget scale and offset, their own and the other's."""
    if tree.op in ("mms", "zsn") and tree.args[0].op in ("mms", "zsn"):
        return Expr(tree.op, tree.args[0].args)
    return None


def _sum_with_minus(tree: Expr) -> Expr | None:
    """``a + (-b)``, ``a - (-b)``."""
    if tree.op == "add":
        for one, other in (tree.args, tree.args[::-1]):
            if other.op == "neg":
                return Expr("sub", (one, other.args[0]))
    if tree.op == "sub" and tree.args[1].op == "neg":
        return Expr("add", (tree.args[0], tree.args[1].args[0]))
    return None


def _minus_of_difference(tree: Expr) -> Expr | None:
    """``-(a - b)``."""
    return Expr("sub", tree.args[0].args[::-1]) if tree.op == "neg" and tree.args[0].op == "sub" else None


def _cancelling_sum(tree: Expr) -> Expr | None:
    """``a - a``, ``(a - b) + b``, ``(a + b) - b``, ``a - (a - b)``, ``(a - b) - a``."""
    if tree.op == "sub":
        left, right = tree.args
        if left == right:
            return ZERO
        if left.op == "add" and right in left.args:
            return left.args[1 - left.args.index(right)]
        if right.op == "sub" and right.args[0] == left:
            return right.args[1]
        if left.op == "sub" and left.args[0] == right:
            return Expr("neg", (left.args[1],))
    if tree.op == "add":
        for one, other in (tree.args, tree.args[::-1]):
            if one.op == "sub" and one.args[1] == other:
                return one.args[0]
    return None


def _with_zero_or_one(tree: Expr) -> Expr | None:
    """Sums with zero, products with zero and one, functions of zero."""
    if len(tree.args) == 1:
        vanishing = tree.args[0] == ZERO and tree.op in ("neg", "abs", "sqr", "sqrt", "tanh")
        constant = tree.args[0].number is not None and tree.op in ("mms", "zsn")
        return ZERO if vanishing or constant else None
    if len(tree.args) == 2:
        left, right = tree.args
        if tree.op == "add" and ZERO in tree.args:
            return right if left == ZERO else left
        if tree.op == "sub" and ZERO in tree.args:
            return left if right == ZERO else Expr("neg", (right,))
        if tree.op == "mul" and ZERO in tree.args:
            return ZERO
        if tree.op == "mul" and ONE in tree.args:
            return right if left == ONE else left
        if tree.op in ("div", "divn") and left == ZERO:
            return ZERO
    return None


def _opposite_names(tree: Expr) -> Expr | None:
    """``exp(log a)`` and ``log(exp a)`` as if they were not protected."""
    if len(tree.args) == 1 and (tree.op, tree.args[0].op) in _OPPOSITES:
        return tree.args[0].args[0]
    return None


def _cancelling_quotient(tree: Expr) -> Expr | None:
    """``a / a``, ``(a / b) b``, ``(a b) / b`` as if division were not protected."""
    if tree.op == "div":
        left, right = tree.args
        if left == right:
            return ONE
        if left.op == "mul" and right in left.args:
            return left.args[1 - left.args.index(right)]
    if tree.op == "mul":
        for one, other in (tree.args, tree.args[::-1]):
            if one.op == "div" and one.args[1] == other:
                return one.args[0]
    return None


_SOUND: tuple[Rule, ...] = (
    _identity,
    _power_is_square,
    _product_with_itself,
    _opposing_pair,
    _sign_inside_even,
    _magnitude_of_nonnegative,
    _normalised_again,
    _sum_with_minus,
    _minus_of_difference,
    _cancelling_sum,
    _with_zero_or_one,
)
_PAPER: tuple[Rule, ...] = (_opposite_names, _cancelling_quotient)


def constant(tree: Expr) -> bool:
    """Whether no terminal is left in ``tree``."""
    return all(node.args or node.number is not None for node in tree.nodes())
