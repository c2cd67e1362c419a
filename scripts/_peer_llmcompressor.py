"""Runs in the environment of llm-compressor: prunes the same matrices, and the same small model, as its users do.

Arguments: a folder with ``layers.safetensors`` (``NAME.weight``, ``NAME.squares``, ``NAME.hessian``), ``model/`` and
``ids.safetensors``; results are written beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_sparsify import sparsify_weight as by_sparsegpt
from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import sparsify_weight as by_wanda
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PATTERNS = {"50%": (0, 0), "2:4": (2, 4)}
BLOCK, DAMPING = 128, 0.01


def main() -> None:
    """Single matrices by the statistics given, then the model by llm-compressor's own calibration."""
    folder = Path(sys.argv[1])
    given, found = load_file(folder / "layers.safetensors"), {}
    for name in sorted({key.rpartition(".")[0] for key in given}):
        weight = given[f"{name}.weight"]
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        for pattern, (n, m) in PATTERNS.items():
            layer.weight.data = weight.clone()
            found[f"{name}.wanda.{pattern}"] = by_wanda(layer, {layer: given[f"{name}.squares"].clone()}, 0.5, n, m)
            hessian = {layer: given[f"{name}.hessian"].clone()}
            _, corrected = by_sparsegpt(layer, hessian, 0.5, n, m, BLOCK, DAMPING, False)
            found[f"{name}.sparsegpt.{pattern}"] = corrected
    save_file({key: value.detach().contiguous() for key, value in found.items()}, folder / "peer_layers.safetensors")
    ids = load_file(folder / "ids.safetensors")["ids"]
    for name, modifier in (("wanda", WandaPruningModifier), ("sparsegpt", SparseGPTModifier)):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids.tolist()]
        recipe = modifier(sparsity=0.5, mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"])
        oneshot(
            model=model, dataset=Dataset.from_list(rows), recipe=recipe, max_seq_length=ids.shape[1],
            num_calibration_samples=len(ids), shuffle_calibration_samples=False,
        )  # fmt: skip
        state = {key: value.contiguous() for key, value in model.state_dict().items() if ".layers." in key}
        save_file(state, folder / f"peer_{name}.safetensors")


if __name__ == "__main__":
    main()
