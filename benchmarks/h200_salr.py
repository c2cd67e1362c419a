"""SALR on one GPU: peak memory of a training step and unmerged adapters, both against PEFT.

Memory: a random LLaMA of a published shape in bfloat16, AdamW on float32 adapters of rank 16, gradient checkpointing, one
batch of random tokens, and a loss that takes the head's logits a chunk of positions at a time; all of this is the same on
both sides. What differs is the base, which SALR keeps as bitmaps at 50 %, and the adapters, of which SALR trains a second
set. Peaks are what torch allocated at most from the first of three steps on, the model included. Beside the whole peak
stands that without embedding, head and logits, which no method here touches.

Adapters: eager calls as PEFT's users make them, timed by the wall clock with the GPU drained at the end of a sample.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from benchmarks._peft import peft_layer, peft_lora
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer.compress import AdapterBank, SALRConfig, convert_
from gossamer.core.measure import Bench, Row, claim, geometric_mean, largest

RANK, BATCH, TOKENS, CHUNK, STEPS = 16, 2, 1024, 256, 3
SHAPES = ((2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096))
ADAPTERS, ROWS = (2, 4, 8), (1, 8, 32)
CALLS = 32
SOURCES = ["compress/_adapters.py", "compress/_salr*.py"]


@dataclass(frozen=True)
class Shape:
    """Of a LLaMA; ``counted``: whether the claim's summary takes it."""

    name: str
    hidden: int
    inner: int
    blocks: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool
    counted: bool


MODELS = (
    Shape("LLaMA-3.2-1B", 2048, 8192, 16, 32, 8, 128256, tied=True, counted=False),
    Shape("LLaMA-3.1-8B", 4096, 14336, 32, 32, 8, 128256, tied=False, counted=True),
)


@claim(
    "salr-memory",
    text="peak memory of a training step, LLaMA-3.1-8B shape, 50 % bitmap base and two adapters against LoRA on bfloat16",
    system=["SALR"],
    peer="peft LoRA, rank 16, bfloat16",
    peer_package="peft",
    unit="ratio of peaks",
    bar=0.75,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def salr_memory(bench: Bench) -> Iterator[Row]:
    """The paper reports 19.2 against 26.7 GB for Llama3-8B, 0.72; smaller models pay more for their embedding."""
    for shape in MODELS:
        peer, rest = peak(partial(lora_model, shape)), untouched(shape)
        ours = peak(partial(salr_model, shape))
        note = f"{ours / 1e9:.2f} against {peer / 1e9:.2f} GB, of which {rest / 1e9:.2f} embedding, head and logits"
        yield bench.value(shape.name, ours / peer, "ratio of peaks", counted=shape.counted, note=note)
        without = (ours - rest) / (peer - rest)
        yield bench.value(f"{shape.name}, without embedding, head and logits", without, "ratio of peaks", counted=False)


@claim(
    "h200-salr-adapters",
    text="a layer with 2 to 8 adapters of rank 16 in two products against PEFT's unmerged forward, up to 32 tokens",
    system=["SALR"],
    peer="peft",
    peer_package="peft",
    unit="ratio",
    bar=1.5,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def salr_adapters(bench: Bench) -> Iterator[Row]:
    """Both add the adapters to the same dense bfloat16 product."""
    for shape in SHAPES:
        for count in ADAPTERS:
            layer, adapters = peft_layer(shape, count, RANK, torch.bfloat16, "cuda")
            base, bank = layer.base_layer, AdapterBank(adapters)
            for rows in ROWS:
                x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
                with torch.inference_mode():
                    expected = layer(x).float()
                    error = (with_bank(base, bank, x).float() - expected).abs().max() / expected.abs().max()
                    assert float(error) < 0.02, f"adapters in two products differ from PEFT's by {float(error):.3f}"
                    ours, peer = drained(partial(with_bank, base, bank, x)), drained(partial(layer, x))
                    yield bench.compare(f"{shape[0]}x{shape[1]}, {count} adapters, {rows} tokens", ours, peer)


def with_bank(base: nn.Module, bank: AdapterBank, x: Tensor) -> Tensor:
    return base(x) + bank(x)


def drained(call: Callable[[], object]) -> Callable[[], None]:
    """Many calls and a wait for the GPU: a sample is long enough for the wait not to matter."""

    def run() -> None:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()

    return run


def peak(build: Callable[[], nn.Module]) -> int:
    """Bytes that torch allocated at most while a model trains, that itself included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
    generator = torch.Generator("cuda").manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (BATCH, TOKENS), generator=generator, device="cuda")
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        loss = chunked_loss(model, ids)
        loss.backward()
        assert all(parameter.grad is not None for parameter in trained), "a block was left out"
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    assert bool(loss.isfinite())
    found = torch.cuda.max_memory_allocated() - before
    del model, trained, optimiser, loss
    return found


def chunked_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token loss; logits of ``CHUNK`` positions exist at a time, in the backward pass too."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False)[0][:, :-1].flatten(0, 1)
    targets, head = ids[:, 1:].flatten(), inner.get_output_embeddings()

    def one(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(rows).float(), wanted, reduction="sum")

    pairs = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    losses = [checkpoint(one, rows, wanted, use_reentrant=False) for rows, wanted in pairs]
    total: Tensor = torch.stack(losses).sum() / len(targets)
    return total


def untouched(shape: Shape) -> int:
    """Bytes of embedding, head and one chunk's logits: bfloat16, their float32 copy, and the gradients of both."""
    matrices = 2 * shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return matrices + CHUNK * shape.vocabulary * (2 + 4) * 2


def lora_model(shape: Shape) -> nn.Module:
    return trainable(peft_lora(random_llama(shape, shape.blocks), RANK))


def salr_model(shape: Shape) -> nn.Module:
    """One block is pruned and repaired and then copied: what it holds does not matter to memory, and SVDs take minutes."""
    model = random_llama(shape, 1)
    convert_(model, SALRConfig(rank=RANK, residual_rank=RANK))
    layers = model.model.layers  # type: ignore[union-attr]
    layers.extend(copy.deepcopy(layers[0]) for _ in range(shape.blocks - 1))  # type: ignore[union-attr, operator, index]
    model.config.num_hidden_layers = shape.blocks  # type: ignore[union-attr]
    return trainable(model)


def random_llama(shape: Shape, blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.inner, num_hidden_layers=blocks,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, tie_word_embeddings=shape.tied,
        max_position_embeddings=TOKENS,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)


def trainable(model: nn.Module) -> nn.Module:
    """In training mode with gradient checkpointing; embeddings pass gradients on, which checkpoints need."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()
