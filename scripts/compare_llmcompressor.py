"""Masks of Wanda and SparseGPT beside those of llm-compressor, which lives in an environment of its own.

    python scripts/compare_llmcompressor.py --peer-python /path/to/venv/bin/python [--blocks 2] [--json]

First single matrices from the same weights and statistics, then the first blocks of SmolLM2 calibrated by each side on the
same windows. llm-compressor pulls an older transformers, hence the other Python.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.compress import Settings, calibrate, dense_weight, linears, load_dense, prune, set_dense_weight, sparsegpt
from gossamer.compress._masks import keep_n_of_m, keep_per_row
from gossamer.compress._scores import wanda
from gossamer.compress._text import calibration_windows, default_text

PEER = Path(__file__).with_name("_peer_llmcompressor.py")


def main() -> None:
    """Print the shares of differing mask entries, and how much more output error either side leaves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer-python", type=Path, required=True, help="the Python that has llm-compressor")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of SmolLM2 to prune")
    parser.add_argument("--windows", type=int, default=8, help="calibration windows of 256 tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gossamer-llmcompressor-") as folder:
        rows = compare(Path(folder), given.peer_python, given.blocks, given.windows)
    if given.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['case']:48s} {row['differing']:10.4%} of the mask differs   error ours/peer {row['error']:.4f}")


def compare(folder: Path, peer_python: Path, blocks: int, windows: int) -> list[dict[str, Any]]:
    """One row per matrix and method, and one per method for whole blocks."""
    dense = load_dense("smollm2-135m")
    model: Any = dense.model
    model.model.layers = model.model.layers[:blocks]
    model.config.num_hidden_layers = blocks
    ids = calibration_windows(default_text(), dense.tokenizer, windows, 256)
    model.save_pretrained(folder / "model")
    dense.tokenizer.save_pretrained(folder / "model")
    save_file({"ids": ids}, folder / "ids.safetensors")
    layers = {}
    for step in calibrate(model, ids, "dense", hessian=True):
        for name, layer in linears(step.block).items():
            layers[f"{step.block.name}.{name}"] = (dense_weight(layer).clone(), step.statistics[name])
    first = {name: layers[name] for name in list(layers)[:7]}  # one block has every shape
    arrays: dict[str, Tensor] = {}
    for name, (weight, statistics) in first.items():
        assert statistics.hessian is not None
        arrays |= {f"{name}.weight": weight, f"{name}.squares": statistics.second_moment.float()}
        arrays[f"{name}.hessian"] = statistics.hessian.clone()
    save_file(arrays, folder / "layers.safetensors")
    subprocess.run([str(peer_python), str(PEER), str(folder)], check=True, stdout=subprocess.DEVNULL)
    rows = []
    peer = load_file(folder / "peer_layers.safetensors")
    for name, (weight, statistics) in first.items():
        for method, pattern in (("wanda", "50%"), ("wanda", "2:4"), ("sparsegpt", "50%"), ("sparsegpt", "2:4")):
            theirs, ours = peer[f"{name}.{method}.{pattern}"], pruned(weight, statistics, method, pattern)
            rows.append(row(f"{name.rpartition('layers.')[2]}, {method} {pattern}", weight, statistics, ours, theirs))
    for method in ("wanda", "sparsegpt"):
        model = load_dense(folder / "model").model
        rows.append(whole(model, ids, method, load_file(folder / f"peer_{method}.safetensors"), layers))
    return rows


def pruned(weight: Tensor, statistics: Any, method: str, pattern: str) -> Tensor:
    """Our matrix, by the statistics of the dense model."""
    n_of_m = (2, 4) if pattern == "2:4" else None
    if method == "sparsegpt":
        return sparsegpt(weight, statistics.hessian, 0.5, n_of_m)
    scores = wanda(weight, statistics)
    return weight * (keep_n_of_m(scores, *n_of_m) if n_of_m else keep_per_row(scores, 0.5))


def whole(model: Any, ids: Tensor, method: str, peer: dict[str, Tensor], layers: dict[str, Any]) -> dict[str, Any]:
    """All blocks by our own walk, each block calibrated behind those that are pruned already."""
    settings, differing, count, errors = Settings(score=method), 0, 0, [0.0, 0.0]
    for step in calibrate(model, ids, "sequential", hessian=method == "sparsegpt"):
        statistics = step.statistics
        for name, layer in linears(step.block).items():
            ours = prune(dense_weight(layer), statistics[name], settings)
            set_dense_weight(layer, ours)
            full = f"{step.block.name}.{name}"
            theirs, (weight, of_dense) = peer[f"{full}.weight"], layers[full]
            differing += int(((ours != 0) != (theirs != 0)).sum())
            count += ours.numel()
            errors = [
                total + error(weight, of_dense, found) for total, found in zip(errors, (ours, theirs), strict=True)
            ]
    case = f"{len(layers)} layers, {method} 50%, own calibration"
    return {"case": case, "differing": differing / count, "error": errors[0] / errors[1]}


def row(case: str, weight: Tensor, statistics: Any, ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """One matrix: share of differing mask entries, and our output error over theirs."""
    differing = float(((ours != 0) != (theirs != 0)).float().mean())
    errors = [error(weight, statistics, found) for found in (ours, theirs)]
    return {"case": case, "differing": differing, "error": errors[0] / errors[1]}


def error(weight: Tensor, statistics: Any, found: Tensor) -> float:
    """``tr(Δ H Δᵀ)``: squared output error by the inputs of the dense model."""
    change = (found - weight).double()
    return float((change @ statistics.hessian.double() * change).sum())


if __name__ == "__main__":
    main()
