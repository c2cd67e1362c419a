"""Resident memory of a model folder, measured in a process of its own.

Run as ``python -m gossamer.compress._memory DIR TOKENS``; prints one JSON object of bytes: after the imports, after
loading, and after decoding TOKENS tokens with ``backend="auto"``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resident:
    """Bytes of resident memory that a model adds: after loading, and after decoding."""

    loaded: int
    decoded: int


def resident_memory(path: str | os.PathLike[str], tokens: int = 8) -> Resident:
    """What loading the model folder ``path`` (dense or compressed) and decoding with it adds to a fresh process.

    Raises:
        RuntimeError: the process failed; its last line of output is the message.
    """
    command = [sys.executable, "-m", "gossamer.compress._memory", os.fspath(path), str(tokens)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"measuring the memory of {path} failed: {result.stderr.strip().splitlines()[-1:]}")
    sizes = json.loads(result.stdout.strip().splitlines()[-1])
    return Resident(sizes["loaded"] - sizes["imported"], sizes["decoded"] - sizes["imported"])


def _main(path: Path, tokens: int) -> None:
    import torch

    # transformers imports a model's own module only when it meets it: that is code, not weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from gossamer.compress import Decoder
    from gossamer.compress._pages import gather_weights

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    type(AutoModelForCausalLM._model_mapping[type(config)])
    sizes = {"imported": _resident()}
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()
        gather_weights(model)  # as load() does; until then the file is only mapped, and nothing of it resident
        sizes["loaded"] = _resident()
        decoder = Decoder(model, max_length=2 * tokens + 8)
        decoder.prefill([1, 2, 3, 4])
        for token in range(tokens):
            decoder.step(token + 5)
        sizes["decoded"] = _resident()
    print(json.dumps(sizes))


def _resident() -> int:
    import psutil

    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
