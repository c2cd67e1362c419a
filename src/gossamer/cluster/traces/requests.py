"""Request traces of LLM services: Azure, Mooncake, BurstGPT, and what they have in common."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from gossamer.cluster.traces._rows import Row, csv_rows, open_text

BURSTGPT_MODELS = ("ChatGPT", "GPT-4")
BURSTGPT_KINDS = ("Conversation log", "API log")


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of arrival.

    arrival: seconds since the first. prompt, output: tokens; an output of 0 is a failed request. kind: a label each
    (model and log, for instance), or empty. prefix: hashes of the prompt's blocks of 512 tokens, or empty.

    Raises:
        ValueError: lengths differ, arrivals are not in order or not numbers, or a count is negative; by row.
    """

    arrival: NDArray
    prompt: NDArray
    output: NDArray
    kind: tuple[str, ...] = ()
    prefix: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "kind", "prefix"):
            size = len(getattr(self, name))
            if size != len(self.arrival) and (size or name in ("prompt", "output")):
                raise ValueError(f"{name} must have {len(self.arrival)} entries, got {size}")
        if len(self.arrival) and not np.isfinite(self.arrival).all():
            raise ValueError(f"arrival of row {int((~np.isfinite(self.arrival)).argmax())} is not a number")
        if (np.diff(self.arrival) < 0).any():
            raise ValueError(f"arrival of row {int((np.diff(self.arrival) < 0).argmax()) + 1} is before the row above")
        for name in ("prompt", "output"):
            if (getattr(self, name) < 0).any():
                raise ValueError(f"{name} of row {int((getattr(self, name) < 0).argmax())} is negative")

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def gaps(self) -> NDArray:
        """Seconds between arrivals."""
        return np.diff(self.arrival)

    @property
    def failures(self) -> float:
        """Share of requests without an answer."""
        return float((self.output == 0).mean()) if len(self) else 0.0

    def where(self, chosen: NDArray) -> RequestTrace:
        """The requests of a mask; time still counts from the first of all."""
        kind = tuple(np.array(self.kind, dtype=object)[chosen]) if self.kind else ()
        prefix = tuple(item for item, keep in zip(self.prefix, chosen, strict=True) if keep) if self.prefix else ()
        return RequestTrace(self.arrival[chosen], self.prompt[chosen], self.output[chosen], kind, prefix)

    def faster(self, by: float) -> RequestTrace:
        """The same requests ``by`` times as fast."""
        if not by > 0:
            raise ValueError(f"by must be positive, got {by}")
        return RequestTrace(self.arrival / by, self.prompt, self.output, self.kind, self.prefix)


def read_azure(path: str | os.PathLike[str]) -> RequestTrace:
    """Read a trace of Azure's LLM inference (``TIMESTAMP, ContextTokens, GeneratedTokens``; Patel et al., ISCA 2024).

    Raises:
        ValueError: by line: a column or number is wrong, or a request is before the one above.
    """
    rows, times = [], []
    for row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        times.append(_instant(row, row.text("TIMESTAMP")))
        _in_order(row, times)
        rows.append((row.whole("ContextTokens"), row.whole("GeneratedTokens")))
    return _trace(times, rows)


def read_mooncake(path: str | os.PathLike[str]) -> RequestTrace:
    """Read a trace of Mooncake (JSON lines with timestamps in ms and prefix hashes; Qin et al., FAST 2025).

    Raises:
        ValueError: by line, as :func:`read_azure`.
    """
    rows, times, prefixes = [], [], []
    needed = ("timestamp", "input_length", "output_length", "hash_ids")
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
            row = Row(fields, str(path), number)
            missing, unknown = [n for n in needed if n not in fields], [n for n in fields if n not in needed]
            if missing or unknown:
                raise row.error(f"needs the fields {', '.join(needed)}, got {', '.join(fields)}")
            times.append(row.number("timestamp", 0) / 1000)
            _in_order(row, times)
            rows.append((row.whole("input_length"), row.whole("output_length")))
            prefixes.append(tuple(fields["hash_ids"]))
    return _trace(times, rows, prefix=tuple(prefixes))


def read_burstgpt(path: str | os.PathLike[str], sort: bool = False) -> RequestTrace:
    """Read a release of BurstGPT (Wang et al., KDD 2025), with or without sessions and elapsed times.

    ``kind`` is the model and the log. Timestamps are whole seconds; failures (no response tokens) are kept.

    sort: put rows into the order of their timestamps instead of refusing a file that is not.

    Raises:
        ValueError: by line: a wrong column or number, an unknown model or log, a total that is not the sum.
    """
    columns = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
    rows, times, kinds = [], [], []
    for row in csv_rows(path, columns, optional=("Session ID", "Elapsed time")):
        times.append(row.number("Timestamp", 0))
        if not sort:
            _in_order(row, times)
        prompt, output = row.whole("Request tokens"), row.whole("Response tokens")
        if row.whole("Total tokens") != prompt + output:
            raise row.error(f"Total tokens {row.text('Total tokens')} is not {prompt} + {output}")
        model, kind = row.text("Model"), row.text("Log Type")
        if model not in BURSTGPT_MODELS or kind not in BURSTGPT_KINDS:
            raise row.error(f"unknown model {model!r} or log {kind!r}")
        rows.append((prompt, output))
        kinds.append(f"{model}, {kind}")
    if sort:
        order = np.argsort(times, kind="stable")
        times, rows, kinds = ([column[index] for index in order] for column in (times, rows, kinds))
    return _trace(times, rows, tuple(kinds))


def _instant(row: Row, text: str) -> float:
    """Seconds of a time with up to seven digits behind the point, of which Python reads six."""
    whole, _, part = text.partition(".")
    try:
        return datetime.fromisoformat(whole).timestamp() + (float(f"0.{part}") if part else 0.0)
    except ValueError:
        raise row.error(f"a time must look like 2023-11-16 18:17:03.9799600, got {text!r}") from None


def _in_order(row: Row, times: list[float]) -> None:
    if len(times) > 1 and times[-1] < times[-2]:
        raise row.error("it is before the row above")


def _trace(
    times: list[float],
    rows: list[tuple[int, int]],
    kind: tuple[str, ...] = (),
    prefix: tuple[tuple[int, ...], ...] = (),
) -> RequestTrace:
    arrival = np.array(times) - (times[0] if times else 0.0)
    tokens = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return RequestTrace(arrival, tokens[:, 0], tokens[:, 1], kind, prefix)
