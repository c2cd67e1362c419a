"""Sampling follows transformers' truncation rules; generation stops, streams and refuses as it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gossamer.compress._decode import Decoder
from gossamer.compress._generate import generate
from gossamer.compress._sampling import distribution, sampler

END = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and one that ends the text."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters | {"<end>": END}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        eos_token_id=END,
    )
    built = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return built


class Scripted(Decoder):
    """A decoder whose logits are certain of one text after another."""

    def __init__(self, model: LlamaForCausalLM, script: list[int]) -> None:
        super().__init__(model, 128, threads=1)
        self._script = iter(script)

    def prefill(self, ids: object) -> np.ndarray:
        return self.step(0)

    def step(self, token: int) -> np.ndarray:
        logits = np.zeros(300, np.float32)
        logits[next(self._script)] = 9.0
        return logits


@given(
    logits=st.lists(st.integers(-60, 60), min_size=2, max_size=40, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.none() | st.sampled_from([0.05, 0.5, 0.9, 0.999]),
)
def test_the_distribution_equals_that_of_transformers_warpers(
    logits: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    scores = torch.tensor([logits], dtype=torch.float64) / 10
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    expected = scores
    for warper in warpers:
        expected = warper(None, expected)
    expected = expected.softmax(-1)[0].numpy()
    tokens, shares = distribution(scores[0].numpy(), temperature, top_k, top_p)
    ours = np.zeros(len(logits))
    ours[tokens] = shares
    np.testing.assert_allclose(ours, expected, atol=1e-12)
    assert np.all(np.diff(shares) <= 0)


def test_draws_follow_the_distribution() -> None:
    draw = sampler(temperature=1.0, seed=0)
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    counts = np.bincount([draw(logits) for _ in range(4000)], minlength=3)
    assert np.abs(counts / 4000 - [0.6, 0.3, 0.1]).max() < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
    ],
)
def test_sampling_arguments_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**options)


def test_greedy_generation_equals_transformers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    result = generate(model, tokenizer, "sparse", max_new_tokens=12)
    ids = tokenizer("sparse", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert result.token_ids == expected[0, ids.shape[1] :].tolist()
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.tokens_per_second > 0
    assert result.prefill_seconds > 0


def test_a_seed_repeats_a_sample_and_another_does_not(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    decoder = Decoder(model, 64, threads=1)
    one, again, other = (
        generate(decoder, tokenizer, "a", max_new_tokens=30, temperature=1.5, seed=seed).token_ids for seed in (1, 1, 2)
    )
    assert one == again != other


def test_generation_ends_with_the_end_token(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    script = [*tokenizer("done")["input_ids"], END, 5, 5]
    result = generate(Scripted(model, script), tokenizer, "x", max_new_tokens=20)
    assert result.text == "done"
    assert result.token_ids[-1] == END
    assert len(result.token_ids) == 5


def test_streamed_pieces_are_whole_characters_and_make_up_the_text(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    text, pieces = "naïve 🙂 日本", []
    script = [*tokenizer(text)["input_ids"], END]
    result = generate(Scripted(model, script), tokenizer, "x", max_new_tokens=60, on_text=pieces.append)
    assert result.text == "".join(pieces) == text
    assert len(pieces) == len(text)


def test_one_new_token_needs_no_step(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    result = generate(model, tokenizer, "x" * 128, max_new_tokens=1)
    assert len(result.token_ids) == 1
    assert result.tokens_per_second == 0.0


def test_what_cannot_be_generated_is_refused(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        generate(model, tokenizer, "")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        generate(model, tokenizer, "x", max_new_tokens=0)
    with pytest.raises(ValueError, match="the context has 128; shorten the prompt or lower max_new_tokens"):
        generate(model, tokenizer, "x" * 100, max_new_tokens=30)
    with pytest.raises(ValueError, match="the context has 16"):
        generate(Decoder(model, 16, threads=1), tokenizer, "x" * 10, max_new_tokens=30)
