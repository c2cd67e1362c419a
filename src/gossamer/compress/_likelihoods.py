"""How likely a model finds given continuations of given contexts, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.compress._examples import IGNORED, padded

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation."""


@torch.no_grad()
def score_continuations(model: Any, pairs: Sequence[Pair], batch: int, most_tokens: int) -> list[tuple[float, bool]]:
    """Log-likelihood in nats of every continuation, and whether greedy decoding would give it.

    Args:
        model: a causal language model of transformers.
        pairs: contexts, which must not be empty, and continuations; the model sees at most ``most_tokens`` tokens of the
            two, and contexts lose their beginning where they are longer.
        batch: rows at a time; those of like length go together. Only positions that predict a continuation go through the
            head, so that contexts cost no logits.

    Raises:
        ValueError: a context is empty, or a continuation is longer than ``most_tokens``.
    """
    for context, continuation in pairs:
        if not context or len(continuation) > most_tokens:
            raise ValueError(
                f"need a context and a continuation of at most {most_tokens} tokens, "
                f"got {len(context)} and {len(continuation)} tokens"
            )
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda place: (-len(pairs[place][0]) - len(pairs[place][1]), place))
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        rows = _scored(model, [pairs[place] for place in places], most_tokens)
        for place, row in zip(places, rows, strict=True):
            found[place] = row
    return found


def _scored(model: Any, pairs: Sequence[Pair], most_tokens: int) -> list[tuple[float, bool]]:
    rows = []
    for context, continuation in pairs:
        whole = [*context, *continuation][-(most_tokens + 1) :]  # the last one is only predicted
        rows.append((whole, len(whole) - len(continuation)))
    batch = padded(rows)
    device = next(model.parameters()).device
    wanted, ids, attention = (part.to(device)[:, :-1] for part in (batch.targets, batch.ids, batch.attention))
    hidden = model.base_model(input_ids=ids, attention_mask=attention)[0]
    chosen = wanted != IGNORED
    logits = model.get_output_embeddings()(hidden[chosen]).float()
    targets, of_row = wanted[chosen], chosen.nonzero()[:, 0]
    each = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0].double().cpu()
    missed = (logits.argmax(-1) != targets).double().cpu()
    sums, misses = (torch.zeros(len(rows), dtype=torch.float64).index_add_(0, of_row.cpu(), x) for x in (each, missed))
    return [(value, miss == 0) for value, miss in zip(sums.tolist(), misses.tolist(), strict=True)]
