"""A compressed model beside the dense one it was made from: quality, speed, memory and sample text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer.compress._checkpoint import CompressedModel, load
from gossamer.compress._choices import Choice, answer_by_likelihood
from gossamer.compress._decode import Decoder
from gossamer.compress._decode_matrices import DENSE
from gossamer.compress._evaluate import compare
from gossamer.compress._generate import generate
from gossamer.compress._memory import resident_memory
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._text import Text, default_text, evaluation_windows
from gossamer.core.hardware import hardware, usable_cores
from gossamer.core.measure import Bench

Progress = Callable[[str, int, int], None]

PROMPTS = ("The capital of France is", "A list comprehension in Python is", "Water boils when")
SAMPLE_TOKENS = 48
ROUNDS = 5
HOPELESS = 2.0


def evaluate(
    path: str | os.PathLike[str],
    text: Text | None = None,
    seqlen: int = 1024,
    windows: int = 8,
    tokens: int = 64,
    choices: Mapping[str, Sequence[Choice]] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Compare the compressed folder ``path`` with its dense model.

    Args:
        path: a folder that :func:`compress` wrote.
        text: its ``evaluation`` part is used; by default :func:`default_text`.
        seqlen, windows: perplexity over so many windows of so many tokens.
        tokens: decoded in every round of the speed measurement.
        choices: named sets of multiple-choice questions, answered by likelihood.
        progress: called as ``progress(what, done, total)``.

    Returns:
        a JSON-able dict: ``summary`` (rows of what, dense, compressed, ratio), ``quality``, ``speed``, ``memory``,
        ``disk``, ``choices``, ``samples``, ``layers``, ``hardware``, ``settings``, ``text`` and ``protocol``.

    Raises:
        ValueError: ``path`` is no compressed folder, the text is too short, or the dense model is gone.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    compressed = load(path)
    run = compressed.about["run"]
    text = text or default_text()
    dense = load_dense(run["model"], dtype=compressed.model.dtype)
    ids = evaluation_windows(text, dense.tokenizer, seqlen, windows)
    speed = _decode_speed(dense, compressed, tokens, progress)
    samples = _samples(dense, compressed, progress)
    memory = _memory(dense, compressed, progress)
    quality = compare(
        dense.model.float(), _in_float32(compressed), ids, lambda done, total: progress("perplexity", done, total)
    )
    result = {
        "model": run["model"],
        "settings": run["settings"],
        "text": {"calibration": run["text"][0], "evaluation": text.name, "note": text.note},
        "protocol": {"seqlen": seqlen, "windows": len(ids), "decoded_tokens": tokens, "rounds": ROUNDS},
        "quality": asdict(quality),
        "speed": speed,
        "memory": memory,
        "disk": {"dense": weights_on_disk(dense.path), "compressed": weights_on_disk(compressed.path)},
        "choices": _choices(dense, compressed, choices or {}, progress),
        "samples": samples,
        "layers": compressed.about["layers"],
        "hardware": asdict(hardware()),
    }
    return {"summary": _summary(result), **result}


def _choices(
    dense: DenseModel, compressed: CompressedModel, choices: Mapping[str, Sequence[Choice]], progress: Progress
) -> dict[str, Any]:
    """Accuracies of both models on every set; they are in float32 by now."""
    found: dict[str, Any] = {}
    for name, questions in choices.items():
        found[name] = {}
        for which, model in (("dense", dense.model), ("compressed", compressed.model)):

            def show(done: int, total: int, what: str = f"{name}, {which}") -> None:
                progress(what, done, total)

            found[name][which] = asdict(answer_by_likelihood(model, questions, dense.tokenizer, progress=show))
    return found


def weights_on_disk(folder: Path) -> int:
    """Bytes of the weight files in a model folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _in_float32(compressed: CompressedModel) -> nn.Module:
    """Float32 activations, norms and embeddings; compressed layers keep their bits and follow their inputs' dtype."""
    return nn.Module.float(compressed.model)  # transformers' own refuses, for formats whose bits a cast would spoil


def _decode_speed(dense: DenseModel, compressed: CompressedModel, tokens: int, progress: Progress) -> dict[str, Any]:
    """Tokens per second in the same loop, by number of threads; the fastest dense variant counts.

    Variants that need more than ``HOPELESS`` times as long as the fastest in a trial of a few tokens keep that figure;
    the others are timed in rounds interleaved with the compressed model.
    """
    counts = sorted({1, usable_cores()})
    speed: dict[str, Any] = {}
    for done, threads in enumerate(counts):
        progress("decode speed", done, len(counts))
        bench = Bench(samples=ROUNDS, sample_seconds=0.0)
        with bench.threads(threads), torch.inference_mode():
            peers = {name: Decoder(dense.model, tokens, threads, name) for name in DENSE}
            trials = {name: _seconds_per_token(decoder) for name, decoder in peers.items()}
            racing = [name for name in peers if trials[name] <= HOPELESS * min(trials.values())]
            ours = Decoder(compressed.model, tokens, threads)
            row = bench.compare(
                f"{threads} threads",
                ours=partial(_decode, ours, tokens),
                peer={name: partial(_decode, peers[name], tokens) for name in racing},
            )
            ours.reset()
            profile = ours.profile()
        assert row.peer is not None
        assert row.ratio is not None
        raced = {row.peer_name: row.peer / tokens, **{name: time / tokens for name, time in row.others.items()}}
        speed[str(threads)] = {
            "compressed": tokens / row.ours,
            "dense": {name: 1 / seconds for name, seconds in {**trials, **raced}.items()},
            "fastest_dense": row.peer_name,
            "ratio": row.ratio,
            "spread": row.spread,
            "profile": profile,
        }
    progress("decode speed", len(counts), len(counts))
    return speed


def _seconds_per_token(decoder: Decoder) -> float:
    return float(decoder.profile(steps=3)["step"])


def _decode(decoder: Decoder, tokens: int) -> None:
    """Feed a fixed sequence, so that every contender does the same work."""
    decoder.reset()
    for position in range(tokens):
        decoder.step((17 * position + 100) % decoder.vocabulary)


def _samples(dense: DenseModel, compressed: CompressedModel, progress: Progress) -> list[dict[str, str]]:
    samples = []
    for done, prompt in enumerate(PROMPTS):
        continued = {
            which: generate(loaded.model, loaded.tokenizer, prompt, max_new_tokens=SAMPLE_TOKENS).text
            for which, loaded in (("dense", dense), ("compressed", compressed))
        }
        samples.append({"prompt": prompt, **continued})
        progress("sample text", done + 1, len(PROMPTS))
    return samples


def _memory(dense: DenseModel, compressed: CompressedModel, progress: Progress) -> dict[str, Any]:
    memory = {}
    for done, (which, path) in enumerate((("dense", dense.path), ("compressed", compressed.path))):
        memory[which] = asdict(resident_memory(path))
        progress("memory", done + 1, 2)
    return memory


def _summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table that the command prints and the report opens with. ``ratio``: above 1 is better for the compressed."""
    quality, memory, disk = result["quality"], result["memory"], result["disk"]
    rows = [
        _row("weights on disk, MB", disk["dense"] / 1e6, disk["compressed"] / 1e6),
        _row("memory after load, MB", memory["dense"]["loaded"] / 1e6, memory["compressed"]["loaded"] / 1e6),
        _row("memory after decode, MB", memory["dense"]["decoded"] / 1e6, memory["compressed"]["decoded"] / 1e6),
        _row("perplexity", quality["dense_perplexity"], quality["compressed_perplexity"]),
        _row("top-1 agreement", 1.0, quality["top1_agreement"], ratio=False),
        _row("KL divergence, nats", 0.0, quality["kl_divergence"], ratio=False),
    ]
    for name, found in result["choices"].items():
        dense, compressed, chance = found["dense"], found["compressed"], found["dense"]["chance"]
        for kind, what in (("accuracy", "accuracy"), ("accuracy_norm", "accuracy per byte")):
            rows.append(_row(f"{name}, {what} (chance {chance:.0%})", dense[kind], compressed[kind], ratio=False))
    for threads, speed in result["speed"].items():
        fastest = speed["dense"][speed["fastest_dense"]]
        what = f"decode tokens/s, {threads} thread{'s' if threads != '1' else ''} (dense: {speed['fastest_dense']})"
        rows.append({"what": what, "dense": fastest, "compressed": speed["compressed"], "ratio": speed["ratio"]})
    return rows


def _row(what: str, dense: float, compressed: float, ratio: bool = True) -> dict[str, Any]:
    return {"what": what, "dense": dense, "compressed": compressed, "ratio": dense / compressed if ratio else None}
