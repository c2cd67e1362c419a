"""Searches on SmolLM2-135M: what they find against published rules, and how long finding and masking take.

Statistics come from WikiText-2 valid, candidates are judged on Python's documentation and TinyShakespeare, the figures are
perplexities on WikiText-2 test, which no search sees. Every search runs with three seeds, each beside as many random draws.

How long the searches are is stated by ``PROTOCOL``: ``SHORT`` takes about a quarter of an hour on two cores, ``FULL`` is
what ``gossamer search`` does by default, three times over. Searches keep their checkpoints in the user's cache folder:
measuring again after an interruption goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gossamer.compress import (
    EvolutionSettings,
    WindowSizes,
    calibrate,
    calibration_windows,
    dense_weight,
    linears,
    load_dense,
    search_allocation,
    search_metric,
    search_windows,
)
from gossamer.compress._masks import keep_n_of_m, keep_per_row
from gossamer.compress._scores import wanda
from gossamer.compress._text import wikitext2
from gossamer.core.hardware import cache_dir
from gossamer.core.measure import Bench, Row, claim, geometric_mean, largest

METRIC_SOURCES = ["compress/_metric*.py", "compress/_evolution.py", "compress/_simplify.py", "compress/_workbench.py"]
ALLOCATION_SOURCES = ["compress/_allocation*.py", "compress/_budget.py", "compress/_evolution.py", "compress/_ranks.py"]
REPEATS = 3


@dataclass(frozen=True)
class Protocol:
    """Of the searches; ``evaluations`` are perplexities of one run at most, ``windows`` the texts that they take."""

    name: str
    windows: WindowSizes
    metric: EvolutionSettings
    allocation: EvolutionSettings


SHORT = Protocol(
    "short",
    WindowSizes(samples=32, seqlen=256, short=4, long=8, report=8, report_seqlen=512),
    EvolutionSettings(population=12, evaluations=18, finalists=3),
    EvolutionSettings(population=10, evaluations=16, finalists=2),
)
FULL = Protocol(
    "full",
    WindowSizes(),
    EvolutionSettings(evaluations=120),
    EvolutionSettings(population=20, generations=40, evaluations=75),
)
PROTOCOL = SHORT


@claim(
    "metric-search",
    text="best found metric that ranks unlike Wanda and all named ones, against Wanda: perplexity of SmolLM2 at 50 %",
    system=["Pruner-Zero"],
    peer="Wanda",
    unit="ratio of perplexities",
    bar=0.98,
    better="lower",
    summary=largest,
    sources=METRIC_SOURCES,
)
def metric_search(bench: Bench) -> Iterator[Row]:
    """What counts is the best of three searches on the text searched on; their controls and the named metrics beside it."""
    rows = {row["name"]: row for row in _metric_result()["candidates"]}
    new = [name for name, row in rows.items() if row.get("found") and row["new"]]
    best = min(new, key=lambda name: rows[name]["search"])
    for name, row in rows.items():
        if name != "wanda":
            yield _ratio(bench, name, row, rows["wanda"], name == best, row["formula"])
    yield _control(bench, rows, "", "wanda")


@claim(
    "metric-search-time",
    text="one search for a metric of SmolLM2 with default settings, two cores, statistics, control and report included",
    system=["Pruner-Zero"],
    peer="none",
    unit="s",
    bar=3600,
    better="lower",
    summary=largest,
    sources=METRIC_SOURCES,
)
def metric_search_time(bench: Bench) -> Iterator[Row]:
    """From an empty folder."""
    with bench.threads(os.cpu_count() or 1):
        began = perf_counter()
        search_metric("smollm2-135m", _folder(f"timed-{os.getpid()}"), settings=FULL.metric, log=print)
        yield bench.value("SmolLM2-135M at 50 %", perf_counter() - began, "s")


@claim(
    "allocation-search-time",
    text="one search for an allocation of SmolLM2 with defaults, two cores, statistics, controls and report included",
    system=["DSA"],
    peer="none",
    unit="s",
    bar=3600,
    better="lower",
    summary=largest,
    sources=ALLOCATION_SOURCES,
)
def allocation_search_time(bench: Bench) -> Iterator[Row]:
    """From an empty folder."""
    with bench.threads(os.cpu_count() or 1):
        began = perf_counter()
        search_allocation(
            "smollm2-135m", _folder(f"timed-allocation-{os.getpid()}"), settings=FULL.allocation, log=print
        )
        yield bench.value("SmolLM2-135M at 60 %", perf_counter() - began, "s")


@claim(
    "allocation-search",
    text="best found allocation against uniform: perplexity of SmolLM2 at 60 % with Wanda",
    system=["DSA"],
    peer="uniform sparsity",
    unit="ratio of perplexities",
    bar=0.92,
    better="lower",
    summary=largest,
    sources=ALLOCATION_SOURCES,
)
def allocation_search(bench: Bench) -> Iterator[Row]:
    """The allocation is chosen on the text searched on; all others of the same run beside it."""
    yield from _against(bench, "uniform")


@claim(
    "allocation-search-line",
    text="best found allocation against a straight line from dense to sparse: perplexity of SmolLM2 at 60 % with Wanda",
    system=["DSA"],
    peer="straight line of slope 0.08",
    unit="ratio of perplexities",
    bar=0.98,
    better="lower",
    summary=largest,
    sources=ALLOCATION_SOURCES,
)
def allocation_search_line(bench: Bench) -> Iterator[Row]:
    """The same run against the line."""
    yield from _against(bench, "straight line")


@claim(
    "mask-time",
    text="Wanda masks of all layers of SmolLM2, one thread, against the formula with torch.sort",
    system=["Pruner-Zero"],
    peer="torch.sort",
    peer_package="torch",
    unit="ratio",
    bar=0.67,
    better="higher",
    summary=geometric_mean,
    sources=["compress/_select.py", "compress/_masks.py"],
)
def mask_time(bench: Bench) -> Iterator[Row]:
    """Row-wise 50 % is counted, and 2:4; statistics are there already."""
    dense = load_dense("smollm2-135m")
    windows = calibration_windows(wikitext2(), dense.tokenizer, 1, 128)
    layers = [
        (dense_weight(layer), step.statistics[name])
        for step in calibrate(dense.model, windows, "dense")
        for name, layer in linears(step.block).items()
    ]

    def masks(keep: Any) -> None:
        for weight, statistics in layers:
            keep(wanda(weight, statistics))

    yield bench.compare("50 % of every row", partial(masks, _half), partial(masks, _sorted_half))
    yield bench.compare("2:4", partial(masks, _two_of_four), partial(masks, _sorted_two_of_four))


def _half(scores: Tensor) -> Tensor:
    return keep_per_row(scores, 0.5)


def _sorted_half(scores: Tensor) -> Tensor:
    pruned = torch.sort(scores, dim=1, stable=True).indices[:, : scores.shape[1] // 2]
    return torch.ones_like(scores, dtype=torch.bool).scatter_(1, pruned, False)


def _two_of_four(scores: Tensor) -> Tensor:
    return keep_n_of_m(scores, 2, 4)


def _sorted_two_of_four(scores: Tensor) -> Tensor:
    return _sorted_half(scores.reshape(-1, 4)).view(scores.shape)


def _against(bench: Bench, rival: str) -> Iterator[Row]:
    """What counts is the best of all searches on the text searched on; controls and rules without a search beside it."""
    rows = {row["name"]: row for row in _allocation_result()["candidates"]}
    best = min((name for name, row in rows.items() if row.get("found")), key=lambda name: rows[name]["search"])
    for name, row in rows.items():
        if name != rival:
            yield _ratio(bench, name, row, rows[rival], name == best, row["formula"] if "function" in name else "")
    for kind in ("function: ", "levels: "):
        yield _control(bench, rows, kind, rival)


Found = dict[str, Any]


def _ratio(bench: Bench, name: str, row: Found, rival: Found, counted: bool, formula: str) -> Row:
    note = f"{row['report']:.2f} against {rival['report']:.2f}; {PROTOCOL.name} protocol"
    ratio = row["report"] / rival["report"]
    return bench.value(name, ratio, "ratio of perplexities", counted, f"{formula}; {note}" if formula else note)


def _control(bench: Bench, rows: dict[str, Found], kind: str, rival: str) -> Row:
    """What searching gains over drawing at random, on the text that both choose by."""
    ratios = []
    for suffix in ("", *(f", seed {seed}" for seed in range(1, REPEATS))):
        ratios.append(rows[f"{kind}search{suffix}"]["search"] / rows[f"{kind}random control{suffix}"]["search"])
    wins = sum(ratio < 1 for ratio in ratios)
    note = (
        f"median of {REPEATS} seeds on the text searched on; the search is better in {wins}; {PROTOCOL.name} protocol"
    )
    return bench.value(f"{kind}search against its random control", ratios, "ratio of perplexities", False, note)


@lru_cache
def _metric_result() -> Found:
    dense = load_dense("smollm2-135m")
    return search_metric(
        dense, _folder(f"metric-{PROTOCOL.name}"), settings=PROTOCOL.metric, repeats=REPEATS, correct=PROTOCOL == FULL,
        windows=search_windows(dense.tokenizer, PROTOCOL.windows), log=print,
    )  # fmt: skip


@lru_cache
def _allocation_result() -> Found:
    dense = load_dense("smollm2-135m")
    return search_allocation(
        dense, _folder(f"allocation-{PROTOCOL.name}"), 0.6, settings=PROTOCOL.allocation, repeats=REPEATS,
        correct=PROTOCOL == FULL, windows=search_windows(dense.tokenizer, PROTOCOL.windows), log=print,
    )  # fmt: skip


def _folder(name: str) -> Path:
    folder = cache_dir() / "searches" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder
