"""Multiple choice by likelihood, against likelihoods computed one token at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_finetune import Letters
from tiny_models import tiny_model

from gossamer.compress._choices import Choice, answer_by_likelihood, read_choices


def slow_likelihood(model: torch.nn.Module, question: str, answer: str) -> float:
    letters = Letters()
    prompt = letters(f"Question: {question}\nAnswer:")["input_ids"]
    ids, total = list(prompt), 0.0
    for token in letters(f" {answer}")["input_ids"]:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        total += float(torch.log_softmax(logits, -1)[token])
        ids.append(token)
    return total


def test_answers_are_those_of_the_largest_likelihood() -> None:
    model = tiny_model("llama")
    choices = [
        Choice("abc", ("d", "efg", "hi"), 1),
        Choice("q", ("yes", "no"), 0),
        Choice("why", ("because", "a", "bb", "ccc"), 3),
    ]
    right, norm = 0, 0
    with torch.no_grad():
        for choice in choices:
            found = [slow_likelihood(model, choice.question, answer) for answer in choice.answers]
            right += max(range(len(found)), key=found.__getitem__) == choice.right
            per_byte = [value / len(answer) for value, answer in zip(found, choice.answers, strict=True)]
            norm += max(range(len(found)), key=per_byte.__getitem__) == choice.right
    result = answer_by_likelihood(model, choices, Letters(), batch=2)
    assert (result.accuracy, result.accuracy_norm) == (right / 3, norm / 3)
    assert result.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4) / 3)


def test_the_sets_of_llm_adapters_are_read(tmp_path: Path) -> None:
    objects = [
        {
            "instruction": "Please choose the correct answer to the question: What falls?\n\nAnswer1: rain "
            "Answer2: the sky Answer3: up\n\nAnswer format: answer1/answer2/answer3",
            "answer": "answer2",
        },
        {
            "instruction": "Please answer the following question with true or false, question: is it so?\n\nAnswer format: "
            "true/false",
            "answer": "false",
        },
    ]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(objects))
    assert read_choices(path) == [
        Choice("What falls?", ("rain", "the sky", "up"), 1),
        Choice("is it so?", ("true", "false"), 1),
    ]
    assert len(read_choices(path, limit=1)) == 1


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "answers"), [("ARC-Challenge_test", 4), ("boolq_test", 2), ("openbookqa_test", 4), ("social_i_qa_test", 3)]
)
def test_every_question_of_the_real_sets_has_its_answers(data_file, name: str, answers: int) -> None:
    choices = read_choices(data_file(f"text/commonsense/{name}.json"))
    assert len(choices) > 400
    usual = sum(len(choice.answers) == answers for choice in choices)
    assert usual > 0.98 * len(choices)
    assert not any("Answer1" in choice.question or not choice.question for choice in choices)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.json"
    for text, message in (
        ("{", "not JSON"),
        ("[]", "no list"),
        ('[{"a": 1}]', "needs question, answers and right"),
        ('[{"question": "q", "answers": ["a", "b"], "right": 2}]', "no right answer"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_choices(path)
    with pytest.raises(ValueError, match="must not be empty"):
        answer_by_likelihood(tiny_model("llama"), [], Letters())
