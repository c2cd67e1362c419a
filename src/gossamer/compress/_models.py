"""Load a dense causal language model and its tokenizer from this machine, never from the network.

GGUF files are dequantised once per dtype into an ordinary Hugging Face folder in the user's cache; the second time
they load as fast as any other model.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from gossamer.compress._blocks import iter_blocks, linears
from gossamer.compress._pages import gather_weights
from gossamer.core.assets import find_model, model_weight_files
from gossamer.core.hardware import cache_dir

CONVERSION = 1
"""Version of what a converted GGUF folder holds; part of the folder's name."""


@dataclass(frozen=True)
class DenseModel:
    """A dense model in eval mode.

    name: as the user gave it. path: the plain Hugging Face folder it was loaded from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path

    @cached_property
    def fingerprint(self) -> str:
        """A hash over the content of the weight files."""
        digest = hashlib.sha256()
        for path in model_weight_files(self.path):
            digest.update(_file_digest(path).encode())
        return digest.hexdigest()[:16]


def load_dense(name_or_path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> DenseModel:
    """Load a dense causal language model whose blocks are made of plain ``nn.Linear`` or ``Conv1D`` layers.

    Args:
        name_or_path: what :func:`gossamer.core.assets.find_model` accepts.
        dtype: of all weights: torch.float32, torch.bfloat16 or torch.float16.

    Raises:
        ValueError: no such model, an architecture that transformers does not know, or quantised weights.
    """
    source = find_model(name_or_path)
    folder = _converted(source, dtype) if source.is_file() else source
    _check_dense(folder)
    with _one_line_errors(source), _quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    _check_plain(model, source)
    gather_weights(model)
    # a compressed folder names its dense model, and may be evaluated from another working directory
    name = os.path.abspath(name_or_path) if os.path.exists(name_or_path) else os.fspath(name_or_path)
    return DenseModel(model, tokenizer, name, folder)


def _converted(gguf: Path, dtype: torch.dtype) -> Path:
    """The folder that holds ``gguf`` dequantised to ``dtype``; made if it is not there yet, whole or not at all."""
    kind = str(dtype).removeprefix("torch.")
    models = cache_dir() / "models"
    folder = models / f"{gguf.stem}-{kind}-{_file_digest(gguf)[:16]}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(models)
    stage = models / f".{os.getpid()}.{folder.name}"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        _convert(gguf, dtype, stage)
        try:
            stage.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return folder


def _convert(gguf: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write ``gguf`` as a plain folder.

    transformers refuses to save a model that came from GGUF, so the weights move into a new one without that past.
    """
    with _one_line_errors(gguf), _quiet():
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_plain(loaded, gguf)
    config = AutoConfig.for_model(loaded.config.model_type, **_plain_config(loaded))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(loaded.to(dtype).state_dict(), assign=True)
    model.tie_weights()
    if loaded.generation_config is not None:
        model.generation_config = loaded.generation_config
    with _quiet():
        try:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(f"the dequantised model cannot be written to {folder.parent}: {error}") from error


def _plain_config(model: PreTrainedModel) -> dict[str, object]:
    config = model.config.to_dict()
    for key in ("quantization_config", "model_type", "dtype", "torch_dtype"):
        config.pop(key, None)
    return config


def _check_dense(folder: Path) -> None:
    """Refuse a folder that says itself that its weights are packed."""
    with _one_line_errors(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if packing := config.get("quantization_config"):
        method = packing.get("quant_method", "unknown")
        raise ValueError(f"{folder} holds weights quantised or compressed by {method!r}: give the dense model instead")


def _check_plain(model: PreTrainedModel, source: Path) -> None:
    """Refuse a model whose blocks hold packed weights."""
    for block in iter_blocks(model):
        for name, layer in linears(block).items():
            subclassed = isinstance(layer, nn.Linear) and type(layer) is not nn.Linear
            if subclassed or not layer.weight.is_floating_point():
                raise ValueError(
                    f"{source} holds quantised weights ({block.name}.{name} is {type(layer).__name__} of "
                    f"{layer.weight.dtype}): give the model in float32, float16 or bfloat16"
                )


def _remove_leftovers(models: Path) -> None:
    """Drop the unfinished folders of processes that are gone."""
    for path in models.glob(".*.*"):
        owner = path.name.split(".")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _one_line_errors(source: Path) -> Iterator[None]:
    """Turn what transformers says of a model that it cannot read, in whatever kind of error, into one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).strip()
        raise ValueError(f"{source} cannot be loaded as a causal language model: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' remarks and progress bars for a while, also the one that only a closed stderr silences."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
