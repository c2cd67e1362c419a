"""How good a language model is, and how close a compressed one stays to the dense one.

Perplexity here: the text is cut into windows of ``seqlen`` tokens, every window gives the mean negative log-likelihood
of its ``seqlen - 1`` predicted tokens (nothing precedes the first), and the mean over windows is exponentiated. The
windows are run one at a time and their logits are reduced a few rows at a time, so that memory holds one window's
logits per model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)`` after every window."""

_ROWS = 256  # rows of logits that are in float32 at a time


@dataclass(frozen=True)
class Quality:
    """A compressed model against its dense original on the same windows.

    dense_perplexity, compressed_perplexity: as defined in this module.
    kl_divergence: mean over tokens of KL(dense || compressed), in nats.
    top1_agreement: share of tokens for which both models think the same next token likeliest.
    windows, tokens: number of windows, and of predictions compared.
    """

    dense_perplexity: float
    compressed_perplexity: float
    kl_divergence: float
    top1_agreement: float
    windows: int
    tokens: int


def cut_windows(token_ids: Tensor, seqlen: int, windows: int | None = None) -> Tensor:
    """The first ``windows`` (default: all whole) windows of 1-D ``token_ids``: ``(windows, seqlen)``.

    Raises:
        ValueError: ``token_ids`` is not 1-D or too short, ``seqlen`` < 2, or ``windows`` < 1.

    >>> cut_windows(torch.arange(7), seqlen=3)
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    if token_ids.ndim != 1 or seqlen < 2 or (windows is not None and windows < 1):
        raise ValueError(
            "need 1-D token_ids, seqlen of at least 2 and at least 1 window, "
            f"got token_ids of shape {tuple(token_ids.shape)}, seqlen {seqlen}, windows {windows}"
        )
    whole = len(token_ids) // seqlen
    count = whole if windows is None else windows
    if not 0 < count <= whole:
        raise ValueError(
            f"{len(token_ids)} tokens are too few: {max(count, 1)} windows of {seqlen} need {max(count, 1) * seqlen}"
        )
    return token_ids[: count * seqlen].view(count, seqlen)


@torch.no_grad()
def perplexity(
    model: nn.Module,
    token_ids: Tensor,
    seqlen: int,
    windows: int | None = None,
    progress: Progress = lambda done, total: None,
) -> float:
    """Perplexity of ``model`` over the first ``windows`` windows of ``seqlen`` of 1-D ``token_ids``.

    Raises:
        ValueError: as :func:`cut_windows`.
    """
    ids = cut_windows(token_ids, seqlen, windows)
    total = 0.0
    for index, window in enumerate(ids):
        logits, targets = _logits(model, window), window[1:]
        total += _negative_log_likelihood(logits, targets) / len(targets)
        progress(index + 1, len(ids))
    return math.exp(total / len(ids))


@torch.no_grad()
def compare(
    dense: nn.Module, compressed: nn.Module, windows: Tensor, progress: Progress = lambda done, total: None
) -> Quality:
    """Run both models over ``windows`` ``(windows, seqlen)`` int64 and compare what they predict.

    Raises:
        ValueError: ``windows`` is not 2-D, is empty, or holds windows of fewer than two tokens.
    """
    if windows.ndim != 2 or len(windows) == 0 or windows.shape[1] < 2:
        raise ValueError(f"windows must have shape (windows, seqlen >= 2), got {tuple(windows.shape)}")
    loss, other_loss, divergence, agreeing = 0.0, 0.0, 0.0, 0
    for index, window in enumerate(windows):
        targets = window[1:]
        logits, other = _logits(dense, window), _logits(compressed, window)
        loss += _negative_log_likelihood(logits, targets)
        other_loss += _negative_log_likelihood(other, targets)
        for ours, theirs in zip(logits.split(_ROWS), other.split(_ROWS), strict=True):
            p, q = F.log_softmax(ours.float(), -1), F.log_softmax(theirs.float(), -1)
            divergence += float(F.kl_div(q, p, log_target=True, reduction="sum"))
            agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        progress(index + 1, len(windows))
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    return Quality(
        dense_perplexity=math.exp(loss / tokens),
        compressed_perplexity=math.exp(other_loss / tokens),
        kl_divergence=divergence / tokens,
        top1_agreement=agreeing / tokens,
        windows=len(windows),
        tokens=tokens,
    )


def _logits(model: nn.Module, window: Tensor) -> Tensor:
    """``(seqlen - 1, vocabulary)``: the logits that predict ``window[1:]``."""
    logits: Tensor = model(input_ids=window[None], use_cache=False).logits
    return logits[0, :-1]


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """Summed over the rows, in nats."""
    pieces = zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    return sum(float(F.cross_entropy(rows.float(), wanted, reduction="sum")) for rows, wanted in pieces)
