"""Which reader a trace file wants: told by its columns, never by its name."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping

from gossamer.cluster._jobs import Job
from gossamer.cluster.traces import clusters, philly, requests
from gossamer.cluster.traces._rows import csv_rows, open_text

_BY_COLUMN: Mapping[str, Callable[[str | os.PathLike[str]], list[Job]]] = {
    "gpu_time": philly.read_philly,
    "vc": clusters.read_helios,
    "gpu_milli": clusters.read_alibaba,
    "resource_time_0": clusters.read_muri,
    "interval": clusters.read_tiresias,
}

_REQUESTS_BY_COLUMN: Mapping[str, Callable[[str | os.PathLike[str]], requests.RequestTrace]] = {
    "ContextTokens": requests.read_azure,
    "Request tokens": requests.read_burstgpt,
}


def read_jobs(path: str | os.PathLike[str]) -> list[Job]:
    """Read a job trace of any known format, or a plain table with the columns ``id, submit, gpus, duration``.

    Raises:
        ValueError: no known format has these columns, or a row is wrong.
    """
    columns = _columns(path)
    for name, reader in _BY_COLUMN.items():
        if name in columns:
            return reader(path)
    if {"id", "submit", "gpus", "duration"} <= set(columns):
        return [
            Job(row.text("id"), row.number("submit", 0), row.whole("gpus", 1), row.number("duration", 0))
            for row in csv_rows(path, ("id", "submit", "gpus", "duration"))
        ]
    if len(columns) == 10 and not any(name.isidentifier() and name.islower() for name in columns[2:3]):
        return clusters.read_pai(path)
    raise ValueError(
        f"{path} has the columns {', '.join(columns) or '(none)'}; known are Philly, Helios, PAI, Alibaba 2023, Muri and "
        "Tiresias traces, and a plain table with id, submit, gpus, duration"
    )


def read_requests(path: str | os.PathLike[str]) -> requests.RequestTrace:
    """Read a request trace of Azure, BurstGPT or Mooncake.

    Raises:
        ValueError: the format is none of these, or a row is wrong.
    """
    with open_text(path) as file:
        first = file.readline()
    try:
        if "hash_ids" in json.loads(first):
            return requests.read_mooncake(path)
    except (json.JSONDecodeError, TypeError):
        pass
    columns = _columns(path)
    for name, reader in _REQUESTS_BY_COLUMN.items():
        if name in columns:
            return reader(path)
    raise ValueError(f"{path} is no request trace of Azure, BurstGPT or Mooncake; its columns are {', '.join(columns)}")


def _columns(path: str | os.PathLike[str]) -> list[str]:
    with open_text(path) as file:
        return [name.strip() for name in next(csv.reader(file), [])]
