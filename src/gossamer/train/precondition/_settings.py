"""What every preconditioner has in common to choose: how often, how much damping, how long a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Number = float | Callable[[], float]


@dataclass(frozen=True)
class Settings:
    """Settings that all preconditioners share.

    curvature_every, inverse_every, precondition_every: steps from one update of the curvature, of its inverse, and from
        one preconditioned gradient to the next; in between the last ones are used, or the gradient is left alone.
    damping: what is added to the curvature before it is inverted, in units of the curvature of the mean loss.
    decay: how much of the old curvature stays at an update, ``new = decay * old + (1 - decay) * current``; 0 keeps none.
    kl_clip: if given, the preconditioned gradient d is scaled by ``min(1, sqrt(kl_clip / (lr**2 * <gradient, d>)))``: twice
        the divergence between the distributions before and after the step is at most this (Osawa et al., 2019).
    learning_rate: the ``lr`` of that rule; a number, or a function that returns the optimizer's current one.
    loss_scale: what the loss is multiplied with before ``backward``: ``1 / k`` where k micro-batches make a step,
        ``scaler.get_scale`` under automatic mixed precision, or their product.
    on_nonfinite: "raise" stops all ranks together; "skip" leaves the gradients alone on all ranks, for loss scalers.
    factor_dtype: of the stored curvature; by default the parameters', at least float32.
    ignore: modules, types of modules or names whose parameters keep their plain gradients.
    group: process group of torch.distributed whose ranks share batch and work; the default one if there is one.

    Raises:
        ValueError: a period is less than 1, a damping or clip is not positive, or a decay is outside [0, 1).

    >>> Settings(inverse_every=10).due(20)
    (True, True, True)
    """

    curvature_every: int = 1
    inverse_every: int = 1
    precondition_every: int = 1
    damping: float = 1e-3
    decay: float = 0.0
    kl_clip: float | None = None
    learning_rate: Number = 1.0
    loss_scale: Number = 1.0
    on_nonfinite: Literal["raise", "skip"] = "raise"
    factor_dtype: torch.dtype | None = None
    ignore: Sequence[nn.Module | type[nn.Module] | str] = ()
    group: Any = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in ("curvature_every", "inverse_every", "precondition_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 step, got {getattr(self, name)}")
        if not self.damping > 0:
            raise ValueError(f"damping must be positive, got {self.damping}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {self.decay}")
        if self.kl_clip is not None and not self.kl_clip > 0:
            raise ValueError(f"kl_clip must be positive or None, got {self.kl_clip}")
        if self.on_nonfinite not in ("raise", "skip"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'skip', got {self.on_nonfinite!r}")

    def due(self, step: int) -> tuple[bool, bool, bool]:
        """Whether the curvature, the inverse and the preconditioning are due in this step, counted from 0."""
        return step % self.curvature_every == 0, step % self.inverse_every == 0, step % self.precondition_every == 0

    def ignores(self, name: str, module: nn.Module) -> bool:
        """Whether ``module``, of that name in the model, is to be left alone."""
        return any(
            module is entry
            or (isinstance(entry, type) and isinstance(module, entry))
            or (isinstance(entry, str) and (name == entry or name.startswith(entry + ".")))
            for entry in self.ignore
        )

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the curvature of parameters of ``dtype``."""
        return self.factor_dtype or torch.promote_types(dtype, torch.float32)


def now(number: Number) -> float:
    """The current value of a number that may be a function."""
    return float(number() if callable(number) else number)
