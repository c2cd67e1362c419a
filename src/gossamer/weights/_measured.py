"""Which of several plans is fastest on this GPU: measured once, then read from a table on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from gossamer.core.files import write_json
from gossamer.core.hardware import cache_dir
from gossamer.core.measure import Bench, median

Plan = TypeVar("Plan")

_TABLE_VERSION = 1
_FINALISTS = 3


def fastest_plan(
    table: str, key: str, plans: Sequence[Plan], calls: Callable[[Plan], Sequence[Callable[[], Any]]]
) -> Plan:
    """The fastest of ``plans``, frozen dataclasses of one type with numbers in them.

    table: whose plans these are, a part of the file's name. key: what of. calls: plan -> what to call in turn, each on data
    that the calls before have pushed out of the caches. Nothing is measured while a CUDA graph is captured: the first plan
    serves then.
    """
    name = f"{table}-{torch.cuda.get_device_name().lower().replace(' ', '-')}-v{_TABLE_VERSION}.json"
    known = _table(name)
    if key not in known:
        if torch.cuda.is_current_stream_capturing():
            return plans[0]
        known[key] = asdict(_race(list(plans), calls))  # type: ignore[call-overload]
        with contextlib.suppress(OSError):  # a read-only home costs only the measuring, next time again
            write_json(_path(name), known)
    return type(plans[0])(**known[key])


def seconds_of(plans: Sequence[Plan], calls: Callable[[Plan], Sequence[Callable[[], Any]]]) -> dict[Plan, float]:
    """Seconds of each plan, quickly."""
    bench = Bench(samples=3, sample_seconds=1e-3)
    with bench.cuda_graphs():
        return {plan: median(bench.seconds(list(calls(plan)))) for plan in plans}


def _race(plans: list[Plan], calls: Callable[[Plan], Sequence[Callable[[], Any]]]) -> Plan:
    if len(plans) == 1:
        return plans[0]
    times = seconds_of(plans, calls)
    finalists = sorted(plans, key=times.__getitem__)[:_FINALISTS]
    careful = Bench(samples=9)
    with careful.cuda_graphs():
        times = {plan: median(careful.seconds(list(calls(plan)))) for plan in finalists}
    return min(finalists, key=times.__getitem__)


@cache
def _table(name: str) -> dict[str, Any]:
    try:
        return dict(json.loads(_path(name).read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _path(name: str) -> Path:
    return cache_dir() / name
