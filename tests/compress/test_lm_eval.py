"""Our models as lm-eval asks them, against likelihoods and tokens computed one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_lm_eval
import torch
from tiny_models import VOCABULARY, tiny_model

from gossamer.compress._choices import Choice, answer_by_likelihood
from gossamer.compress._likelihoods import score_continuations
from gossamer.compress._lm_eval import lm_eval_model

stand_in_lm_eval.install()

END = 1


class Letters:
    """A tokenizer of letters, printable tokens only."""

    eos_token_id = END
    name_or_path = "letters"

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + (ord(letter) - 32) % (VOCABULARY - 2) for letter in text]}

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(32 + token - 2) for token in ids)


@dataclass
class Request:
    args: tuple[Any, ...]


def harness(family: str = "llama", **options: Any) -> Any:
    from gossamer.compress._lm_eval_model import GossamerLM

    return GossamerLM(SimpleNamespace(model=tiny_model(family), tokenizer=Letters()), **options)


def slowly(model: torch.nn.Module, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    ids, total, greedy = list(context), 0.0, True
    for token in continuation:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        total += float(torch.log_softmax(logits, -1)[token])
        greedy &= int(logits.argmax()) == token
        ids.append(token)
    return total, greedy


@torch.no_grad()
def greedily(model: torch.nn.Module, context: Sequence[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_continuations_of_all_lengths_score_as_token_by_token(family: str) -> None:
    model = tiny_model(family)
    contexts = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8, 9], [11, 12]]
    pairs = [(context, [20 + len(context), 30, 31][: 1 + place % 3]) for place, context in enumerate(contexts)]
    pairs.append((contexts[0], greedily(model, contexts[0], 3)))
    found = score_continuations(model, pairs, 2, 16)
    for pair, (value, greedy) in zip(pairs, found, strict=True):
        expected, likeliest = slowly(model, *pair)
        assert value == pytest.approx(expected, abs=2e-4)
        assert greedy == likeliest
    assert found[-1][1]


@torch.no_grad()
def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    model = tiny_model("llama")
    context, continuation = list(range(2, 40)), [50, 51]
    (found,) = score_continuations(model, [(context, continuation)], 1, 8)
    assert found[0] == pytest.approx(slowly(model, context[-7:], continuation)[0], abs=2e-4)
    with pytest.raises(ValueError, match="at most 1 tokens"):
        score_continuations(model, [(context, continuation)], 1, 1)
    with pytest.raises(ValueError, match="got 0 and 2"):
        score_continuations(model, [([], continuation)], 1, 8)


@torch.no_grad()
def test_likelihoods_are_those_of_the_choices_and_an_empty_context_is_the_end_token() -> None:
    lm = harness(batch_size=2)
    choice = Choice("abc", ("d", "efg", "hi"), 1)
    requests = [Request((f"Question: {choice.question}\nAnswer:", f" {answer}")) for answer in choice.answers]
    found = lm.loglikelihood(requests)
    for request, (value, _) in zip(requests, found, strict=True):
        context, continuation = (Letters()(text)["input_ids"] for text in request.args)
        assert value == pytest.approx(slowly(lm.model, context, continuation)[0], abs=5e-4)
    best = max(range(3), key=lambda place: found[place][0])
    assert answer_by_likelihood(lm.model, [choice], Letters()).accuracy == float(best == choice.right)
    ((value, _),) = lm.loglikelihood([Request(("", "xy"))])
    assert value == pytest.approx(slowly(lm.model, [END], Letters()("xy")["input_ids"])[0], abs=5e-4)


@torch.no_grad()
def test_a_rolling_likelihood_predicts_every_token_once_from_as_much_as_fits() -> None:
    lm = harness(max_length=6)
    text = "abcdefghijklmnop"
    ids = [END, *Letters()(text)["input_ids"]]
    expected, done = 0.0, 0
    while done < len(text):
        end = min(done + 6, len(text))
        for place in range(done, end):
            expected += slowly(lm.model, ids[max(end - 6, 0) : place + 1], ids[place + 1 : place + 2])[0]
        done = end
    assert lm.loglikelihood_rolling([Request((text,))]) == [pytest.approx(expected, abs=1e-3)]


def test_generation_ends_at_a_stop_the_end_token_or_the_limit() -> None:
    lm = harness()
    context = "hello"
    tokens = greedily(lm.model, Letters()(context)["input_ids"], 12)
    before_end = tokens[: tokens.index(END)] if END in tokens else tokens
    whole = Letters().decode(before_end)
    stop = whole[3:5]
    options = [{"max_gen_toks": 12, "until": []}, {"max_gen_toks": 12, "until": [stop]}, {"max_gen_toks": 3}]
    found = lm.generate_until([Request((context, own)) for own in options])
    assert found == [whole, whole[: whole.index(stop)], whole[:3]]


def test_bad_options_are_refused() -> None:
    for options, message in (({"batch_size": 0}, "batch_size"), ({"max_length": 1000}, "max_length")):
        with pytest.raises(ValueError, match=message):
            harness(**options)
    with pytest.raises(ValueError, match="max_gen_toks"):
        harness(max_length=8).generate_until([Request(("a", {"max_gen_toks": 8}))])
    with pytest.raises(ValueError, match="no model"):
        lm_eval_model("no-such-folder")
