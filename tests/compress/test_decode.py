"""The decode loop computes what transformers computes, for every family and kind of layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numba import njit
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gossamer.compress import _decode_kernels as kernels
from gossamer.compress._decode import Decoder
from gossamer.weights import BitmapWeight, CompressedLinear, LosslessWeight

VOCABULARY = 131
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
OWN_LOOP = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases, tied head, llama3 rope, head size 22": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=22, rope_parameters=LLAMA3_ROPE
    ),
    "llama with yarn, every head its own keys": LlamaConfig(**SIZES | {"num_key_value_heads": 4}, rope_parameters=YARN),
    "llama with one key head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=7),
    "mistral without a window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 with a window in some layers": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=10),
}
OWN_FORWARD = {
    "llama with dynamic rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama with gelu": LlamaConfig(**SIZES, hidden_act="gelu"),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=12, sliding_window=8),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_head=4, n_layer=2, n_positions=512, bos_token_id=1, eos_token_id=1
    ),
    "opt": OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=48,
    ),
}
IDS = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(3))


def random_model(config: object) -> PreTrainedModel:
    """Weights large enough that every block matters; norms and biases that are not trivial."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    return model


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """As a checkpoint in bfloat16 is loaded: the parameters, but not the rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def forward_logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> np.ndarray:
    with torch.no_grad():
        return model(ids[None]).logits[0].float().numpy()


def stepped(decoder: Decoder, ids: torch.Tensor = IDS) -> np.ndarray:
    return np.stack([decoder.step(int(token)) for token in ids])


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """These models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*OWN_LOOP, *OWN_FORWARD])
def test_steps_equal_the_models_forward(name: str) -> None:
    model = random_model((OWN_LOOP | OWN_FORWARD)[name])
    decoder = Decoder(model, 64, threads=1)
    assert decoder.own_loop == (name in OWN_LOOP)
    np.testing.assert_allclose(stepped(decoder), forward_logits(model), atol=1e-4)


@pytest.mark.parametrize("name", [*OWN_LOOP, *OWN_FORWARD])
@pytest.mark.parametrize("prompt", [5, 17])
def test_a_prompt_at_once_equals_the_prompt_in_steps(name: str, prompt: int) -> None:
    model = random_model((OWN_LOOP | OWN_FORWARD)[name])
    decoder = Decoder(model, 64, threads=1)
    decoder.step(5)
    logits = [decoder.prefill(IDS[:prompt]), *stepped(decoder, IDS[prompt:])]
    np.testing.assert_allclose(np.stack(logits), forward_logits(model)[prompt - 1 :], atol=1e-4)
    assert decoder.position == len(IDS)


@pytest.mark.parametrize("name", ["llama", "mistral with a window", "qwen2", "qwen3", "gpt2", "opt"])
def test_greedy_tokens_equal_transformers_generate(name: str) -> None:
    model = random_model((OWN_LOOP | OWN_FORWARD)[name])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(IDS[None, :9], attention_mask=torch.ones(1, 9), **options)[0, 9:].tolist()
    decoder = Decoder(model, 64, threads=1)
    tokens = [int(decoder.prefill(IDS[:9]).argmax())]
    while len(tokens) < 20:
        tokens.append(int(decoder.step(tokens[-1]).argmax()))
    assert tokens == expected


def test_torch_products_give_the_same_logits_to_their_precision() -> None:
    model = random_model(OWN_LOOP["qwen2"])
    exact = forward_logits(model)
    np.testing.assert_allclose(stepped(Decoder(model, 64, dense="torch-fp32")), exact, atol=1e-4)
    coarse = stepped(Decoder(model, 64, dense="torch-bf16"))
    assert 1e-4 < np.abs(coarse - exact).max() < 0.05 * np.abs(exact).max()


def test_bfloat16_weights_meet_float32_activations() -> None:
    """The oracle is the same weights widened to float32, not transformers' forward in bfloat16."""
    model = rounded(random_model(OWN_LOOP["llama with biases, tied head, llama3 rope, head size 22"]))
    logits = [Decoder(model, 64, threads=1).prefill(IDS), stepped(Decoder(model, 64, threads=1))[-1]]
    widened = forward_logits(model.float())[-1]
    for each in logits:
        np.testing.assert_allclose(each, widened, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_are_used_where_they_are(dtype: torch.dtype) -> None:
    model = random_model(OWN_LOOP["llama"]).to(dtype)
    decoder = Decoder(model, 8, threads=1)
    before = decoder.prefill([1])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
    assert np.abs(decoder.prefill([1]) - before).max() > 1e-3


@pytest.mark.parametrize("weight", [BitmapWeight, LosslessWeight])
@pytest.mark.parametrize("name", ["qwen2", "llama with biases, tied head, llama3 rope, head size 22"])
def test_compressed_layers_decode_like_the_dense_ones(name: str, weight: type) -> None:
    model = rounded(random_model(OWN_LOOP[name]))
    expected = stepped(Decoder(model, 64, threads=1))
    for block in model.model.layers:
        for parent, child, layer in [
            (module, child, layer)
            for module in block.modules()
            for child, layer in module.named_children()
            if isinstance(layer, nn.Linear)
        ]:
            bias = None if layer.bias is None else layer.bias.data
            setattr(parent, child, CompressedLinear(weight.from_dense(layer.weight.data), bias))
    decoder = Decoder(model, 64, threads=1)
    assert decoder.own_loop
    np.testing.assert_allclose(stepped(decoder), expected, atol=1e-4)
    np.testing.assert_allclose(decoder.prefill(IDS), expected[-1], atol=1e-4)


def test_two_threads_agree_with_one_beyond_the_length_where_attention_splits() -> None:
    model = random_model(OWN_LOOP["llama"])
    ids = torch.randint(0, VOCABULARY, (300,), generator=torch.Generator().manual_seed(4))
    one, two = (Decoder(model, 300, threads=threads) for threads in (1, 2))
    for decoder in (one, two):
        decoder.prefill(ids[:250])
    np.testing.assert_allclose(stepped(two, ids[250:]), stepped(one, ids[250:]), atol=1e-5)


def test_logits_of_a_step_survive_the_next_one() -> None:
    decoder = Decoder(random_model(OWN_LOOP["llama"]), 8, threads=1)
    first = decoder.step(3)
    kept = first.copy()
    decoder.step(4)
    np.testing.assert_array_equal(first, kept)
    assert first.dtype == np.float32
    assert first.shape == (VOCABULARY,)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reset_forgets_the_sequence(name: str) -> None:
    decoder = Decoder(random_model((OWN_LOOP | OWN_FORWARD)[name]), 64, threads=1)
    first = stepped(decoder)
    decoder.reset()
    np.testing.assert_array_equal(stepped(decoder), first)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_full_context_is_refused_with_its_remedy(name: str) -> None:
    decoder = Decoder(random_model((OWN_LOOP | OWN_FORWARD)[name]), 3, threads=1)
    decoder.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="context of 3 tokens is full; make a Decoder with a larger max_length"):
        decoder.step(4)
    with pytest.raises(ValueError, match="one free position"):
        decoder.profile()
    with pytest.raises(ValueError, match="1 to max_length = 3 tokens, got 4; shorten it"):
        decoder.prefill([1, 2, 3, 4])


def test_bad_arguments_are_refused_by_name() -> None:
    model = random_model(OWN_LOOP["llama"])
    with pytest.raises(ValueError, match="max_length must be 1 to 512"):
        Decoder(model, 513)
    with pytest.raises(ValueError, match="max_length must be 1 to 512"):
        Decoder(model, 0)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        Decoder(model, 8, threads=0)
    with pytest.raises(ValueError, match="dense must be one of gossamer, torch-bf16, torch-fp32"):
        Decoder(model, 8, dense="fast")  # type: ignore[arg-type]
    decoder = Decoder(model, 8, threads=1)
    with pytest.raises(ValueError, match="got 0"):
        decoder.prefill([])
    with pytest.raises(ValueError, match="token 131 is outside the vocabulary of 131"):
        decoder.step(131)
    with pytest.raises(ValueError, match="token -1 is outside"):
        decoder.prefill([0, -1, 5])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_profiling_leaves_the_sequence_as_it_was(name: str) -> None:
    model = random_model((OWN_LOOP | OWN_FORWARD)[name])
    decoder = Decoder(model, 64, threads=1)
    decoder.prefill(IDS[:10])
    parts = decoder.profile(3)
    assert parts["step"] > 0
    if decoder.own_loop:
        assert set(parts) == {"linears", "attention", "norms", "activations", "head", "loop", "step"}
    assert decoder.position == 10
    np.testing.assert_allclose(stepped(decoder, IDS[10:]), forward_logits(model)[10:], atol=1e-4)


def test_the_exponential_is_accurate_over_its_range() -> None:
    @njit(fastmath=kernels.REORDER, error_model="numpy")
    def exponentials(x, out):
        for i in range(x.size):
            out[i] = kernels.exp32(x[i])

    x = np.concatenate([np.linspace(-87, 88, 100_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    out = np.empty_like(x)
    exponentials(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=6e-7)
    exponentials(np.array([-np.inf, -1000, 1000], np.float32), out[:3])
    np.testing.assert_allclose(out[:3], np.exp([-87.0, -87.0, 88.0]), rtol=6e-7)


@pytest.mark.slow
def test_smollm2_in_bfloat16_continues_like_transformers_in_float32() -> None:
    from gossamer.compress._models import load_dense

    dense = load_dense("smollm2-135m", dtype=torch.bfloat16)
    ids = dense.tokenizer("The capital of France is a city on the river")["input_ids"]
    decoder = Decoder(dense.model, 64, threads=1)
    tokens = [int(decoder.prefill(ids).argmax())]
    while len(tokens) < 48:
        tokens.append(int(decoder.step(tokens[-1]).argmax()))
    reference = dense.model.float()
    options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = reference.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
    assert sum(a == b for a, b in zip(tokens, expected[0, len(ids) :].tolist(), strict=True)) >= 40
