"""Text to calibrate and to evaluate on: disjoint parts of something that is on every machine.

Paragraphs go to one part or the other by their hash, so that a repeated paragraph never ends up in both.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.core.assets import data_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WIKITEXT2 = ("text/wikitext2/valid.txt.gz", "text/wikitext2/test.txt.gz")
FEW_PARAGRAPHS = 16


@dataclass(frozen=True)
class Text:
    """Two disjoint texts. ``note`` says where they come from and how they were divided."""

    name: str
    calibration: str
    evaluation: str
    note: str


def default_text() -> Text:
    """WikiText-2 where ``GOSSAMER_DATA`` has it, else the documentation that comes with Python."""
    try:
        return wikitext2()
    except FileNotFoundError:
        return python_documentation()


def python_documentation() -> Text:
    """The language reference inside the standard library (``pydoc_data.topics``), each paragraph once.

    It differs a little between versions of Python; ``note`` records which one this is.
    """
    paragraphs = _paragraphs("\n\n".join(topics[name] for name in sorted(topics)))
    note = f"pydoc_data.topics of Python {platform.python_version()}, halves by paragraph hash"
    return _divide("python-documentation", dict.fromkeys(paragraphs), note)


def wikitext2() -> Text:
    """WikiText-2: its validation part to calibrate, its test part to evaluate.

    Raises:
        FileNotFoundError: ``GOSSAMER_DATA`` is unset or has no ``text/wikitext2``.
    """
    calibration, evaluation = (_read(data_file(name)) for name in WIKITEXT2)
    return Text("wikitext-2", calibration, evaluation, "WikiText-2 (word level): valid to calibrate, test to evaluate")


def read_text(path: str | os.PathLike[str]) -> Text:
    """A text file of the user's (UTF-8, ``.gz`` allowed), divided into halves by paragraph hash.

    Paragraphs end at blank lines; in a text with hardly any, every line is one.

    Raises:
        ValueError: the file is not UTF-8 text, or too short to be divided.
        OSError: it cannot be read.
    """
    path = Path(path)
    text = _read(path)
    paragraphs = _paragraphs(text)
    if len(paragraphs) < FEW_PARAGRAPHS:
        paragraphs = [line for line in text.splitlines() if line.strip()]
    divided = _divide(path.name, paragraphs, f"{path.name}, halves by paragraph hash")
    if not (divided.calibration and divided.evaluation):
        raise ValueError(f"text {path} has {len(paragraphs)} paragraphs, too few to divide; give a longer one")
    return divided


def calibration_windows(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, seqlen: int) -> Tensor:
    """``samples`` windows of ``seqlen`` tokens, spread evenly over the calibration part: ``(samples, seqlen)`` int64.

    Raises:
        ValueError: the text is too short.
    """
    windows = _windows(text.calibration, f"calibration part of {text.name}", tokenizer, samples, seqlen)
    spread = [index * (len(windows) - 1) // max(samples - 1, 1) for index in range(samples)]
    return windows[spread]


def evaluation_windows(text: Text, tokenizer: PreTrainedTokenizerBase, seqlen: int, windows: int) -> Tensor:
    """The first ``windows`` windows of ``seqlen`` tokens of the evaluation part: ``(windows, seqlen)`` int64.

    Raises:
        ValueError: the text is too short.
    """
    return _windows(text.evaluation, f"evaluation part of {text.name}", tokenizer, windows, seqlen)[:windows]


def _windows(text: str, what: str, tokenizer: PreTrainedTokenizerBase, count: int, seqlen: int) -> Tensor:
    """All whole windows of ``text``, at least ``count``."""
    if count < 1 or seqlen < 2:
        raise ValueError(f"need at least 1 window of 2 tokens, got {count} of {seqlen}")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < count * seqlen:
        raise ValueError(
            f"the {what} has {len(ids)} tokens, but {count} windows of {seqlen} need {count * seqlen}: "
            "give a longer text, or ask for fewer or shorter windows"
        )
    return torch.tensor(ids[: len(ids) // seqlen * seqlen], dtype=torch.int64).view(-1, seqlen)


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in re.split(r"\n\s*\n", text.strip()) if paragraph.strip()]


def _divide(name: str, paragraphs: Iterable[str], note: str) -> Text:
    parts: tuple[list[str], list[str]] = ([], [])
    for paragraph in paragraphs:
        parts[hashlib.sha256(paragraph.encode()).digest()[0] & 1].append(paragraph)
    return Text(name, "\n\n".join(parts[0]), "\n\n".join(parts[1]), note)


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise ValueError(f"text {path} is not UTF-8 text: {error}") from error
