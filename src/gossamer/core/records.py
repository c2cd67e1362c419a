"""What claims measured: one JSON file per claim and machine, and whether it still speaks for today's sources.

``benchmarks/records/<claim id>/<hardware slug>.json`` is written by :func:`measure` and read by the tables of the
documentation and by ``gossamer claims``. Records are compared with their bar only, never with those of another
machine.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from gossamer.core.files import write_json
from gossamer.core.measure import Bench, Better, Claim, Row, registered_claims

_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCE_SUFFIXES = {".py", ".cu", ".toml"}


@dataclass(frozen=True)
class Record:
    """What one claim measured on one machine. ``measured`` is the claim's summary over its counted ``rows``."""

    id: str
    text: str
    system: list[str]
    command: str
    peer: str
    peer_version: str
    hardware: dict[str, Any]
    date: str
    commit: str
    sources_hash: str
    measured: float
    unit: str
    summary: str
    bar: float
    better: Better
    met: bool
    rows: list[dict[str, Any]]

    @property
    def slug(self) -> str:
        """The machine, as its file is named."""
        return str(self.hardware["slug"])

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one record.

        Raises:
            ValueError: the file is not the JSON of a record.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a record of a claim: {error}") from error

    def save(self, root: Path) -> Path:
        """Write the record below the checkout ``root``; returns its path."""
        path = root / "benchmarks" / "records" / self.id / f"{self.slug}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(self))
        return path


@dataclass(frozen=True)
class Standing:
    """A claim beside one of its records; ``record`` is None where it was never measured."""

    claim: Claim
    record: Record | None
    stale: bool

    @property
    def state(self) -> str:
        """``"unmeasured"``, ``"unmet"``, ``"stale"`` or ``"met"``; a record that is both unmet and stale is unmet."""
        if self.record is None:
            return "unmeasured"
        if not self.claim.met(self.record.measured):
            return "unmet"
        return "stale" if self.stale else "met"


def checkout() -> Path:
    """The root of the checkout that this package runs from.

    Raises:
        FileNotFoundError: the package runs from an installed wheel, which has no benchmarks and no records.
    """
    root = _PACKAGE.parents[1]
    if not (root / "benchmarks").is_dir() or not (root / "pyproject.toml").is_file():
        raise FileNotFoundError(
            "benchmarks and their records are in a checkout of Gossamer only, not in an installed wheel: "
            "clone the repository and run `make bench` there"
        )
    return root


def load_claims(root: Path) -> dict[str, Claim]:
    """Import every benchmark file of the checkout; its claims by id, in alphabetical order."""
    sys.path.insert(0, str(root))
    try:
        for file in sorted((root / "benchmarks").glob("[!_]*.py")):
            importlib.import_module(f"benchmarks.{file.stem}")
    finally:
        sys.path.remove(str(root))
    return dict(sorted(registered_claims().items()))


def measure(claim: Claim, bench: Bench | None = None, on_row: Callable[[Row], None] | None = None) -> Record:
    """Run a claim's benchmark and sum it up; ``on_row`` sees each row as it comes.

    Raises:
        ValueError: the benchmark gave no row that counts.
    """
    from gossamer.core.hardware import hardware

    rows = []
    for row in claim.rows(bench or Bench()):
        rows.append(row)
        if on_row is not None:
            on_row(row)
    counted = [row.measured for row in rows if row.counted]
    if not counted:
        raise ValueError(f"claim {claim.id!r} gave no row that counts; its benchmark must yield at least one")
    measured = claim.summary(counted)
    machine = hardware()
    return Record(
        id=claim.id,
        text=claim.text,
        system=list(claim.system),
        command=f"gossamer bench {claim.id}",
        peer=claim.peer,
        peer_version=_peer_version(claim),
        hardware={"slug": machine.slug, **_plain(asdict(machine))},
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit(_PACKAGE),
        sources_hash=sources_hash(claim),
        measured=measured,
        unit=claim.unit,
        summary=claim.summary.__name__,
        bar=claim.bar,
        better=claim.better,
        met=claim.met(measured),
        rows=[row.as_json() for row in rows],
    )


def read_records(root: Path) -> list[Record]:
    """Every record of the checkout, by claim id and machine."""
    return [Record.load(path) for path in sorted((root / "benchmarks" / "records").glob("*/*.json"))]


def standings(claims: Iterable[Claim], records: Iterable[Record]) -> list[Standing]:
    """Claims beside their records, what needs attention first: unmet, stale, unmeasured, met."""
    by_id: dict[str, list[Record]] = {}
    for record in records:
        by_id.setdefault(record.id, []).append(record)
    found = []
    for claim in claims:
        now = sources_hash(claim)
        found += [Standing(claim, record, record.sources_hash != now) for record in by_id.get(claim.id, ())]
        if claim.id not in by_id:
            found.append(Standing(claim, None, stale=False))
    order = ("unmet", "stale", "unmeasured", "met")
    return sorted(found, key=lambda standing: (order.index(standing.state), standing.claim.id))


def sources_hash(claim: Claim) -> str:
    """A digest of the benchmark's file and of the sources that the claim depends on.

    Python counts by its syntax tree: comments, docstrings and layout do not change the digest.
    """
    digest = hashlib.sha256()
    for path in [claim.file, *_sources(claim)]:
        digest.update(path.name.encode() + b"\0")
        digest.update(_content(path) + b"\0")
    return digest.hexdigest()[:16]


def commit(folder: Path) -> str:
    """The commit of the checkout around ``folder``, with ``+`` where files differ from it; "" outside git."""
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return ""
    return head[:12] + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _peer_version(claim: Claim) -> str:
    package = claim.peer_package or "gossamer"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def _sources(claim: Claim) -> list[Path]:
    patterns = claim.sources or tuple(f"{room}/**/*" for room in rooms_of(claim))
    found = {path for pattern in patterns for path in _PACKAGE.glob(pattern) if path.suffix in _SOURCE_SUFFIXES}
    missing = [pattern for pattern in claim.sources if not any(_PACKAGE.glob(pattern))]
    if missing:
        raise ValueError(f"claim {claim.id!r} names sources that match no file below {_PACKAGE}: {', '.join(missing)}")
    return sorted(found - {claim.file})


def rooms_of(claim: Claim) -> list[str]:
    """The rooms that the claim's benchmark file imports, ``core`` aside."""
    names = set()
    for node in ast.walk(ast.parse(claim.file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    rooms = {name.split(".")[1] for name in names if name.startswith("gossamer.")}
    return sorted(room for room in rooms - {"core"} if (_PACKAGE / room).is_dir())


def _content(path: Path) -> bytes:
    source = path.read_bytes()
    return _meaning(source) if path.suffix == ".py" else source


@cache
def _meaning(source: bytes) -> bytes:
    return "".join(_tokens(ast.parse(source))).encode()


def _tokens(node: object) -> Iterator[str]:
    """A syntax tree as text that no Python version writes differently: no positions, no empty fields."""
    if isinstance(node, ast.AST):
        yield f"{type(node).__name__}("
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                value = [statement for statement in value if not _is_text(statement)]
            if value is not None and value != []:
                yield f"{name}="
                yield from _tokens(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            yield from _tokens(item)
            yield ","
    else:
        yield repr(node)


def _is_text(statement: ast.AST) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _plain(value: Any) -> Any:
    """Sets and tuples as lists, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
