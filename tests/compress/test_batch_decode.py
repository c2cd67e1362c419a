"""Decoding several sequences at once computes what transformers computes, on a CPU in torch and on a GPU by kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from gossamer.compress import BatchDecoder, Decoder, Joint, LlamaBlock, LlamaWeights, plain_rotary
from gossamer.compress import _llama_step as step
from gossamer.compress._llama_weights import joined
from gossamer.weights import CompressedLinear, FragmentBitmapWeight, FragmentLosslessWeight, NMWeight

VOCABULARY = 130
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama with one key head, biases and a tied head": LlamaConfig(
        **SIZES | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES | {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
}
IDS = torch.randint(0, VOCABULARY, (3, 21), generator=torch.Generator().manual_seed(3))
FORMATS: dict[str, Any] = {
    "bitmap": FragmentBitmapWeight.from_dense,
    "lossless": FragmentLosslessWeight.from_dense,
    "4:8": lambda weight: NMWeight.from_dense(weight, "4:8"),
}


def random_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Weights large enough that every block matters; norms and biases that are not trivial."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
            parameter.data = parameter.data.to(dtype)
    return model


def forward_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids.to(model.device)).logits.float().cpu()


def compressed(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model with the layers of its blocks in a format, and the very same weights where that is lossy."""
    for block in model.model.layers:
        for parent in (block.self_attn, block.mlp):
            for child, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    weight = FORMATS[name](layer.weight.data)
                    setattr(parent, child, CompressedLinear(weight, layer.bias))
    return model


def dense_copy(name: str, like: PreTrainedModel) -> PreTrainedModel:
    """A float32 model with the weights of ``like``."""
    copy = random_model(name)
    copy.load_state_dict(like.state_dict(), strict=False)
    for block, theirs in zip(copy.model.layers, like.model.layers, strict=True):
        for parent, other in ((block.self_attn, theirs.self_attn), (block.mlp, theirs.mlp)):
            for child, layer in parent.named_children():
                if isinstance(layer, nn.Linear):
                    layer.weight.data.copy_(getattr(other, child).weight.detach())
    return copy


def relative_error(y: Tensor, expected: Tensor) -> float:
    return float((y.double().cpu() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_and_steps_equal_the_models_forward(name: str) -> None:
    model = random_model(name)
    expected = forward_logits(model, IDS)
    decoder = BatchDecoder(model, 3, 32)
    assert not decoder.captured
    logits = [decoder.prefill(IDS[:, :15]), *(decoder.step(IDS[:, place]) for place in range(15, 21))]
    torch.testing.assert_close(torch.stack(logits, 1), expected[:, 14:], atol=2e-4, rtol=0)
    torch.testing.assert_close(forward_logits(model, IDS), expected)  # its layers, now views, are what they were


@pytest.mark.parametrize("name", FORMATS)
def test_compressed_layers_decode_like_dense_ones(name: str) -> None:
    model = compressed(random_model("qwen2", torch.bfloat16), name)
    expected = forward_logits(dense_copy("qwen2", model), IDS)
    decoder = BatchDecoder(model, 3, 32)
    logits = [decoder.prefill(IDS[:, :15]), *(decoder.step(IDS[:, place]) for place in range(15, 21))]
    assert relative_error(torch.stack(logits, 1), expected[:, 14:]) < 0.02


def test_generate_gives_the_tokens_of_transformers_and_rewinding_gives_them_again() -> None:
    model = random_model("llama")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(IDS[:, :9], attention_mask=torch.ones(3, 9), **options)[:, 9:]
    decoder = BatchDecoder(model, 3, 20)
    decoder.prefill(IDS[:, :9])
    assert torch.equal(decoder.generate(12), expected)
    assert decoder.position == 20
    decoder.rewind(13)
    assert torch.equal(decoder.generate(8), expected[:, 4:])


def test_joined_layers_share_their_memory_with_the_joint_matrix() -> None:
    layers = [nn.Linear(64, 32), nn.Linear(64, 16, bias=False)]
    before = [layer.weight.detach().clone() for layer in layers]
    joint = joined(layers)
    assert torch.equal(joint.parts[0], torch.cat(before))
    assert joint.bias is not None and torch.equal(joint.bias, torch.cat([layers[0].bias, torch.zeros(16)]))
    assert layers[1].weight.untyped_storage().data_ptr() == joint.parts[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [FragmentBitmapWeight, FragmentLosslessWeight])
def test_joined_fragments_are_one_weight_where_their_rows_allow_it(kind: Any) -> None:
    weights = [torch.randn(rows, 200).bfloat16() for rows in (32, 48, 17)]
    weights[1][:, ::30] = 0
    weights[2] *= 0.01  # other exponents: the lossless weights are encoded anew
    layers = [CompressedLinear(kind.from_dense(weight)) for weight in weights]
    joint = joined(layers)
    assert len(joint.parts) == 1
    assert torch.equal(joint.parts[0].to_dense(), torch.cat(weights))
    for layer, weight in zip(layers, weights, strict=True):
        assert torch.equal(layer.weight, weight)
        assert layer.records.untyped_storage().data_ptr() == joint.parts[0].records.untyped_storage().data_ptr()
    apart = joined([CompressedLinear(kind.from_dense(weight)) for weight in reversed(weights)])
    assert len(apart.parts) == 3
    x = torch.randn(2, 200)
    torch.testing.assert_close(apart(x), F.linear(x, torch.cat(weights[::-1]).float()), atol=1e-4, rtol=1e-3)


def test_bad_arguments_are_refused_by_name() -> None:
    model = random_model("llama")
    with pytest.raises(ValueError, match="batch and max_length must be positive, got 0 and 5"):
        BatchDecoder(model, 0, 5)
    decoder = BatchDecoder(model, 2, 5)
    with pytest.raises(ValueError, match="generate needs a prompt"):
        decoder.generate(1)
    with pytest.raises(ValueError, match=r"ids must be \(2, n\) with n from 1 to max_length = 5, got \(2, 6\)"):
        decoder.prefill(IDS[:2, :6])
    with pytest.raises(ValueError, match="tokens must be 0 to 129, got 0 to 130"):
        decoder.prefill(torch.tensor([[0, 130], [1, 1]]))
    decoder.prefill(IDS[:2, :4])
    with pytest.raises(ValueError, match=r"tokens must have shape \(2,\), got \(1,\)"):
        decoder.step(IDS[:1, 0])
    with pytest.raises(ValueError, match="position must be 0 to 4, got 5"):
        decoder.rewind(5)
    decoder.step(IDS[:2, 4])
    with pytest.raises(ValueError, match="context of 5 tokens is full"):
        decoder.step(IDS[:2, 5])
    with pytest.raises(ValueError, match="model must be one of llama, mistral, qwen2, qwen3"):
        BatchDecoder(AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, hidden_act="gelu")), 1, 5)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_kernels_compile(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the CUDA compiler")
    from gossamer.core.nvrtc import compile_cubin

    attention = {"THREADS": 256, "HEAD": 128, "GROUP": 4, "NORMS": int(arch == "sm_90")}
    for macros in ({**step.norm_macros(4100), "GATE": 1}, attention):
        assert compile_cubin(step.source(), arch, {**macros, "BFLOAT16": int(arch != "sm_80")})


TYPES = [torch.float16, torch.bfloat16]


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny matrices would be measured for longer than they are tested; any plan multiplies right."""
    from gossamer.weights import _fragments_gpu, _nm_gpu

    monkeypatch.setattr(_fragments_gpu, "best_plan", lambda weight, n: _fragments_gpu.candidates(weight, n)[0])
    monkeypatch.setattr(_nm_gpu, "fastest_plan", lambda table, key, plans, calls: plans[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_steps_equal_the_models_forward(name: str, dtype: torch.dtype) -> None:
    model = random_model(name, dtype)
    expected = forward_logits(dense_copy(name, model), IDS)
    decoder = BatchDecoder(model.cuda(), 3, 1200)  # long enough for two shares
    assert decoder.captured
    logits = [decoder.step(IDS[:, place].cuda()).clone() for place in range(21)]
    error = 0.02 if dtype == torch.bfloat16 else 0.004
    assert relative_error(torch.stack(logits, 1), expected) < error
    logits = [decoder.prefill(IDS[:, :15]), *(decoder.step(IDS[:, place].cuda()).clone() for place in range(15, 21))]
    assert relative_error(torch.stack(logits, 1), expected[:, 14:]) < error


@pytest.mark.gpu
@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("batch", [1, 32])
def test_captured_steps_with_compressed_layers_equal_dense_ones(name: str, batch: int) -> None:
    model = compressed(random_model("llama", torch.bfloat16).cuda(), name)
    ids = torch.randint(0, VOCABULARY, (batch, 12), generator=torch.Generator().manual_seed(5))
    expected = forward_logits(dense_copy("llama", model), ids)
    decoder = BatchDecoder(model, batch, 64)
    logits = [decoder.prefill(ids[:, :7]).clone()]
    logits += [decoder.step(ids[:, place].cuda()).clone() for place in range(7, 12)]
    assert relative_error(torch.stack(logits, 1), expected[:, 6:]) < 0.03


def parts(length_of_norm: int = 256) -> LlamaWeights:
    """A model that transformers never saw, deep in its cache by the time it is tested."""
    generator = torch.Generator("cuda").manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device="cuda", generator=generator) / columns**0.5).bfloat16()

    def norm() -> Tensor:
        return torch.ones(length_of_norm, device="cuda", dtype=torch.bfloat16)

    blocks = [
        LlamaBlock(
            norm(), Joint((matrix(6 * 64, length_of_norm),)), Joint((matrix(length_of_norm, 4 * 64),)), norm(),
            Joint((matrix(512, length_of_norm),)), Joint((matrix(length_of_norm, 256),)),
        )
        for _ in range(2)
    ]  # fmt: skip
    head = Joint((matrix(VOCABULARY, length_of_norm),))
    return LlamaWeights(
        4, 1, 64, 1e-5, 0.125, matrix(VOCABULARY, length_of_norm), blocks, norm(), head, plain_rotary(64, 1e4, "cuda")
    )


@pytest.mark.gpu
def test_captured_generation_equals_steps_in_torch_and_rewinds() -> None:
    """Far enough for several shares of the cache; the torch path is the prompt's."""
    weights = parts()
    ids = torch.randint(0, VOCABULARY, (2, 2100), generator=torch.Generator().manual_seed(5))
    decoder = BatchDecoder(weights, 2, 2200)
    whole = decoder.prefill(ids).clone()
    decoder.prefill(ids[:, :-1])
    assert relative_error(decoder.step(ids[:, -1].cuda()), whole.cpu()) < 0.03
    first = decoder.generate(40)
    decoder.rewind(2110)
    assert torch.equal(decoder.generate(30), first[:, 10:])


@pytest.mark.gpu
def test_decoder_runs_on_a_gpu() -> None:
    model = random_model("llama", torch.bfloat16)
    expected = forward_logits(dense_copy("llama", model), IDS[:1])[0, -1]
    decoder = Decoder(model.cuda(), 64)
    assert decoder.own_loop
    logits = decoder.prefill(IDS[0])
    assert relative_error(torch.from_numpy(logits), expected) < 0.03
    assert decoder.profile(3)["step"] > 0
    following = decoder.step(5)
    decoder.prefill(IDS[0])
    assert torch.equal(torch.from_numpy(decoder.step(5)), torch.from_numpy(following))
