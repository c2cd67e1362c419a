"""Fine-tuning on a pruned base: adapters in one product against PEFT, and what a repair is worth on GSM8K."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from benchmarks._peft import peft_layer
from torch import Tensor, nn

from gossamer.compress import AdapterBank, SALRConfig, TrainingSettings, finetune, load_dense, read_examples
from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, geometric_mean, largest

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


@claim(
    "salr-gsm8k",
    text="SALR at 50 %, SmolLM2, rank 16, 200 steps on GSM8K: negative log-likelihood of test answers against LoRA",
    system=["SALR"],
    peer="LoRA on the dense model, same loop",
    unit="ratio",
    bar=1.05,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def salr_gsm8k(bench: Bench) -> Iterator[Row]:
    """Three seeds; beside each LoRA on the pruned base, and the share of the gap to it that the repair closes."""
    for seed in SEEDS:
        dense, pruned, repaired = (
            _nll(SALRConfig(sparsity, residual_rank=rank), seed) for sparsity, rank in ((0.0, 0), (0.5, 0), (0.5, 16))
        )
        closed = (pruned - repaired) / (pruned - dense)
        note = f"dense {dense:.4f}, pruned {pruned:.4f}, repaired {repaired:.4f}; {closed:.0%} of the gap closed"
        yield bench.value(f"seed {seed}", repaired / dense, "ratio", note=note)
        yield bench.value(f"LoRA on the pruned base, seed {seed}", pruned / dense, "ratio", counted=False)


def _nll(config: SALRConfig, seed: int) -> float:
    train = read_examples(data_file("text/gsm8k/train.jsonl.gz"), 2000)
    test = read_examples(data_file("text/gsm8k/test_part.jsonl"), 200)
    with tempfile.TemporaryDirectory(prefix="gossamer-salr-") as folder:
        settings = TrainingSettings(seed=seed)
        finetune(load_dense("smollm2-135m"), folder, train, test, config, settings)
        result = json.loads((Path(folder) / "finetuning.json").read_text())
    return float(result["nll_after"])


def _ours(base: nn.Module, bank: AdapterBank, x: Tensor) -> Tensor:
    return base(x) + bank(x)
