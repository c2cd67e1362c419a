"""The ledger ``systems.toml``: every published system that Gossamer is about, and what of it works here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

STATUSES = ("works", "partial", "planned")
_LEDGER = Path(__file__).resolve().parents[1] / "systems.toml"


@dataclass(frozen=True)
class System:
    """One entry.

    name, what, published: the system's name, what it does for a user in one line, and where it appeared.
    room: the room of the package that holds it or will hold it.
    status: "works", "partial" (``missing`` says what falls short) or "planned".
    entry_points: importable names, ``module:name``, that a user starts from.
    docs: the page below ``docs/``.
    tests: test files or folders of the checkout.
    claims: ids of the claims that speak for it.
    """

    name: str
    what: str
    published: str
    room: str
    status: str
    entry_points: list[str] = field(default_factory=list)
    docs: str = ""
    tests: list[str] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    missing: str = ""


@cache
def read_systems() -> tuple[System, ...]:
    """Every entry, in the ledger's order (by room).

    >>> [system.name for system in read_systems() if system.room == "weights"][:2]
    ['SpInfer', 'ZipServ']
    """
    with _LEDGER.open("rb") as file:
        table: dict[str, list[dict[str, Any]]] = tomllib.load(file)
    return tuple(System(**entry) for entry in table["system"])


def system_named(name: str) -> System:
    """The entry called ``name``, whatever its capitals.

    Raises:
        ValueError: no entry is called so; the message suggests close names.

    >>> system_named("spinfer").room
    'weights'
    """
    by_name = {system.name.lower(): system for system in read_systems()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    close = get_close_matches(name.lower(), by_name, cutoff=0.5)
    hint = f"did you mean {', '.join(by_name[match].name for match in close)}?" if close else "see `gossamer systems`"
    raise ValueError(f"no system is called {name!r}; {hint}")
