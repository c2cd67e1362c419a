"""Compress a whole model, block by block, so that an interrupted run resumes where it was.

Every finished block is written to ``OUT.partial`` before the next one starts. When all are there, the folder is put
together and renamed to ``OUT``: at any moment ``OUT`` is absent or complete. A second run with the same settings
takes finished blocks from disk and gives the same result, bit for bit, as an undisturbed one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gossamer
from gossamer.compress._allocation import OWL_OUTLIER, OWL_SPREAD, outlier_share, spread_out
from gossamer.compress._binarise import binarise
from gossamer.compress._blocks import Block, dense_weight, iter_blocks, linears, set_dense_weight
from gossamer.compress._budget import to_budget
from gossamer.compress._calibrate import calibrate
from gossamer.compress._checkpoint import read_about, write_folder
from gossamer.compress._gradients import GradientStatistics, gradient_statistics
from gossamer.compress._masks import check_divides
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._prune import prune, relative_output_error, scores_of
from gossamer.compress._run import Run
from gossamer.compress._scores import wanda
from gossamer.compress._settings import Settings
from gossamer.compress._statistics import LinearStatistics
from gossamer.compress._text import Text, calibration_windows, default_text
from gossamer.weights import (
    BitmapWeight,
    DenseWeight,
    LosslessWeight,
    NMPattern,
    NMWeight,
    STBWeight,
    WeightFormat,
    speed_over_dense,
)

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``."""

STEP_ASIDE_BELOW = 0.97
"""``format="auto"`` stores a layer dense if no format multiplies at least this many times as fast as dense."""


def compress(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    settings: Settings | None = None,
    text: Text | None = None,
    progress: Progress = lambda what, done, total: None,
    fresh: bool = False,
) -> Path:
    """Prune every linear layer inside the blocks of ``model`` and write a compressed folder.

    Embeddings, norms and the head stay as they are.

    Args:
        model: a local folder, a GGUF file, a hub id in the user's cache, or "smollm2-135m".
        out: the folder to make; it must not exist. ``OUT.partial`` holds the finished blocks until then.
        settings: see :class:`Settings`.
        text: calibration text; by default the standard library's own documentation.
        progress: called after every block.
        fresh: throw away the unfinished blocks of an earlier run instead of resuming it.

    Returns:
        ``out``, for :func:`load`. If ``out`` is already the result of exactly this run, nothing is done.

    Raises:
        ValueError: bad settings, unknown model, text too short, or an unfinished run with other settings.
        OSError: ``out`` exists or its folder cannot be written.
    """
    settings = settings or Settings()
    out = Path(os.path.abspath(out))
    _check_writable(out)
    text = text or default_text()
    dense = load_dense(os.fspath(model), dtype=getattr(torch, settings.dtype))
    identity = _identity(dense, settings, text)
    if out.exists():
        if out.is_dir() and any(out.iterdir()) and _made_by(out) == identity:
            return out
        raise FileExistsError(f"output folder {out} exists already; choose another or remove it")
    windows = calibration_windows(text, dense.tokenizer, settings.samples, settings.seqlen)
    _check_pattern(dense, settings)
    run = Run.open(out, identity, fresh)
    _compress_blocks(dense, windows, settings, run, progress)
    return _finish(run, dense)


def _check_pattern(dense: DenseModel, settings: Settings) -> None:
    if settings.n_of_m is not None and settings.format not in ("nm", "stb"):  # their windows may reach beyond
        for block in iter_blocks(dense.model):
            for linear in linears(block).values():
                check_divides(dense_weight(linear).shape[1], *settings.n_of_m)


def _compress_blocks(dense: DenseModel, windows: Tensor, settings: Settings, run: Run, progress: Progress) -> None:
    """Write the block files that are missing; finished ones are put into the model as they are passed."""
    dense.model.float()  # float32 statistics of weights that are exact in the storage dtype
    done = run.done
    sizes = [_weights_in(block) for block in iter_blocks(dense.model)]
    gradients: dict[str, GradientStatistics] = {}
    if settings.allocation == "owl":
        settings = replace(settings, allocation=_by_outliers(dense, windows, settings, sizes))
    metric = settings.metric
    if metric is not None and metric.needs_gradients and len(done) < len(sizes):
        gradients = gradient_statistics(dense.model, windows, lambda done, total: progress("gradients", done, total))
    walk = calibrate(dense.model, windows, propagate=settings.propagate, hessian=settings.needs_hessian)
    for step in walk:
        if step.index in done:
            weights, _ = run.read(step.index)
        else:
            own = settings.of_block(step.index, sizes)
            weights = _compress_block(step.block, step.statistics, own, run, step.index, gradients)
        for name, linear in linears(step.block).items():
            set_dense_weight(linear, weights[name].to_dense().float())
        progress("compressing blocks", step.index + 1, step.total)


def _by_outliers(dense: DenseModel, windows: Tensor, settings: Settings, sizes: list[int]) -> tuple[float, ...]:
    """OWL's sparsities, from a walk through the dense model; one N of spread where patterns are moved."""
    shares = []
    for step in calibrate(dense.model, windows, "dense"):
        scores = [wanda(dense_weight(layer), step.statistics[name]) for name, layer in linears(step.block).items()]
        times = OWL_OUTLIER if settings.n_of_m is None else OWL_OUTLIER + 1
        shares.append(outlier_share(torch.cat([score.flatten() for score in scores]), times))
    sparsity, spread = settings.sparsity, OWL_SPREAD
    if settings.n_of_m is not None:
        kept, window = settings.n_of_m
        sparsity, spread = 1 - kept / window, 1 / window
    offsets = spread_out(shares, spread, direction=-1)
    return tuple(1 - value for value in to_budget([1 - sparsity + offset for offset in offsets], sizes, sparsity))


def _weights_in(block: Block) -> int:
    return sum(linear.weight.numel() for linear in linears(block).values())


def _compress_block(
    block: Block,
    statistics: dict[str, LinearStatistics],
    settings: Settings,
    run: Run,
    index: int,
    gradients: dict[str, GradientStatistics],
) -> dict[str, WeightFormat]:
    weights, reports = {}, []
    for name, linear in linears(block).items():
        original = dense_weight(linear)
        own = gradients.get(f"{block.name}.{name}")
        if settings.format == "stb":
            weight: WeightFormat = _binarised(original, statistics[name], settings, own)
        else:
            kept = prune(original, statistics[name], settings, own)
            weight = choose_format(kept.to(getattr(torch, settings.dtype)), settings)
        weights[name] = weight
        values = weight.to_dense().float()
        error = relative_output_error(original, values, statistics[name])
        reports.append(_report(f"{block.name}.{name}", weight, float((values != 0).double().mean()), error))
    run.write(index, weights, reports)
    return weights


def _binarised(
    original: Tensor, statistics: LinearStatistics, settings: Settings, gradients: GradientStatistics | None
) -> STBWeight:
    assert settings.n_of_m is not None  # checked with the settings
    levels = binarise(original, statistics, settings.n_of_m[0], scores_of(original, statistics, settings, gradients))
    return STBWeight.from_levels(levels, "faithful", getattr(torch, settings.dtype))


def choose_format(weight: Tensor, settings: Settings) -> WeightFormat:
    """``weight`` in the format that ``settings`` names; for "auto" the smallest that was not measured slower than dense."""
    if settings.format == "dense":
        return DenseWeight.from_dense(weight)
    if settings.format == "lossless":
        return LosslessWeight.from_dense(weight)
    if settings.format == "nm":
        assert settings.n_of_m is not None  # checked with the settings
        return NMWeight.from_dense(weight, NMPattern(*settings.n_of_m))
    bitmap = BitmapWeight.from_dense(weight, layout="rows")
    if settings.format == "bitmap":
        return bitmap
    candidates: list[WeightFormat] = [bitmap] if settings.prunes else []
    if weight.dtype == torch.bfloat16:
        candidates.append(LosslessWeight.from_dense(weight))
    for candidate in sorted(candidates, key=lambda candidate: candidate.nbytes):
        if candidate.nbytes < candidate.dense_nbytes and speed_over_dense(candidate) >= STEP_ASIDE_BELOW:
            return candidate
    return DenseWeight.from_dense(weight)


def _report(name: str, weight: WeightFormat, density: float, error: float) -> dict[str, Any]:
    return {
        "name": name,
        "format": weight.name,
        "shape": list(weight.shape),
        "density": density,
        "bytes": weight.nbytes,
        "dense_bytes": weight.dense_nbytes,
        "relative_output_error": error,
        **({"nominal_bits": weight.nominal_bits} if isinstance(weight, STBWeight) else {}),
    }


def _finish(run: Run, dense: DenseModel) -> Path:
    """Put the finished blocks together and give the folder its name."""
    weights: dict[str, WeightFormat] = {}
    reports: list[dict[str, Any]] = []
    for index in sorted(run.done):
        block_weights, block_reports = run.read(index)
        weights.update(zip([report["name"] for report in block_reports], block_weights.values(), strict=True))
        reports += block_reports
    dense.model.to(getattr(torch, run.identity["settings"]["dtype"]))
    stage = run.stage
    about = {
        "gossamer": gossamer.__version__,
        "run": run.identity,
        "layers": reports,
        "dense_model": str(dense.path),
        "dense_bytes": sum(tensor.numel() * tensor.element_size() for tensor in dense.model.parameters()),
    }
    write_folder(stage, dense.model, dense.tokenizer, weights, about)
    return run.publish(stage)


def _identity(dense: DenseModel, settings: Settings, text: Text) -> dict[str, Any]:
    digest = hashlib.sha256(text.calibration.encode()).hexdigest()[:16]
    identity: dict[str, Any] = json.loads(json.dumps({"settings": asdict(settings), "text": [text.name, digest]}))
    return {"model": dense.name, "weights": dense.fingerprint, **identity}


def _made_by(out: Path) -> dict[str, Any] | None:
    try:
        return read_about(out).get("run")
    except ValueError:
        return None


def _check_writable(out: Path) -> None:
    """Refuse before any work is done what would fail at its end."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"output folder {out} cannot be made: {out.parent} does not exist")
    if not os.access(out.parent, os.W_OK):
        raise PermissionError(f"output folder {out} cannot be made: {out.parent} is not writable")
