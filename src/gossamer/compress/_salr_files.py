"""Folders of fine-tuned models: adapters in the form of PEFT beside the pruned base that they belong to.

``FOLDER/adapter_model.safetensors`` is the task's LoRA and ``FOLDER/residual/`` the repair, both as PEFT writes adapters;
``FOLDER/base.safetensors`` holds the bitmaps and ``FOLDER/salr.json`` what they were made from. Adapters without their
pruned base are worth nothing, so loading checks a hash of the dense weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gossamer.compress._blocks import dense_weight, iter_blocks, linears
from gossamer.compress._salr import SALRConfig, SALRLinear, convert_
from gossamer.core.files import atomic_write, load_arrays, save_arrays, write_json

VERSION = 1
_PREFIX = "base_model.model."
_TASK, _RESIDUAL = "lora", "residual"


def dense_hash(model: nn.Module) -> str:
    """A hash of the weights of all linear layers inside the blocks of a dense ``model``, in float32."""
    digest = hashlib.sha256()
    for block in iter_blocks(model):
        for name, layer in linears(block).items():
            digest.update(f"{block.name}.{name}".encode())
            digest.update(dense_weight(layer).float().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def salr_layers(model: nn.Module) -> dict[str, SALRLinear]:
    """All converted layers of ``model`` by name.

    Raises:
        ValueError: there are none.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SALRLinear)}
    if not layers:
        raise ValueError("the model has no SALR layers: convert it first")
    return layers


def save_finetuned(model: nn.Module, folder: str | os.PathLike[str], base: Mapping[str, str]) -> Path:
    """Write adapters and pruned base of ``model``; returns the folder.

    Args:
        base: ``{"model": name, "hash": dense_hash(of the dense model)}``.
    """
    folder, layers = Path(folder), salr_layers(model)
    folder.mkdir(parents=True, exist_ok=True)
    config = next(iter(layers.values())).config
    arrays = {f"{name}.{key}": array for name, layer in layers.items() for key, array in layer.base.arrays().items()}
    save_arrays(folder / "base.safetensors", {name: array.cpu() for name, array in arrays.items()}, {})
    _save_adapter(folder, layers, _TASK, config.rank, config.alpha, config.dropout, base["model"])
    if config.residual_rank:
        ranks = {layer.residual_A.shape[0] for layer in layers.values()}
        rank = max(ranks)
        _save_adapter(folder / "residual", layers, _RESIDUAL, rank, float(rank), 0.0, base["model"])
    write_json(folder / "salr.json", {"version": VERSION, "base": dict(base), "config": asdict(config)})
    return folder


def _save_adapter(
    folder: Path, layers: Mapping[str, SALRLinear], kind: str, rank: int, alpha: float, dropout: float, base: str
) -> None:
    """One adapter as PEFT stores it. Repairs of small matrices may have a lower rank: they are filled up with zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in layers.items():
        first, second = (getattr(layer, f"{kind}_{side}").detach().float().cpu() for side in "AB")
        missing = rank - first.shape[0]
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = nn.functional.pad(first, (0, 0, 0, missing)).contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = nn.functional.pad(second, (0, missing)).contiguous()
    with atomic_write(folder / "adapter_model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "lora_dropout": dropout, "bias": "none", "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "inference_mode": True,
    }  # fmt: skip
    write_json(folder / "adapter_config.json", settings)


def load_finetuned(model: nn.Module, folder: str | os.PathLike[str]) -> nn.Module:
    """Turn the dense ``model`` into the fine-tuned one, in place.

    Raises:
        ValueError: the folder is not one of ours or of another version, or ``model`` is not the dense model it began with.
    """
    folder = Path(folder)
    about = read_finetuned(folder)
    found = dense_hash(model)
    if found != about["base"]["hash"]:
        raise ValueError(
            f"{folder} was fine-tuned from {about['base']['model']} with weights {about['base']['hash']}, "
            f"but the model given has {found}"
        )
    config = about["config"]
    targets = config["targets"]
    settings = SALRConfig(**{**config, "targets": tuple(targets) if targets is not None else None})
    layers = convert_(model, replace(settings, score="magnitude"))  # what it keeps is replaced by what is stored
    arrays, _ = load_arrays(folder / "base.safetensors")
    for name, layer in layers.items():
        try:
            layer.base.fill({key: arrays[f"{name}.{key}"] for key in layer.base.arrays()})
        except ValueError as error:
            raise ValueError(f"{folder}: the base of {name} differs from what its settings prune: {error}") from error
        layer.config = settings
    _load_adapter(folder, layers, _TASK)
    if layers and config["residual_rank"]:
        _load_adapter(folder / "residual", layers, _RESIDUAL)
    return model


@torch.no_grad()
def _load_adapter(folder: Path, layers: Mapping[str, SALRLinear], kind: str) -> None:
    tensors: dict[str, Tensor] = load_file(folder / "adapter_model.safetensors")
    for name, layer in layers.items():
        first, second = (getattr(layer, f"{kind}_{side}") for side in "AB")
        first.copy_(tensors[f"{_PREFIX}{name}.lora_A.weight"][: first.shape[0]])
        second.copy_(tensors[f"{_PREFIX}{name}.lora_B.weight"][:, : second.shape[1]])


def read_finetuned(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``salr.json`` says: ``version``, ``base`` and ``config``.

    Raises:
        ValueError: there is none, or it is of another version.
    """
    path = Path(folder) / "salr.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no fine-tuned folder: it has no salr.json")
    about: dict[str, Any] = json.loads(path.read_text())
    if about.get("version") != VERSION:
        raise ValueError(f"{path} has version {about.get('version')}, this Gossamer reads {VERSION}")
    return about
