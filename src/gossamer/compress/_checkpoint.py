"""The compressed model folder, readable by Gossamer and by ``AutoModelForCausalLM.from_pretrained``.

It is an ordinary Hugging Face folder. ``config.json`` carries a ``quantization_config`` of method "gossamer" that
lists, for every compressed layer, its format and its stored arrays; ``model.safetensors`` holds those arrays (and
everything that was left dense) under the layers' names. Loading builds the skeleton on the meta device, puts
:class:`CompressedLinear` layers where the list says, and fills their buffers: the dense weights never exist.
``gossamer.json`` tells how the folder was made and how good it is.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._pages import gather_weights
from gossamer.core.files import save_arrays, verify, write_json
from gossamer.weights import CompressedLinear, DenseWeight, WeightFormat
from gossamer.weights import describe as describe_weight

METHOD = "gossamer"
FOLDER_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
ABOUT_FILE = "gossamer.json"


def layer_entry(weight: WeightFormat, bias: torch.Tensor | None) -> dict[str, Any]:
    """What ``config.json`` says of one compressed layer: enough to allocate it before its arrays are read."""
    arrays = {name: [array.numel(), _dtype_name(array.dtype)] for name, array in weight.arrays().items()}
    return {**describe_weight(weight), "arrays": arrays, "bias": None if bias is None else _dtype_name(bias.dtype)}


@register_quantization_config(METHOD)
class GossamerConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a compressed folder: the version and the compressed layers."""

    def __init__(self, layers: Mapping[str, Any], version: int = FOLDER_VERSION, **_: Any) -> None:
        if version > FOLDER_VERSION:
            raise ValueError(
                f"the folder has version {version}, this Gossamer reads up to {FOLDER_VERSION}: upgrade it"
            )
        self.quant_method = METHOD
        self.version = version
        self.layers = dict(layers)


@register_quantizer(METHOD)
class GossamerQuantizer(HfQuantizer):
    """Puts unfilled :class:`CompressedLinear` layers into the skeleton that ``from_pretrained`` then fills."""

    requires_calibration = True
    is_serializable = True
    is_trainable = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for name, entry in self.quantization_config.layers.items():
            bias = None if entry["bias"] is None else getattr(torch, entry["bias"])
            with torch.device("meta"):
                layer = CompressedLinear.unfilled(entry, entry["arrays"], bias)
            model.set_submodule(name, layer)
        return model


def write_folder(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, WeightFormat],
    about: Mapping[str, Any],
) -> None:
    """Write ``model`` with the layers named in ``weights`` compressed, and everything else as it is.

    Layers of format "dense" stay plain tensors. ``folder`` exists and is empty; it is not complete until this returns.
    """
    arrays, entries = {}, {}
    for name, weight in weights.items():
        if isinstance(weight, DenseWeight):
            continue
        entries[name] = layer_entry(weight, getattr(model.get_submodule(name), "bias", None))
        arrays.update({f"{name}.{key}": array for key, array in weight.arrays().items()})
    arrays.update(_other_tensors(model, entries))
    save_arrays(folder / WEIGHTS_FILE, arrays, {"format": "pt"})
    config = copy.deepcopy(model.config)
    config.quantization_config = GossamerConfig(entries)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / ABOUT_FILE, about)


def _other_tensors(model: PreTrainedModel, compressed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state of ``model`` without the compressed weights, tensors tied to an earlier one left out.

    What layers' arrays mean stands in ``config.json``.
    """
    seen: set[int] = set()
    others = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("._extra_state") or tensor.data_ptr() in seen:
            continue
        if name.endswith(".weight") and name.removesuffix(".weight") in compressed:
            continue
        seen.add(tensor.data_ptr())
        others[name] = tensor
    return others


@dataclass(frozen=True)
class CompressedModel:
    """A loaded folder. ``model`` is the transformers model, ``about`` the content of ``gossamer.json``."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    about: dict[str, Any]
    path: Path


def load(path: str | os.PathLike[str], check: bool = True) -> CompressedModel:
    """Load a compressed model folder; the dense weights are never in memory.

    Args:
        path: a folder that :func:`compress` wrote.
        check: verify the checksum of the weights first (a fraction of a second per GB).

    Raises:
        ValueError: it is no compressed folder, or its weights are damaged.
    """
    path = Path(path)
    about = read_about(path)
    if check:
        verify(path / WEIGHTS_FILE)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()
    gather_weights(model)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return CompressedModel(model, tokenizer, about, path)


def read_about(path: Path) -> dict[str, Any]:
    """The content of ``gossamer.json``; ``ValueError`` with the remedy if ``path`` is no compressed folder."""
    partial = path.with_name(path.name + ".partial")
    if not path.is_dir() and partial.is_dir():
        raise ValueError(f"{path} is not finished (see {partial}); run the same compress command again to resume it")
    if not (path / ABOUT_FILE).is_file():
        raise ValueError(
            f"{path} is no compressed model folder: it has no {ABOUT_FILE}; make one with gossamer compress"
        )
    try:
        return dict(json.loads((path / ABOUT_FILE).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path / ABOUT_FILE} is damaged: {error}") from error


def load_any(path: str | os.PathLike[str]) -> CompressedModel | DenseModel:
    """A compressed folder, or any dense model that :func:`load_dense` takes (in bfloat16)."""
    if (Path(path) / ABOUT_FILE).is_file():
        return load(path)
    return load_dense(path, dtype=torch.bfloat16)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Check the weights of a compressed folder against their checksum; ``ValueError`` if they are damaged."""
    read_about(Path(path))
    verify(Path(path) / WEIGHTS_FILE)


def summarise_layers(about: Mapping[str, Any], by_format: bool) -> list[tuple[str, str, str, str, str, str]]:
    """Rows for a table of ``gossamer.json``'s layers: name, format, density, MB, share of dense, output error.

    With ``by_format`` one row per format instead: format, number of layers, and the rest summed or averaged.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for layer in about["layers"]:
        groups.setdefault(layer["format"] if by_format else layer["name"], []).append(layer)
    rows = []
    for name, layers in groups.items():
        stored, dense = (sum(layer[key] for layer in layers) for key in ("bytes", "dense_bytes"))
        weighted = sum(layer["density"] * layer["dense_bytes"] for layer in layers) / dense
        error = sum(layer["relative_output_error"] for layer in layers) / len(layers)
        second = str(len(layers)) if by_format else layers[0]["format"]
        rows.append((name, second, f"{weighted:.3f}", f"{stored / 1e6:.2f}", f"{stored / dense:.1%}", f"{error:.3f}"))
    return rows


def compressed_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """All compressed layers of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedLinear)}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
