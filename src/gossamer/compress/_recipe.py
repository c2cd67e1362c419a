"""A compression run as a small TOML file that anybody can run again.

model = "smollm2-135m"
text = "notes.txt"            # optional; beside the recipe

[settings]                    # see Settings; what is left out has its default
sparsity = 0.6
score = "mul(W, add(sqrt(F), sqrt(X)))"
allocation = [0.5, 0.6, 0.7]  # or "owl"
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gossamer.compress._checkpoint import read_about
from gossamer.compress._settings import Settings


@dataclass(frozen=True)
class Recipe:
    """What to compress and how. text: a file, None for the default text."""

    model: str
    settings: Settings
    text: Path | None = None

    def toml(self) -> str:
        """The recipe as TOML; settings that have their default are left out.

        >>> print(Recipe("smollm2-135m", Settings(sparsity=0.6)).toml())
        model = "smollm2-135m"
        <BLANKLINE>
        [settings]
        sparsity = 0.6
        <BLANKLINE>
        """
        lines = [f"model = {_quoted(self.model)}"]
        if self.text is not None:
            lines.append(f"text = {_quoted(os.fspath(self.text))}")
        lines += ["", "[settings]"]
        plain = asdict(Settings())
        lines += [f"{key} = {_value(value)}" for key, value in asdict(self.settings).items() if value != plain[key]]
        return "\n".join(lines) + "\n"


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a TOML file, or that of a compressed folder.

    Raises:
        ValueError: the file is not TOML, lacks the model, or names a setting that does not exist.
    """
    path = Path(path)
    if path.is_dir():
        run = read_about(path)["run"]
        return Recipe(run["model"], _settings(run["settings"], path))
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not TOML: {error}") from error
    unknown = sorted(set(found) - {"model", "text", "settings"})
    if unknown or not isinstance(found.get("model"), str):
        raise ValueError(f"recipe {path} takes model, text and [settings] and needs the model, got {', '.join(found)}")
    text = None if "text" not in found else path.parent / found["text"]
    return Recipe(found["model"], _settings(found.get("settings", {}), path), text)


def _settings(found: dict[str, Any], path: Path) -> Settings:
    known = {field.name for field in fields(Settings)}
    if unknown := sorted(set(found) - known):
        raise ValueError(f"{path} has unknown settings {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if isinstance(found.get("allocation"), list):
        found = {**found, "allocation": tuple(found["allocation"])}
    return Settings(**found)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
