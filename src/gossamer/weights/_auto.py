"""When a compressed kernel pays: measured once per shape class on this machine, remembered on disk.

Two questions are asked of the same measurements: may a layer multiply with its kernel, or is decoding into a
scratch panel faster (:func:`kernel_pays`, at run time); and should a layer be compressed at all
(:func:`speed_over_dense`, when a model is compressed). Measured on weights rotated past the last-level cache,
because that is how a model's layers meet the processor.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from gossamer.core.files import write_json
from gossamer.core.hardware import cache_dir, hardware
from gossamer.core.measure import Bench, Contender, copies_past_cache
from gossamer.weights._dense import DenseWeight
from gossamer.weights._format import SMALL_N, Matvec, WeightFormat
from gossamer.weights._fragments import FragmentWeight
from gossamer.weights._nm import NMWeight

_TABLE_VERSION = 1


def kernel_pays(weight: WeightFormat, rows: int) -> bool:
    """Whether ``weight``'s own kernel beats decoding and ``F.linear`` for ``rows`` rows of activations."""
    if isinstance(weight, FragmentWeight) or isinstance(weight, NMWeight) and weight.device.type == "cuda":
        return weight.kernel_runs(rows)
    if not 1 <= rows <= SMALL_N or weight.device.type != "cpu":
        return False
    bucket = 1 if rows == 1 else 4 if rows <= 4 else SMALL_N
    return _remembered(weight, f"kernel-n{bucket}", lambda: _kernel_over_panel(weight, bucket)) > 1.0


def speed_over_dense(weight: WeightFormat, threads: int = 1) -> float:
    """How many times faster ``weight`` multiplies one vector than the same matrix stored dense."""
    return _remembered(weight, f"dense-t{threads}", lambda: _matvec_over_dense(weight, threads))


def _kernel_over_panel(weight: WeightFormat, rows: int) -> float:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return _ratio(lambda: weight.linear(x), lambda: F.linear(x, weight.to_dense().to(x.dtype)))


def _matvec_over_dense(weight: WeightFormat, threads: int) -> float:
    x = np.random.default_rng(0).standard_normal(weight.shape[1]).astype(np.float32)
    out = np.empty(weight.shape[0], np.float32)
    dense = DenseWeight.from_dense(weight.to_dense())
    return _ratio(*([partial(matvec, x, out) for matvec in _rotated(kind, threads)] for kind in (weight, dense)))


def _rotated(weight: WeightFormat, threads: int) -> list[Matvec]:
    """Bound kernels of so many copies of ``weight`` that together they exceed twice the last-level cache."""
    bound = []
    for _ in range(copies_past_cache(weight.nbytes)):
        arrays = {name: array.clone() for name, array in weight.arrays().items()}
        copy = type(weight).from_arrays(arrays, weight.shape, weight.dtype, weight.meta())
        bound.append(copy.bind(threads))
    return bound


def _ratio(ours: Contender, peer: Contender) -> float:
    ratio = Bench(samples=7, case_seconds=2.0).compare("", ours, peer).ratio
    assert ratio is not None
    return ratio


def _remembered(weight: WeightFormat, question: str, answer: Callable[[], float]) -> float:
    """The stored ratio for the shape class of ``weight``, measured now if it is the first of its class."""
    table = _table()
    key = f"{question} {_shape_class(weight)}"
    if key not in table:
        table[key] = answer()
        with contextlib.suppress(OSError):  # a read-only home costs only the measuring, next time again
            write_json(_table_path(), table)
    return table[key]


def _shape_class(weight: WeightFormat) -> str:
    """Matrices of one format whose speed relative to dense is alike: size to a factor of 1.4, density to a tenth."""
    layout = [value for value in weight.meta().values() if isinstance(value, str)]
    kind = "-".join([weight.name, *layout, str(weight.dtype).removeprefix("torch.")])
    rows, columns = (round(2 * np.log2(size)) for size in weight.shape)
    return f"{kind} {rows}x{columns} density {round(10 * weight.nbytes / weight.dense_nbytes)}"


@lru_cache(maxsize=1)
def _table() -> dict[str, float]:
    path = _table_path()
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _table_path() -> Path:
    return cache_dir() / f"auto-{hardware().slug}-v{_TABLE_VERSION}.json"
