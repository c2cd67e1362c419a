"""Searches on SmolLM2-135M: what they find against published rules, and how long finding and masking take.

Statistics come from WikiText-2 valid, candidates are judged on Python's documentation and TinyShakespeare, the figures are
perplexities on WikiText-2 test, which no search sees. Searches keep their checkpoints in the user's cache folder: measuring
again after an interruption goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache, partial
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
SEEDS = (0, 1, 2)


@claim(
    "metric-search",
    text="best found metric that does not rank as Wanda does against Wanda: perplexity of SmolLM2 at 50 %",
    system=["Pruner-Zero"],
    peer="Wanda",
    unit="ratio of perplexities",
    bar=0.98,
    better="lower",
    summary=largest,
    sources=METRIC_SOURCES,
)
def metric_search(bench: Bench) -> Iterator[Row]:
    """The metric is chosen on the text searched on, per seed; beside it the best of as many random draws."""
    for seed in SEEDS:
        result = _metric_result(seed)
        rows = {row["name"]: row for row in result["candidates"]}
        found = [rows[name] for name in ("search", "random control")]
        found += [row for name, row in rows.items() if name.endswith("corrected") or name == "sparsegpt"]
        for row in found:
            yield bench.value(
                f"{row['name']}, seed {seed}",
                row["report"] / rows["wanda"]["report"],
                "ratio of perplexities",
                counted=row["name"] == "search"
                and not row["ranks_as_wanda"],  # a search that finds Wanda proves nothing
                note=f"{row['formula']}; {row['report']:.2f} against {rows['wanda']['report']:.2f}",
            )


@claim(
    "metric-search-time",
    text="one search for a metric of SmolLM2 with default settings, two cores, statistics and report included",
    system=["Pruner-Zero"],
    peer="none",
    unit="s",
    bar=3600,
    better="lower",
    summary=largest,
    sources=METRIC_SOURCES,
)
def metric_search_time(bench: Bench) -> Iterator[Row]:
    """Without the control, which doubles it; from an empty folder."""
    with bench.threads(os.cpu_count() or 1):
        folder = cache_dir() / "searches" / f"timed-{os.getpid()}"
        began = perf_counter()
        search_metric("smollm2-135m", folder, control=False, settings=_metric_settings(0))
        yield bench.value("SmolLM2-135M at 50 %", perf_counter() - began, "s")


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
    result = _allocation_result()
    rows = {row["name"]: row for row in result["candidates"]}
    found = [name for name in rows if name.endswith(": search")]
    best = min(found, key=lambda name: rows[name]["search"])
    for name, row in rows.items():
        if name != rival:
            ratio = row["report"] / rows[rival]["report"]
            note = f"{row['report']:.2f} against {rows[rival]['report']:.2f}"
            yield bench.value(name, ratio, "ratio of perplexities", counted=name == best, note=note)


def _metric_settings(seed: int) -> EvolutionSettings:
    return EvolutionSettings(evaluations=200, seed=seed)


@lru_cache
def _metric_result(seed: int) -> dict[str, Any]:
    return search_metric(
        "smollm2-135m", _folder(f"metric-{seed}"), settings=_metric_settings(seed), correct=seed == SEEDS[0], log=print
    )


@lru_cache
def _allocation_result() -> dict[str, Any]:
    dense = load_dense("smollm2-135m")
    windows = search_windows(dense.tokenizer, WindowSizes())
    return search_allocation(dense, _folder("allocation"), 0.6, windows=windows, correct=True, log=print)


def _folder(name: str) -> Any:
    folder = cache_dir() / "searches" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder
