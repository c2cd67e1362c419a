"""Symbolic expressions: immutable typed trees over a vocabulary of operators and terminals.

A search for formulas needs trees that it can cut, graft, compare and write down. An :class:`Expr` is only the tree; what
its names mean, how many operands they take and of which kind stands in a :class:`Vocabulary`. The searches for pruning
metrics and for layer allocations each bring their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ELEMENTS, SCALAR = "elements", "scalar"
"""Kinds of values: one number per weight (or broadcast to that), one number."""

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[(),])")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Operator:
    """A function of one or two operands of kind ``operand`` with a value of kind ``result``.

    latex: with ``{0}`` and ``{1}`` for the operands.
    """

    arity: int
    latex: str
    operand: str = ELEMENTS
    result: str = ELEMENTS


@dataclass(frozen=True)
class Terminal:
    """A leaf. nonnegative: no value is ever below 0."""

    latex: str
    nonnegative: bool = True
    kind: str = ELEMENTS


@dataclass(frozen=True)
class Expr:
    """A node: the name of an operator with its operands, or a leaf: a terminal's name, or a number as text.

    >>> tree = Expr.from_string("mul(W, sqrt(X))")
    >>> str(tree), tree.size, tree.depth
    ('mul(W, sqrt(X))', 4, 3)
    >>> Expr.from_json(tree.to_json()) == tree
    True
    """

    op: str
    args: tuple[Expr, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})" if self.args else self.op

    @property
    def size(self) -> int:
        """Number of nodes."""
        return 1 + sum(arg.size for arg in self.args)

    @property
    def depth(self) -> int:
        """Nodes on the longest way from the root to a leaf."""
        return 1 + max((arg.depth for arg in self.args), default=0)

    @property
    def number(self) -> float | None:
        """The value of a number leaf, else None."""
        if self.args or not (self.op[0].isdigit() or self.op[0] in "-."):
            return None
        return float(self.op)

    def nodes(self) -> Iterator[Expr]:
        """All nodes, each before its operands."""
        yield self
        for arg in self.args:
            yield from arg.nodes()

    def replaced(self, place: int, other: Expr) -> Expr:
        """This tree with node number ``place`` (as :meth:`nodes` counts) replaced by ``other``."""
        if place == 0:
            return other
        place -= 1
        args = []
        for arg in self.args:
            args.append(arg.replaced(place, other) if 0 <= place < arg.size else arg)
            place -= arg.size
        return Expr(self.op, tuple(args))

    def to_json(self) -> dict[str, Any]:
        """Nested ``{"data", "left", "right"}``, the form in which published metrics come."""
        return {
            "data": self.op,
            **{side: arg.to_json() for side, arg in zip(("left", "right"), self.args, strict=False)},
        }

    @classmethod
    def from_json(cls, value: Any, names: Mapping[str, str] | None = None) -> Expr:
        """The inverse of :meth:`to_json`; also reads its text.

        names: other names for operators, like ``{"div": "divn"}`` for metrics whose division is by a norm.

        Raises:
            ValueError: a node is no object with "data", has a right but no left child, or nests too deeply (a cycle).
        """
        return cls._read(json.loads(value) if isinstance(value, str) else value, names or {}, 0)

    @classmethod
    def _read(cls, value: Any, names: Mapping[str, str], depth: int) -> Expr:
        if depth > _MAX_DEPTH:
            raise ValueError(f"expression nests deeper than {_MAX_DEPTH} levels: it may contain itself")
        if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
            raise ValueError(f'every node must be an object with the text "data", got {str(value)[:80]!r}')
        left, right = value.get("left"), value.get("right")
        if left is None and right is not None:
            raise ValueError(f"node {value['data']!r} has a right child but no left one")
        args = tuple(cls._read(child, names, depth + 1) for child in (left, right) if child is not None)
        return cls(names.get(value["data"], value["data"]), args)

    @classmethod
    def from_string(cls, text: str) -> Expr:
        """Parse what ``str`` prints.

        Raises:
            ValueError: the text is no expression; the message says where.
        """
        tokens = _tokens(text)
        tree, rest = _parse(tokens, 0, text)
        if rest != len(tokens):
            raise ValueError(f"expression {text!r} ends before {tokens[rest]!r}")
        return tree


@dataclass(frozen=True)
class Vocabulary:
    """What the names in a tree mean. commutative: operators whose operands may be exchanged."""

    operators: Mapping[str, Operator]
    terminals: Mapping[str, Terminal]
    commutative: Sequence[str] = ()

    def kind(self, tree: Expr) -> str:
        """Check ``tree`` and return the kind of its value.

        Raises:
            ValueError: an unknown name, a wrong number of operands, or an operand of the wrong kind.
        """
        if not tree.args:
            if tree.number is not None:
                return SCALAR
            if tree.op not in self.terminals:
                known = (
                    "operands" if tree.op in self.operators else f"no such terminal; known: {', '.join(self.terminals)}"
                )
                raise ValueError(f"{tree.op!r} lacks operands" if known == "operands" else f"{tree.op!r}: {known}")
            return self.terminals[tree.op].kind
        if tree.op not in self.operators:
            raise ValueError(f"unknown operator {tree.op!r}; known: {', '.join(self.operators)}")
        operator = self.operators[tree.op]
        if len(tree.args) != operator.arity:
            raise ValueError(f"{tree.op!r} takes {operator.arity} operands, got {len(tree.args)} in {tree}")
        for arg in tree.args:
            kind = self.kind(arg)
            if kind != operator.operand and not (arg.number is not None and operator.operand == ELEMENTS):
                raise ValueError(f"{tree.op!r} takes {operator.operand}, got {kind} {arg}")
        return operator.result

    def latex(self, tree: Expr) -> str:
        """``tree`` as LaTeX."""
        if not tree.args:
            return tree.op if tree.number is not None else self.terminals[tree.op].latex
        text = self.operators[tree.op].latex
        for place, arg in enumerate(tree.args):
            text = text.replace(f"{{{place}}}", self.latex(arg))
        return text

    def ordered(self, tree: Expr) -> Expr:
        """``tree`` with the operands of commutative operators in alphabetical order, so that equal formulas are equal."""
        args = tuple(self.ordered(arg) for arg in tree.args)
        return Expr(tree.op, tuple(sorted(args, key=str)) if tree.op in self.commutative else args)


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"expression {text!r} cannot be read from character {place}: {text[place : place + 20]!r}")
        tokens.append(match[1])
        place = match.end()
    return tokens


def _parse(tokens: list[str], place: int, text: str, depth: int = 0) -> tuple[Expr, int]:
    """The expression that begins at ``place``, and the place behind it."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"expression nests deeper than {_MAX_DEPTH} levels")
    if place >= len(tokens) or tokens[place] in "(),":
        raise ValueError(f"expression {text!r} lacks an operand")
    name, place = tokens[place], place + 1
    if place >= len(tokens) or tokens[place] != "(":
        return Expr(name), place
    args = []
    while tokens[place] in "(,":
        arg, place = _parse(tokens, place + 1, text, depth + 1)
        args.append(arg)
        if place >= len(tokens):
            raise ValueError(f"expression {text!r} lacks a closing parenthesis")
    if tokens[place] != ")":
        raise ValueError(f"expression {text!r}: expected ',' or ')' before {tokens[place]!r}")
    return Expr(name, tuple(args)), place + 1
