"""Multiple choice by likelihood: which of the given answers does a model find likeliest?

Two accuracies are told, and they must never be compared with each other: ``accuracy`` takes the answer with the largest
log-likelihood, ``accuracy_norm`` the one with the largest log-likelihood per byte, which does not favour short answers.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gossamer.compress._likelihoods import score_continuations

_OPTION = re.compile(r"(?:Answer|Option|Solution|Ending)(\d+): ")
_QUESTION = re.compile(r"^Please [^:]*?(?:question|sentence|statement)?:\s*", re.DOTALL)


@dataclass(frozen=True)
class Choice:
    """A question, its possible answers, and the number of the right one from 0."""

    question: str
    answers: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers, see this module, and by chance; ``count`` questions."""

    accuracy: float
    accuracy_norm: float
    chance: float
    count: int


def read_choices(path: str | os.PathLike[str], limit: int | None = None) -> list[Choice]:
    """Questions of a JSON list (``.gz`` allowed).

    Every object has ``question``, ``answers`` and ``right``; or ``instruction`` and ``answer`` as the commonsense sets of
    LLM-Adapters have them (Hu et al., EMNLP 2023): ARC, BoolQ, OpenBookQA, PIQA, SIQA, WinoGrande.

    Raises:
        ValueError: the file is not JSON, holds no questions, or one cannot be read.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "q.json"
    >>> _ = path.write_text('[{"question": "2 + 2 is", "answers": ["3", "4"], "right": 1}]')
    >>> read_choices(path)
    [Choice(question='2 + 2 is', answers=('3', '4'), right=1)]
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        objects = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(objects, list) or not objects:
        raise ValueError(f"{path} holds no list of questions")
    return [_choice(value, path) for value in objects[:limit]]


def _choice(value: Any, path: Path) -> Choice:
    if isinstance(value, dict) and {"question", "answers", "right"} <= value.keys():
        choice = Choice(value["question"], tuple(value["answers"]), value["right"])
    elif isinstance(value, dict) and {"instruction", "answer"} <= value.keys():
        choice = _instruction(value["instruction"], value["answer"])
    else:
        raise ValueError(f"every question of {path} needs question, answers and right, got {str(value)[:80]}")
    if len(choice.answers) < 2 or not 0 <= choice.right < len(choice.answers):
        raise ValueError(
            f"a question of {path} has no right answer among its {len(choice.answers)}: {choice.question[:80]}"
        )
    return choice


def _instruction(text: str, answer: str) -> Choice:
    body = text.partition("\n\nAnswer format:")[0]
    question = _QUESTION.sub("", body)
    parts = _OPTION.split(body)
    if len(parts) == 1:  # yes or no
        question = body.partition("question: ")[2] or question
        return Choice(question.strip(), ("true", "false"), ("true", "false").index(answer))
    question = _QUESTION.sub("", parts[0])
    return Choice(question.strip(), tuple(part.strip() for part in parts[2::2]), int(re.sub(r"\D", "", answer)) - 1)


def answer_by_likelihood(
    model: nn.Module, choices: Sequence[Choice], tokenizer: Any, batch: int = 8, most_tokens: int = 512,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Accuracy:  # fmt: skip
    """Accuracy of ``model`` on ``choices``; each answer follows its question as ``Question: ... Answer: ...``.

    Raises:
        ValueError: ``choices`` is empty, or an answer is longer than ``most_tokens``.
    """
    if not choices:
        raise ValueError("choices must not be empty")
    model.eval()
    right, right_norm = 0, 0
    for index, choice in enumerate(choices):
        question = _ids(tokenizer, f"Question: {choice.question}\nAnswer:")
        pairs = [(question, _ids(tokenizer, f" {answer}")) for answer in choice.answers]
        found = [value for value, _ in score_continuations(model, pairs, batch, most_tokens)]
        sizes = [max(len(answer.encode()), 1) for answer in choice.answers]
        per_byte = [value / size for value, size in zip(found, sizes, strict=True)]
        right += found.index(max(found)) == choice.right
        right_norm += per_byte.index(max(per_byte)) == choice.right
        progress(index + 1, len(choices))
    chance = sum(1 / len(choice.answers) for choice in choices) / len(choices)
    return Accuracy(right / len(choices), right_norm / len(choices), chance, len(choices))


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
