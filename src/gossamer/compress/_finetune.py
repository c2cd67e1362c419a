"""Fine-tune a model on examples: pruned base, repair and task adapter, trained together and saved for PEFT.

The same loop trains its own peers: plain LoRA at ``sparsity=0``, LoRA on a pruned base at ``residual_rank=0``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.compress._calibrate import calibrate
from gossamer.compress._examples import Example, batches, completion_loss, mean_nll
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._salr import SALRConfig, convert_
from gossamer.compress._salr_files import dense_hash, salr_layers, save_finetuned
from gossamer.compress._statistics import LinearStatistics
from gossamer.core.files import atomic_write, write_json

LEAST_STEP, MOST_STEP = 0.1, 10.0
"""The repair's learning rate stays between these multiples of the task's."""
CALIBRATION = (16, 256)
"""Windows of the examples' text, and their tokens, for scores that need statistics of the inputs."""


@dataclass(frozen=True)
class TrainingSettings:
    """How to train.

    steps, batch, most_tokens: of examples. lr: of the task adapter; residual_lr: of the repair, None to take
    ``1 / σ²`` of the inputs within bounds, see :func:`residual_rates`. warmup: share of the steps; then a cosine to zero.
    Weight decay is zero: it would slowly undo the repair.
    """

    steps: int = 200
    batch: int = 8
    most_tokens: int = 384
    lr: float = 2e-4
    residual_lr: float | None = 2e-5
    warmup: float = 0.05
    clip: float = 1.0
    checkpoint_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lr <= 0 or (self.residual_lr is not None and self.residual_lr < 0):
            raise ValueError(f"learning rates must be positive, got {self.lr} and {self.residual_lr}")
        if not 0.0 <= self.warmup <= 1.0 or self.most_tokens < 2:
            raise ValueError(f"need warmup in [0, 1] and most_tokens >= 2, got {self.warmup} and {self.most_tokens}")


def finetune(
    model: str | os.PathLike[str] | DenseModel,
    out: str | os.PathLike[str],
    examples: Sequence[Example],
    test: Sequence[Example] = (),
    config: SALRConfig | None = None,
    settings: TrainingSettings | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Fine-tune ``model`` on ``examples`` and write it to ``out``, see :func:`load_finetuned`; returns what was measured.

    An interrupted run is taken up from ``out/training.pt``; the finished ``out`` has no such file.

    Args:
        test: examples whose completions are scored before and after.

    Raises:
        ValueError: no examples, bad settings, or ``out`` holds a run with other settings.
    """
    config, settings, out = config or SALRConfig(), settings or TrainingSettings(), Path(out)
    if not examples:
        raise ValueError("examples must not be empty")
    dense = model if isinstance(model, DenseModel) else load_dense(model)
    base = {"model": dense.name, "hash": dense_hash(dense.model)}
    torch.manual_seed(settings.seed)
    statistics = input_statistics(dense, examples) if config.score != "magnitude" else None
    convert_(
        dense.model, config, statistics, progress=lambda done, total: progress("pruning and repairing", done, total)
    )
    out.mkdir(parents=True, exist_ok=True)
    run = _Run(dense, config, settings, examples, out, {"base": base, **asdict(config), **asdict(settings)})
    before = mean_nll(dense.model, test, dense.tokenizer, settings.batch, settings.most_tokens) if test else None
    losses = run.train(lambda done: progress("training", done, settings.steps))
    after = mean_nll(dense.model, test, dense.tokenizer, settings.batch, settings.most_tokens) if test else None
    save_finetuned(dense.model, out, base)
    result = {
        "base": base, "config": asdict(config), "training": asdict(settings), "losses": losses,
        "nll_before": before, "nll_after": after, **_bytes(dense.model),
    }  # fmt: skip
    write_json(out / "finetuning.json", result)
    run.checkpoint.unlink(missing_ok=True)
    return result


def input_statistics(dense: DenseModel, examples: Sequence[Example]) -> dict[str, LinearStatistics]:
    """Statistics of the inputs of every linear layer inside the blocks, on the text of the first examples.

    Raises:
        ValueError: the examples have fewer than two tokens.
    """
    ids: list[int] = []
    for example in examples:
        text = example.prompt + example.completion
        ids += dense.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= CALIBRATION[0] * CALIBRATION[1]:
            break
    seqlen = min(CALIBRATION[1], len(ids))
    if seqlen < 2:
        raise ValueError(f"the examples have {len(ids)} tokens, too few to calibrate on")
    windows = torch.tensor(ids[: len(ids) // seqlen * seqlen]).view(-1, seqlen)[: CALIBRATION[0]]
    found: dict[str, LinearStatistics] = {}
    for step in calibrate(dense.model, windows.to(next(dense.model.parameters()).device), "dense"):
        found |= {f"{step.block.name}.{name}": own for name, own in step.statistics.items()}
    return found


def residual_rates(model: nn.Module, batch: Any, lr: float) -> list[float]:
    """The repair's learning rate for every converted layer, in order: ``1 / σ²max`` of its inputs over one batch.

    σ²max is the largest eigenvalue of the mean of ``x xᵀ``, by power iteration; the rate is kept between ``lr / 10`` and
    ``10 lr``.
    """
    seen: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].detach()))
        for name, layer in salr_layers(model).items()
    ]
    with torch.no_grad():
        completion_loss(model, batch)
    for handle in handles:
        handle.remove()
    return [min(max(1 / _largest_energy(x), LEAST_STEP * lr), MOST_STEP * lr) for x in seen.values()]


def _largest_energy(x: Tensor, iterations: int = 30) -> float:
    rows = x.reshape(-1, x.shape[-1]).float()
    vector = torch.ones(rows.shape[1], device=rows.device)
    for _ in range(iterations):
        vector = rows.t() @ (rows @ (vector / vector.norm().clamp_min(1e-30)))
    return max(float(vector.norm()) / len(rows), 1e-30)


class _Run:
    """The loop with its optimiser and its checkpoint."""

    def __init__(
        self, dense: DenseModel, config: SALRConfig, settings: TrainingSettings, examples: Sequence[Example],
        out: Path, identity: dict[str, Any],
    ) -> None:  # fmt: skip
        self.dense, self.settings, self.examples, self.identity = dense, settings, examples, identity
        self.checkpoint = out / "training.pt"
        self.optimiser = torch.optim.AdamW(self._groups(config), weight_decay=0.0)
        self.losses: list[float] = []

    def _groups(self, config: SALRConfig) -> list[dict[str, Any]]:
        layers, settings = list(salr_layers(self.dense.model).values()), self.settings
        groups = [{"params": [part for layer in layers for part in (layer.lora_A, layer.lora_B)], "lr": settings.lr}]
        if config.residual_rank and config.train_residual:
            rates = [settings.residual_lr or 0.0] * len(layers)
            if settings.residual_lr is None:
                rates = residual_rates(self.dense.model, self._batch(0), settings.lr)
            for layer, rate in zip(layers, rates, strict=True):
                groups.append({"params": [layer.residual_A, layer.residual_B], "lr": rate})
        for group in groups:
            group["peak"] = group["lr"]
        return groups

    def train(self, progress: Callable[[int], None]) -> list[float]:
        """All steps that are left; the loss of every step."""
        self._resume()
        while len(self.losses) < self.settings.steps:
            self._step(len(self.losses))
            progress(len(self.losses))
            if len(self.losses) % self.settings.checkpoint_every == 0:
                self._save()
        return self.losses

    def _step(self, step: int) -> None:
        self.dense.model.train()
        torch.manual_seed(self.settings.seed * 1_000_003 + step)  # dropout replays after an interruption
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * self._schedule(step)
        loss, tokens = completion_loss(self.dense.model, self._batch(step))
        (loss / tokens).backward()
        trained = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(trained, self.settings.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()) / tokens)

    def _batch(self, step: int) -> Any:
        """Batch number ``step``: examples of a new order every epoch."""
        count = len(self.examples)
        picked = []
        for place in range(step * self.settings.batch, (step + 1) * self.settings.batch):
            epoch, within = divmod(place, count)
            order = np.random.default_rng((self.settings.seed, epoch)).permutation(count)
            picked.append(self.examples[int(order[within])])
        return next(batches(picked, self.dense.tokenizer, len(picked), self.settings.most_tokens))

    def _schedule(self, step: int) -> float:
        warm = max(1, round(self.settings.warmup * self.settings.steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(self.settings.steps - warm, 1)))

    def _trained(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.dense.model.named_parameters() if value.requires_grad}

    def _save(self) -> None:
        adapters = {name: value.detach() for name, value in self._trained().items()}
        state = {"identity": self.identity, "losses": self.losses, "adapters": adapters}
        with atomic_write(self.checkpoint) as temporary:
            torch.save({**state, "optimiser": self.optimiser.state_dict()}, temporary)

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        differing = sorted(key for key, value in self.identity.items() if state["identity"].get(key) != value)
        if differing:
            raise ValueError(
                f"{self.checkpoint} belongs to a run with another {', '.join(differing)}; "
                "remove it or choose another folder"
            )
        with torch.no_grad():
            for name, value in self._trained().items():
                value.copy_(state["adapters"][name])
        self.optimiser.load_state_dict(state["optimiser"])
        self.losses = list(state["losses"])


def _bytes(model: nn.Module) -> dict[str, int]:
    layers = salr_layers(model).values()
    adapters = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters() if p.ndim == 2)
    dense = sum(layer.base.dtype.itemsize * layer.in_features * layer.out_features for layer in layers)
    return {"base_bytes": sum(layer.base.nbytes for layer in layers), "adapter_bytes": adapters, "dense_bytes": dense}
