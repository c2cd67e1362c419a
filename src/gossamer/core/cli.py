"""The verbs ``gossamer bench``, ``claims`` and ``systems``: what is claimed, measured and built."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer.core.measure import Bench, Claim, Row
from gossamer.core.records import Standing, checkout, load_claims, measure, read_records, rooms_of, standings
from gossamer.core.systems import STATUSES, System, read_systems, system_named

app = typer.Typer(no_args_is_help=True)
_err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_WHOLE_LINES = 2000

_COLOURS = {
    "met": "green", "works": "green", "stale": "yellow", "partial": "yellow", "unmet": "red", "unmeasured": "magenta",
    "planned": "dim",
}  # fmt: skip


@app.command("bench")
def bench_command(
    target: Annotated[str | None, typer.Argument(help="A claim's id or a room; all claims without it.")] = None,
    samples: Annotated[int, typer.Option(help="Interleaved rounds per case.")] = 25,
    as_json: Json = False,
) -> None:
    """Measure claims on this machine and write their records (in a checkout).

    Exits with 1 if a measured claim misses its bar.
    """
    root = checkout()
    chosen = choose_claims(load_claims(root), target)
    records = []
    for claim in chosen:
        _err.print(f"[bold]{claim.id}[/bold]: {escape(claim.text)}; peer: {escape(claim.peer)}")
        record = measure(claim, Bench(samples=samples), on_row=lambda row: _err.print(escape(_row_line(row))))
        path = record.save(root)
        _err.print(f"  {_figure(record.measured, claim.unit)} (bar {_bar(claim)}) -> {path.relative_to(root)}")
        records.append(record)
    if as_json:
        typer.echo(json.dumps([asdict(record) for record in records]))
    else:
        _print_standings(standings(chosen, records))
    if not all(record.met for record in records):
        raise typer.Exit(1)


@app.command("claims")
def claims_command(as_json: Json = False) -> None:
    """Show every claim beside its bar and its records, what needs attention first (in a checkout)."""
    root = checkout()
    found = standings(load_claims(root).values(), read_records(root))
    if as_json:
        typer.echo(json.dumps([_standing_json(standing) for standing in found]))
    else:
        _print_standings(found)


@app.command("systems")
def systems_command(
    name: Annotated[str | None, typer.Argument(help="One system, by its name.")] = None,
    status: Annotated[str | None, typer.Option(help=f"Only those that are {', '.join(STATUSES)}.")] = None,
    as_json: Json = False,
) -> None:
    """Show the published systems that Gossamer is about: what each does, its room, and what works here."""
    if status is not None and status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
    if name is not None:
        _print_system(system_named(name), as_json)
        return
    systems = [system for system in read_systems() if status in (None, system.status)]
    if as_json:
        typer.echo(json.dumps([asdict(system) for system in systems]))
        return
    table = _table("system", "room", "status", last="what it does")
    for system in systems:
        table.add_row(escape(system.name), system.room, _coloured(system.status), escape(system.what))
    _print_table(table)


def choose_claims(claims: dict[str, Claim], target: str | None) -> list[Claim]:
    """The claim with the id ``target``, or those of the room ``target``, or all.

    Raises:
        ValueError: nothing is called ``target``.
    """
    if target is None:
        return list(claims.values())
    if target in claims:
        return [claims[target]]
    chosen = [claim for claim in claims.values() if target in rooms_of(claim)]
    if not chosen:
        rooms = sorted({room for claim in claims.values() for room in rooms_of(claim)})
        raise ValueError(
            f"no claim or room is called {target!r}; claims are {', '.join(claims) or 'none'}, "
            f"rooms with claims are {', '.join(rooms) or 'none'}"
        )
    return chosen


def _print_standings(found: list[Standing]) -> None:
    table = _table("claim", "state", "measured", "bar", "machine", last="what, against which peer")
    for standing in found:
        claim, record = standing.claim, standing.record
        table.add_row(
            claim.id,
            _coloured(standing.state),
            _figure(record.measured, claim.unit) if record else "",
            _bar(claim),
            record.slug if record else "",
            escape(f"{claim.text}; {claim.peer}"),
        )
    _print_table(table)


def _standing_json(standing: Standing) -> dict[str, object]:
    claim, record = standing.claim, standing.record
    return {
        "id": claim.id,
        "text": claim.text,
        "peer": claim.peer,
        "unit": claim.unit,
        "bar": claim.bar,
        "better": claim.better,
        "state": standing.state,
        "stale": standing.stale,
        "record": asdict(record) if record else None,
    }


def _print_system(system: System, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(system)))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in asdict(system).items():
        if value:
            shown = "\n".join(value) if isinstance(value, list) else value
            table.add_row(f"[bold]{key}[/bold]", _coloured(shown) if key == "status" else escape(shown))
    Console().print(table)


def _table(*columns: str, last: str) -> Table:
    """A table of one line per row: the last column takes the width that is left."""
    table = Table(box=None, pad_edge=False, expand=True)
    for column in columns:
        table.add_column(column, no_wrap=True)
    table.add_column(last, no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _print_table(table: Table) -> None:
    """On a terminal as wide as that is; elsewhere whole, for whoever searches the lines."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    table.expand = False
    Console(width=_WHOLE_LINES).print(table)


def _row_line(row: Row) -> str:
    line = f"  {row.case}: "
    if row.ratio is None or row.peer is None:
        line += _figure(row.ours, row.unit)
    else:
        line += f"{row.ratio:.3f}x (ours {row.ours * 1e3:.3f} ms, {row.peer_name or 'peer'} {row.peer * 1e3:.3f} ms)"
    if row.spread:
        line += f" spread {row.spread[0]:.3g} to {row.spread[1]:.3g}"
    tags = [f"{row.threads} threads"] if row.threads > 1 else []
    tags += [] if row.counted else ["not counted"]
    tags += [row.note] if row.note else []
    return line + (f" [{'; '.join(tags)}]" if tags else "")


def _figure(value: float, unit: str) -> str:
    return f"{value:.3g}x" if unit == "ratio" else f"{value:,.4g} {unit}"


def _bar(claim: Claim) -> str:
    return f"{'>=' if claim.better == 'higher' else '<='} {_figure(claim.bar, claim.unit)}"


def _coloured(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/{_COLOURS[state]}]"
