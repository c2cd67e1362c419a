"""Decoding whole models: half of SmolLM2's weights pruned and stored as bitmaps, against dense decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache, partial

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gossamer.compress import Decoder, dense_weight, iter_blocks, linears, load_dense
from gossamer.compress._pages import gather_weights
from gossamer.core.measure import Bench, Row, claim, geometric_mean
from gossamer.weights import BitmapWeight, CompressedLinear, WeightFormat

PROMPT = "The bitmap of a sparse matrix says for every entry whether it is"
TOKENS = 64
GENERATED = 32
SOURCES = [
    "compress/_decode*.py",
    "compress/_pages.py",
    "weights/_bitmap.py",
    "weights/_bitmap_[!f]*.py",
    "weights/_dense*.py",
    "core/jit.py",
]


@claim(
    "cpu-decode-dense",
    text="SmolLM2-135M at 50 % sparsity as bitmaps against dense bfloat16 and float32, same decode loop, one thread",
    system=["SpInfer"],
    peer="the fastest of torch bf16, torch fp32 and our own dense bf16 kernel in the same loop",
    peer_package="torch",
    unit="ratio",
    bar=1.1,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def decode_dense(bench: Bench) -> Iterator[Row]:
    """Time per chunk of a 64-token greedy continuation; every round compares the same tokens' worth of work."""
    dense, prompt = smollm2()
    yield compare_loops(bench, "SmolLM2-135M", dense, prompt, chunk=8, counted=True)
    with bench.threads(2):
        yield compare_loops(bench, "SmolLM2-135M, two threads", dense, prompt, chunk=8, threads=2)
    wide = random_llama()
    yield compare_loops(bench, "random LLaMA, hidden 2048, 8 blocks", wide, prompt, chunk=2)
    with bench.threads(2):
        yield compare_loops(bench, "random LLaMA, two threads", wide, prompt, chunk=2, threads=2)


@claim(
    "cpu-decode-transformers",
    text="SmolLM2-135M at 50 % sparsity as bitmaps against transformers' generate of the dense model, one thread",
    system=["SpInfer"],
    peer="transformers generate, the faster of bf16 and fp32",
    peer_package="transformers",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def decode_transformers(bench: Bench) -> Iterator[Row]:
    """Prompt and 32 greedy tokens, all in all."""
    dense, prompt = smollm2()
    half = with_blocks(dense, half_bitmap)
    exact = deepcopy(dense).float()
    for threads, counted in ((1, True), (2, False)):
        with bench.threads(threads):
            peers = {
                "transformers bf16": partial(generate_by_transformers, dense, prompt),
                "transformers fp32": partial(generate_by_transformers, exact, prompt),
            }
            suffix = "" if threads == 1 else ", two threads"
            ours = partial(generate_by_decoder, Decoder(half, 128, threads), prompt)
            yield bench.compare(f"SmolLM2-135M{suffix}", ours, peers, counted=counted)
            if threads == 1:
                plain = partial(generate_by_decoder, Decoder(dense, 128, threads), prompt)
                yield bench.compare("our loop, dense bf16", plain, peers, counted=False)


def compare_loops(
    bench: Bench, case: str, dense: PreTrainedModel, prompt: Tensor, chunk: int, threads: int = 1, counted: bool = False
) -> Row:
    """One row: the bitmap model against every dense variant, all of them in large pages."""
    half = Decoder(with_blocks(dense, half_bitmap), TOKENS, threads)
    decoders = {
        "our dense bf16": Decoder(dense, TOKENS, threads),
        "torch bf16": Decoder(dense, TOKENS, threads, dense="torch-bf16"),
        "torch fp32": Decoder(dense, TOKENS, threads, dense="torch-fp32"),
    }
    peers = {name: Continuation(decoder, prompt, chunk) for name, decoder in decoders.items()}
    return bench.compare(case, Continuation(half, prompt, chunk), peers, counted=counted, note=where_time_goes(half))


def where_time_goes(decoder: Decoder) -> str:
    """The parts of a step in the middle of the text, in ms."""
    decoder.prefill(torch.arange(TOKENS // 2))
    parts = decoder.profile()
    return f"{1 / parts['step']:.1f} tokens/s; ms: " + ", ".join(
        f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items()
    )


class Continuation:
    """A greedy continuation of ``TOKENS`` tokens, prompt included, decoded over and over."""

    def __init__(self, decoder: Decoder, prompt: Tensor, chunk: int) -> None:
        self._decoder, self._prompt, self._chunk = decoder, prompt.tolist(), chunk
        self._token = 0
        decoder.reset()

    def __call__(self) -> None:
        """Decode the next ``chunk`` tokens."""
        for _ in range(self._chunk):
            if self._decoder.position == TOKENS:
                self._decoder.reset()
            position = self._decoder.position
            token = self._prompt[position] if position < len(self._prompt) else self._token
            self._token = int(self._decoder.step(token).argmax())


def generate_by_decoder(decoder: Decoder, prompt: Tensor) -> None:
    token = int(decoder.prefill(prompt).argmax())
    for _ in range(GENERATED - 1):
        token = int(decoder.step(token).argmax())


def generate_by_transformers(model: PreTrainedModel, prompt: Tensor) -> None:
    settings = GenerationConfig(max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=settings)


@lru_cache(maxsize=1)
def smollm2() -> tuple[PreTrainedModel, Tensor]:
    """The dense model in bfloat16, and the prompt's tokens."""
    dense = load_dense("smollm2-135m", dtype=torch.bfloat16)
    gather_weights(dense.model)
    return dense.model, torch.tensor(dense.tokenizer(PROMPT)["input_ids"])


@lru_cache(maxsize=1)
def random_llama() -> PreTrainedModel:
    """Wide enough that the matrices dominate."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    gather_weights(model)
    return model


def with_blocks(model: PreTrainedModel, encode: Callable[[Tensor], WeightFormat]) -> PreTrainedModel:
    """A copy of ``model`` whose blocks hold encoded weights."""
    copy = deepcopy(model)
    for block in iter_blocks(copy):
        for name, layer in linears(block).items():
            parent, _, child = name.rpartition(".")
            setattr(
                block.module.get_submodule(parent), child, CompressedLinear(encode(dense_weight(layer)), layer.bias)
            )
    return copy


def half_bitmap(weight: Tensor) -> BitmapWeight:
    """The larger half of every row."""
    smaller = weight.float().abs().topk(weight.shape[1] // 2, dim=1, largest=False).indices
    return BitmapWeight.from_dense(weight.scatter(1, smaller, 0.0), layout="rows")
