"""Fill the tables of README and docs from benchmarks/records and systems.toml.

A table stands between ``<!-- table: KIND ARGUMENT... -->`` and ``<!-- end -->``. Kinds:

- ``claims ID...``: one line per claim and machine: figure, bar, whether it is met;
- ``rows ID...``: every case of these claims;
- ``systems``: every published system with its room and status.

``fill_tables.py`` writes the pages, ``fill_tables.py --check`` exits with 1 and names the pages that disagree.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gossamer.core.files import atomic_write
from gossamer.core.records import Record, read_records
from gossamer.core.systems import read_systems

ROOT = Path(__file__).resolve().parents[1]
_TABLE = re.compile(r"(<!-- table: (?P<kind>\w+)(?P<arguments>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page disagrees")
    check = parser.parse_args().check
    records = read_records(ROOT)
    differing = []
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        wanted = filled(text, records)
        if wanted == text:
            continue
        differing.append(page.relative_to(ROOT))
        if not check:
            with atomic_write(page) as temporary:
                temporary.write_text(wanted, encoding="utf-8")
    for name in differing:
        print(f"{name} disagrees with the records: run `make docs`" if check else f"filled {name}")
    return 1 if check and differing else 0


def pages(root: Path) -> list[Path]:
    """The pages that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(text: str, records: list[Record]) -> str:
    """``text`` with every table made anew.

    Raises:
        ValueError: a marker names an unknown kind.
    """

    def table(match: re.Match[str]) -> str:
        kind, arguments = match["kind"], match["arguments"].split()
        if kind not in _KINDS:
            raise ValueError(f"a table must be of kind {', '.join(_KINDS)}, got {kind!r}")
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in _KINDS[kind](arguments, records))
        return f"{match[1]}\n{lines}\n{match[5]}"

    return _TABLE.sub(table, text)


def _claims(ids: list[str], records: list[Record]) -> Iterator[list[str]]:
    yield ["claim", "what", "measured", "bar", "met", "machine"]
    yield ["---", "---", "---:", "---:", "---", "---"]
    for id in ids:
        found = [record for record in records if record.id == id]
        for record in found:
            sign = "≥" if record.better == "higher" else "≤"
            yield [
                f"`{id}`",
                f"{record.text}; peer: {record.peer}",
                figure(record.measured, record.unit),
                f"{sign} {figure(record.bar, record.unit)}",
                "yes" if record.met else "**no**",
                record.slug,
            ]
        if not found:
            yield [f"`{id}`", "not measured yet", "", "", "", ""]


def _rows(ids: list[str], records: list[Record]) -> Iterator[list[str]]:
    yield ["claim", "case", "ours", "peer", "ratio", "10–90 %", "threads", "remarks"]
    yield ["---", "---", "---:", "---:", "---:", "---", "---:", "---"]
    for record in (record for id in ids for record in records if record.id == id):
        for row in record.rows:
            low, high = row["spread"] or (None, None)
            remarks = [row["note"], row["peer_name"] and f"peer: {row['peer_name']}"]
            remarks += [] if row["counted"] else ["not counted"]
            yield [
                f"`{record.id}`",
                row["case"],
                time_or_value(row["ours"], row["unit"]),
                "" if row["peer"] is None else time_or_value(row["peer"], row["unit"]),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}×",
                "" if low is None else f"{low:.3g}–{high:.3g}",
                str(row["threads"]),
                "; ".join(filter(None, remarks)),
            ]


def _systems(arguments: list[str], records: list[Record]) -> Iterator[list[str]]:
    yield ["room", "system", "what it does", "status"]
    yield ["---", "---", "---", "---"]
    room = ""
    for system in read_systems():
        shown = "" if system.room == room else f"`{system.room}`"
        room = system.room
        yield [shown, system.name, system.what, system.status]


_KINDS = {"claims": _claims, "rows": _rows, "systems": _systems}


def figure(value: float, unit: str) -> str:
    """A figure with its unit.

    >>> figure(1.456, "ratio"), figure(231.25, "MB/s")
    ('1.46×', '231.2 MB/s')
    """
    return f"{value:.3g}×" if unit == "ratio" else f"{value:,.4g} {unit}"


def time_or_value(value: float, unit: str) -> str:
    """Seconds in the unit that reads best; other figures as :func:`figure` shows them.

    >>> time_or_value(0.00123, "s"), time_or_value(95.0, "s")
    ('1.23 ms', '95 s')
    """
    if unit != "s" or value >= 1:
        return figure(value, unit)
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


if __name__ == "__main__":
    sys.exit(main())
