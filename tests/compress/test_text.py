"""The default text and the user's own: divided without overlap, the same on every run."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from gossamer.compress import _text
from gossamer.compress._text import (
    Text,
    calibration_windows,
    default_text,
    evaluation_windows,
    python_documentation,
    read_text,
    wikitext2,
)


class LetterTokenizer:
    """One token per character."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def test_python_documentation_has_every_paragraph_once_in_one_of_its_halves() -> None:
    text = python_documentation()
    calibration, evaluation = paragraphs(text.calibration), paragraphs(text.evaluation)
    assert len(set(calibration)) == len(calibration)
    assert len(set(evaluation)) == len(evaluation)
    assert not set(calibration) & set(evaluation)
    everything = {part.strip() for topic in topics.values() for part in paragraphs(topic) if part.strip()}
    assert {part.strip() for part in calibration + evaluation} == everything
    assert 0.7 < len(text.calibration) / len(text.evaluation) < 1.4
    assert len(text.calibration) > 100_000
    assert "Python 3." in text.note


def test_the_default_text_is_the_same_every_time_and_needs_no_data(monkeypatch) -> None:
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    assert default_text() == python_documentation() == python_documentation()
    with pytest.raises(FileNotFoundError, match="needs GOSSAMER_DATA: text/wikitext2/valid"):
        wikitext2()


def test_wikitext2_in_the_data_folder_replaces_the_default(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    for name, content in zip(_text.WIKITEXT2, ("to calibrate", "to evaluate"), strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content.encode()))
    text = default_text()
    assert (text.name, text.calibration, text.evaluation) == ("wikitext-2", "to calibrate", "to evaluate")


@pytest.mark.parametrize("separator", ["\n\n", "\n", "\n \n"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_is_divided_by_paragraph_or_by_line(tmp_path: Path, separator: str, packed: bool) -> None:
    pieces = [f"Paragraph {number}." for number in range(200)]
    content = separator.join(pieces).encode()
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(content) if packed else content)
    text = read_text(path)
    calibration, evaluation = paragraphs(text.calibration), paragraphs(text.evaluation)
    assert sorted(calibration + evaluation) == sorted(pieces)
    assert 60 < len(calibration) < 140


def test_unreadable_and_short_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_text(path)
    path.write_text("one line only")
    with pytest.raises(ValueError, match="has 1 paragraphs, too few to divide"):
        read_text(path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "missing.txt")
    (tmp_path / "b.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_text(tmp_path / "b.gz")


def test_calibration_windows_are_spread_over_the_text_and_evaluation_windows_are_the_first() -> None:
    text = Text("t", "abcdefghijklmnopq", "abcdefg", "")
    letters = ["".join(map(chr, window)) for window in calibration_windows(text, LetterTokenizer(), 3, 3).tolist()]
    assert letters == ["abc", "ghi", "mno"]
    assert calibration_windows(text, LetterTokenizer(), 1, 3).shape == (1, 3)
    assert len({tuple(window) for window in calibration_windows(text, LetterTokenizer(), 5, 3).tolist()}) == 5
    letters = ["".join(map(chr, window)) for window in evaluation_windows(text, LetterTokenizer(), 3, 2).tolist()]
    assert letters == ["abc", "def"]


def test_too_short_a_text_says_how_many_tokens_are_needed() -> None:
    text = Text("t", "abcdefg", "uvwxyz", "")
    assert torch.equal(calibration_windows(text, LetterTokenizer(), 2, 3), torch.arange(97, 103).view(2, 3))
    assert torch.equal(evaluation_windows(text, LetterTokenizer(), 3, 2), torch.arange(117, 123).view(2, 3))
    with pytest.raises(ValueError, match="calibration part of t has 7 tokens, but 3 windows of 3 need 9"):
        calibration_windows(text, LetterTokenizer(), 3, 3)
    with pytest.raises(ValueError, match="evaluation part of t has 6 tokens, but 1 windows of 7 need 7"):
        evaluation_windows(text, LetterTokenizer(), 7, 1)
    with pytest.raises(ValueError, match="at least 1 window of 2 tokens, got 0 of 3"):
        calibration_windows(text, LetterTokenizer(), 0, 3)
