"""Fine-tuning on a pruned base: adapters in one product against PEFT, and what a repair is worth on GSM8K."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from benchmarks._peft import peft_layer
from torch import Tensor, nn

from gossamer.compress import AdapterBank, SALRConfig, TrainingSettings, finetune, load_dense, read_examples
from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, geometric_mean, largest, worst

SHAPES = ((576, 576), (1536, 576), (4096, 4096))
ADAPTERS, TOKENS, RANK = (2, 4, 8), (1, 8, 32), 16
SOURCES = ["compress/_adapters.py", "compress/_salr*.py", "compress/_finetune.py"]
SEEDS = (0, 1, 2)


@claim(
    "salr-adapters-cpu",
    text="a layer with 2 to 8 adapters of rank 16 in two products against PEFT's unmerged forward, one thread",
    system=["SALR"],
    peer="peft",
    peer_package="peft",
    unit="ratio",
    bar=1.3,
    better="higher",
    summary=geometric_mean,
    sources=SOURCES,
)
def salr_adapters_cpu(bench: Bench) -> Iterator[Row]:
    """Both add the adapters to the same dense product; up to 32 tokens."""
    for shape in SHAPES:
        for count in ADAPTERS:
            layer, adapters = peft_layer(shape, count, RANK)
            base, bank = layer.base_layer, AdapterBank(adapters)
            for tokens in TOKENS:
                x = torch.randn(tokens, shape[1])
                with torch.inference_mode():
                    torch.testing.assert_close(_ours(base, bank, x), layer(x), rtol=1e-3, atol=1e-3)
                    case = f"{shape[0]}x{shape[1]}, {count} adapters, {tokens} tokens"
                    yield bench.compare(case, partial(_ours, base, bank, x), partial(layer, x))


@dataclass(frozen=True)
class Protocol:
    """How long fine-tuning takes: of the examples, 2000 train and ``test`` are scored."""

    name: str
    training: TrainingSettings
    test: int


SHORT = Protocol("short", TrainingSettings(steps=24, batch=2, lr=5e-4, residual_lr=5e-5), 32)
"""About a quarter of an hour on two cores for three seeds."""
FULL = Protocol("full", TrainingSettings(), 200)
"""200 steps of 8 examples."""
PROTOCOL = SHORT


@claim(
    "salr-gsm8k",
    text="SALR at 50 %, SmolLM2, rank 16, fine-tuned on GSM8K: negative log-likelihood of test answers against LoRA",
    system=["SALR"],
    peer="LoRA on the dense model, same loop",
    unit="ratio",
    bar=1.05,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def salr_gsm8k(bench: Bench) -> Iterator[Row]:
    """The base is scored by Wanda on the training text; by magnitude, as published, beside it for one seed."""
    for seed in SEEDS:
        dense, pruned, repaired = _three("wanda", seed)
        yield bench.value(f"seed {seed}", repaired / dense, "ratio", note=_note(dense, pruned, repaired))
        yield bench.value(f"LoRA on the pruned base, seed {seed}", pruned / dense, "ratio", counted=False)
    dense, pruned, repaired = _three("magnitude", SEEDS[0])
    note = _note(dense, pruned, repaired)
    yield bench.value(f"pruned by magnitude, seed {SEEDS[0]}", repaired / dense, "ratio", counted=False, note=note)
    ours, peer = (_trained_bytes(*run, SEEDS[0]) for run in ((0.5, 16, "wanda"), (0.0, 0, "magnitude")))
    note = f"float32 base, adapters, their gradients and AdamW's moments: {ours / 1e6:.0f} against {peer / 1e6:.0f} MB"
    yield bench.value("memory of what is trained and its base", ours / peer, "ratio", counted=False, note=note)


@claim(
    "salr-gsm8k-gap",
    text="share of what pruning costs LoRA that the repair of SALR wins back: loss on GSM8K, SmolLM2 at 50 %, rank 16",
    system=["SALR"],
    peer="LoRA on the same pruned base, same loop",
    unit="share",
    bar=0.3,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def salr_gsm8k_gap(bench: Bench) -> Iterator[Row]:
    """The same runs."""
    for score, seeds in (("wanda", SEEDS), ("magnitude", SEEDS[:1])):
        for seed in seeds:
            dense, pruned, repaired = _three(score, seed)
            share, note = (pruned - repaired) / (pruned - dense), _note(dense, pruned, repaired)
            yield bench.value(f"pruned by {score}, seed {seed}", share, "share", counted=score == "wanda", note=note)


def _three(score: str, seed: int) -> tuple[float, float, float]:
    """Test losses of LoRA on the dense model, of LoRA on the pruned one, and of SALR, in nats per token."""
    runs = ((0.0, 0, "magnitude"), (0.5, 0, score), (0.5, 16, score))
    dense, pruned, repaired = (float(_tuned(*run, seed)["nll_after"]) for run in runs)
    return dense, pruned, repaired


def _trained_bytes(sparsity: float, rank: int, score: str, seed: int) -> int:
    """A plain LoRA's base is dense, though its run here stores a bitmap without zeros."""
    result = _tuned(sparsity, rank, score, seed)
    base = result["base_bytes"] if sparsity else result["dense_bytes"]
    return int(base + 4 * result["adapter_bytes"])


def _note(dense: float, pruned: float, repaired: float) -> str:
    return f"nats: dense {dense:.4f}, pruned {pruned:.4f}, repaired {repaired:.4f}; {PROTOCOL.name} protocol"


@lru_cache
def _tuned(sparsity: float, rank: int, score: str, seed: int) -> dict[str, Any]:
    train = read_examples(data_file("text/gsm8k/train.jsonl.gz"), 2000)
    test = read_examples(data_file("text/gsm8k/test_part.jsonl"), PROTOCOL.test)
    config = SALRConfig(sparsity, residual_rank=rank, score=score)
    with tempfile.TemporaryDirectory(prefix="gossamer-salr-") as folder:
        model = load_dense("smollm2-135m")
        return finetune(model, folder, train, test, config, replace(PROTOCOL.training, seed=seed))


def _ours(base: nn.Module, bank: AdapterBank, x: Tensor) -> Tensor:
    return base(x) + bank(x)
