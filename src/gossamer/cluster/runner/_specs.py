"""Jobs to run, from a YAML file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class JobSpec:
    """One job.

    command: program and arguments. iterations, batch: training steps, and samples of a step on each GPU. gpus: size
    of the gang, on one machine. seconds: of one step alone with the full batch; measured beforehand where 0.
    memory_fixed, memory_per_sample: MiB on a GPU. model: a label; jobs of one label and batch slow others down alike.
    submit: seconds after the start at which it is handed in. accumulates: whether the script can take sub-batches.
    env: further environment variables.

    Raises:
        ValueError: a value is missing, not positive or negative.
    """

    name: str
    command: tuple[str, ...]
    iterations: int
    batch: int = 1
    gpus: int = 1
    seconds: float = 0.0
    memory_fixed: float = 0.0
    memory_per_sample: float = 0.0
    model: str = ""
    submit: float = 0.0
    accumulates: bool = True
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name must be a text without slashes, got {self.name!r}")
        if not self.command:
            raise ValueError(f"job {self.name}: command must not be empty")
        for name in ("iterations", "batch", "gpus"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"job {self.name}: {name} must be a whole number from 1 on, got {value!r}")
        for name in ("seconds", "memory_fixed", "memory_per_sample", "submit"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"job {self.name}: {name} must not be negative, got {value!r}")


def read_specs(path: str | os.PathLike[str]) -> list[JobSpec]:
    """Read ``jobs:``, a list of mappings with the fields of :class:`JobSpec`; ``command`` may be one line of text.

    Raises:
        ValueError: no such list, an unknown or wrong field, or a name twice; the job is named.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise ValueError("reading a job file needs PyYAML: pip install 'gossamer[cluster]'") from None
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("jobs"), list) or not content["jobs"]:
        raise ValueError(f"{path} must hold a list called jobs, with at least one job")
    specs = [_spec(entry, number) for number, entry in enumerate(content["jobs"])]
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"names must differ, got {', '.join(name for name in names if names.count(name) > 1)}")
    return specs


def _spec(entry: Any, number: int) -> JobSpec:
    if not isinstance(entry, dict):
        raise ValueError(f"job {number} must be a mapping, got {type(entry).__name__}")
    known = {item.name for item in fields(JobSpec)}
    unknown = [str(name) for name in entry if name not in known]
    missing = [name for name in ("name", "command", "iterations") if name not in entry]
    if unknown or missing:
        what = f"unknown fields {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise ValueError(f"job {entry.get('name', number)} has {what}; known are {', '.join(sorted(known))}")
    command = entry["command"]
    parts = shlex.split(command) if isinstance(command, str) else [str(part) for part in command]
    env = {str(key): str(value) for key, value in entry.get("env", {}).items()}
    return JobSpec(**{**entry, "command": tuple(parts), "env": env})
