"""Prompts with their completions: read, tokenise, and the likelihood that a model gives to the completions."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_KEYS = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"))
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """A prompt and what should follow it."""

    prompt: str
    completion: str


def read_examples(path: str | os.PathLike[str], limit: int | None = None) -> list[Example]:
    """Examples of a JSON Lines file or a JSON list (``.gz`` allowed), in order.

    Every object has the keys question and answer (GSM8K), prompt and completion, or instruction and output; calculator
    annotations ``<<...>>`` of GSM8K are dropped.

    Raises:
        ValueError: the file is not JSON, holds no examples, or an object lacks the keys.
    """
    path = Path(path)
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    try:
        objects = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    examples = [_example(value, path) for value in objects[:limit]]
    if not examples:
        raise ValueError(f"{path} holds no examples")
    return examples


def _example(value: Any, path: Path) -> Example:
    for prompt, completion in _KEYS:
        if isinstance(value, dict) and prompt in value and completion in value:
            return Example(f"{value[prompt].strip()}\n", _without_annotations(value[completion].strip()))
    accepted = " or ".join("/".join(pair) for pair in _KEYS)
    raise ValueError(f"every example of {path} needs {accepted}, got {str(value)[:80]}")


def _without_annotations(text: str) -> str:
    while (start := text.find("<<")) >= 0 and (end := text.find(">>", start)) >= 0:
        text = text[:start] + text[end + 2 :]
    return text


@dataclass(frozen=True)
class Batch:
    """``ids`` and ``targets`` ``(batch, tokens)`` int64; targets are the next ids where a completion is to be predicted."""

    ids: Tensor
    targets: Tensor
    attention: Tensor


def batches(examples: Sequence[Example], tokenizer: Any, size: int, most_tokens: int) -> Iterator[Batch]:
    """Batches of ``size`` examples in order, padded right, cut to ``most_tokens``; an end token closes completions."""
    end = tokenizer.eos_token_id
    for start in range(0, len(examples), size):
        rows = []
        for example in examples[start : start + size]:
            prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
            completion = tokenizer(example.completion, add_special_tokens=False)["input_ids"]
            ids = (prompt + completion + ([] if end is None else [end]))[:most_tokens]
            rows.append((ids, len(prompt)))
        yield padded(rows)


def padded(rows: list[tuple[list[int], int]]) -> Batch:
    """Rows of token ids and the number of those that belong to a prompt, padded right; what follows it is predicted."""
    longest = max(len(ids) for ids, _ in rows)
    ids, attention = (
        torch.zeros(len(rows), longest, dtype=torch.int64),
        torch.zeros(len(rows), longest, dtype=torch.int64),
    )
    targets = torch.full((len(rows), longest), IGNORED)
    for row, (own, prompt) in enumerate(rows):
        ids[row, : len(own)] = torch.tensor(own)
        attention[row, : len(own)] = 1
        first = max(prompt, 1)
        targets[row, first - 1 : len(own) - 1] = ids[row, first : len(own)]
    return Batch(ids, targets, attention)


def completion_loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """Summed negative log-likelihood of the targets in nats, and their number.

    Only positions that predict a completion go through the head, so that logits of prompts take no memory.
    """
    device = next(model.parameters()).device
    hidden = model.base_model(input_ids=batch.ids.to(device), attention_mask=batch.attention.to(device))[0]
    wanted = batch.targets.to(device)
    chosen = wanted != IGNORED
    logits = model.get_output_embeddings()(hidden[chosen]).float()
    return F.cross_entropy(logits, wanted[chosen], reduction="sum"), int(chosen.sum())


@torch.no_grad()
def mean_nll(
    model: nn.Module, examples: Sequence[Example], tokenizer: Any, size: int = 8, most_tokens: int = 512
) -> float:
    """Mean negative log-likelihood of the completions, in nats per token."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches(examples, tokenizer, size, most_tokens):
        loss, tokens = completion_loss(model, batch)
        total, count = total + float(loss), count + tokens
    return total / max(count, 1)
