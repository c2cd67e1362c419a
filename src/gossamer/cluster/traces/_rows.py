"""Rows of CSV and JSON-lines files, plain or gzipped, with errors that name the line."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def open_text(path: str | os.PathLike[str]) -> io.TextIOBase:
    """Open for reading; a name that ends in .gz is unpacked."""
    path = Path(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


class Row:
    """One line of a table: fields by name, and errors that say where they stand."""

    __slots__ = ("_fields", "_path", "line")

    def __init__(self, fields: dict[str, str], path: str, line: int) -> None:
        self._fields, self._path, self.line = fields, path, line

    def text(self, name: str) -> str:
        """A field as it stands."""
        return self._fields[name]

    def number(self, name: str, least: float = -math.inf) -> float:
        """A field as a finite number of at least ``least``."""
        try:
            value = float(self._fields[name])
        except (TypeError, ValueError):
            raise self.error(f"{name} must be a number, got {self._fields[name]!r}") from None
        if not (least <= value < math.inf):
            bound = f" from {least:g} on" if least > -math.inf else ""
            raise self.error(f"{name} must be a finite number{bound}, got {self._fields[name]}")
        return value

    def whole(self, name: str, least: int = 0) -> int:
        """A field as a whole number of at least ``least``."""
        value = self.number(name, least)
        if value != int(value):
            raise self.error(f"{name} must be a whole number, got {self._fields[name]}")
        return int(value)

    def error(self, message: str) -> ValueError:
        """An error about this line."""
        return ValueError(f"{self._path}, line {self.line}: {message}")


def csv_rows(
    path: str | os.PathLike[str],
    required: Sequence[str],
    optional: Iterable[str] = (),
    delimiter: str = ",",
    header: Sequence[str] | None = None,
) -> Iterator[Row]:
    """The rows of a CSV file.

    header: column names of a file that has no such line.

    Raises:
        ValueError: a required column is missing, one is unknown (neither required nor optional), or a row is short.
    """
    with open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        names = list(header) if header is not None else next(reader, [])
        missing = [name for name in required if name not in names]
        unknown = [name for name in names if name not in required and name not in set(optional)]
        if missing or unknown:
            what = f"has no column {', '.join(missing)}" if missing else f"has unknown columns {', '.join(unknown)}"
            raise ValueError(f"{path} {what}; expected {', '.join(required)}")
        for fields in reader:
            if not fields:  # a blank line
                continue
            row = Row(dict(zip(names, fields, strict=False)), str(path), reader.line_num)
            if len(fields) != len(names):
                raise row.error(f"has {len(fields)} fields instead of {len(names)}")
            yield row
