"""The unfinished run on disk: which blocks are done, and how the finished folder comes into being."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.core.files import load_arrays, save_arrays, write_json
from gossamer.weights import WeightFormat, describe, from_description

IDENTITY_FILE = "run.json"


@dataclass(frozen=True)
class Run:
    """The folder ``OUT.partial``. ``identity`` is everything that determines the result."""

    out: Path
    identity: dict[str, Any]

    @classmethod
    def open(cls, out: Path, identity: dict[str, Any], fresh: bool) -> Run:
        """Start a run or take up the one that is there.

        Raises:
            ValueError: the run that is there has another identity.
        """
        run = cls(out, json.loads(json.dumps(identity)))
        if fresh:
            shutil.rmtree(run.folder, ignore_errors=True)
        if (run.folder / IDENTITY_FILE).is_file():
            found = json.loads((run.folder / IDENTITY_FILE).read_text())
            differing = sorted(key for key in identity if found.get(key) != run.identity[key])
            if differing:
                raise ValueError(
                    f"{run.folder} holds an unfinished run with another {', '.join(differing)}; "
                    "use --fresh to throw it away, or another output folder"
                )
        else:
            shutil.rmtree(run.folder, ignore_errors=True)  # blocks without an identity belong to nobody
            run.folder.mkdir()
            write_json(run.folder / IDENTITY_FILE, run.identity)
        return run

    @property
    def folder(self) -> Path:
        """Where the finished blocks are kept."""
        return self.out.with_name(self.out.name + ".partial")

    @property
    def done(self) -> frozenset[int]:
        """Indices of the finished blocks."""
        return frozenset(int(path.stem.removeprefix("block-")) for path in self.folder.glob("block-*.safetensors"))

    def write(self, index: int, weights: Mapping[str, WeightFormat], reports: list[dict[str, Any]]) -> None:
        """Store block ``index``: its weights by layer name, and what the report says of them."""
        arrays = {f"{name}.{key}": array for name, weight in weights.items() for key, array in weight.arrays().items()}
        layers = {name: describe(weight) for name, weight in weights.items()}
        save_arrays(self._file(index), arrays, {"layers": json.dumps(layers), "reports": json.dumps(reports)})

    def read(self, index: int) -> tuple[dict[str, WeightFormat], list[dict[str, Any]]]:
        """What :meth:`write` stored."""
        arrays, metadata = load_arrays(self._file(index))
        weights = {}
        for name, description in json.loads(metadata["layers"]).items():
            own = {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}
            weights[name] = from_description(description, own)
        return weights, json.loads(metadata["reports"])

    @property
    def stage(self) -> Path:
        """Where the final folder is put together; made empty."""
        stage = self.folder / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir()
        return stage

    def publish(self, stage: Path) -> Path:
        """Give the complete folder its name and drop the block files."""
        os.replace(stage, self.out)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.out

    def _file(self, index: int) -> Path:
        return self.folder / f"block-{index:03d}.safetensors"
