"""Which token comes next: greedy, or drawn from a tempered and truncated distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Choose = Callable[[np.ndarray], int]


def sampler(
    temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
) -> Choose:
    """A function from logits ``(vocabulary,)`` to a token.

    Args:
        temperature: divides the logits; 0 takes the likeliest token always.
        top_k: draw among so many of the likeliest tokens.
        top_p: draw among the fewest tokens whose probabilities (after ``top_k``) reach this sum
            (Holtzman et al., ICLR 2020).
        seed: of the draws; None draws differently every time.

    Raises:
        ValueError: an argument is outside its range.

    >>> sampler()(np.array([0.1, 0.7, 0.2]))
    1
    >>> draw = sampler(temperature=1.0, top_k=2, seed=0)
    >>> {draw(np.array([5.0, 5.0, 1.0])) for _ in range(50)}
    {0, 1}
    """
    if not 0.0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if temperature == 0.0:
        return lambda logits: int(logits.argmax())
    generator = np.random.default_rng(seed)

    def draw(logits: np.ndarray) -> int:
        tokens, shares = distribution(logits, temperature, top_k, top_p)
        return int(generator.choice(tokens, p=shares))

    return draw


def distribution(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn, likeliest first, and their probabilities in float64."""
    scaled = logits.astype(np.float64) / temperature
    tokens = np.arange(scaled.size)
    if top_k is not None and top_k < scaled.size:
        tokens = np.argpartition(-scaled, top_k - 1)[:top_k]
    tokens = tokens[np.argsort(-scaled[tokens], kind="stable")]
    shares = np.exp(scaled[tokens] - scaled[tokens[0]])
    shares /= shares.sum()
    if top_p is not None and top_p < 1.0:
        kept = int(np.searchsorted(shares.cumsum(), top_p)) + 1
        tokens, shares = tokens[:kept], shares[:kept] / shares[:kept].sum()
    return tokens, shares
