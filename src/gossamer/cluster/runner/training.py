"""For training scripts: exact gradient accumulation, progress, and checkpoints that a re-queued job resumes from.

session = TrainingSession()
step = AccumulatingStep(model, optimizer, loss_of, session.sub_batch)
for iteration in session.iterations(model, optimizer):
    step(inputs, targets)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.files import atomic_write

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


class AccumulatingStep:
    """One optimiser step over a batch in sub-batches, equal to the step over the whole batch at once.

    loss_of: ``loss_of(model, inputs, targets)``, the *mean* loss over its samples. The loss of a sub-batch is weighted
    by its share of the batch, so that the gradient is that of the mean over all. Replicas of
    ``DistributedDataParallel`` exchange gradients in the last sub-batch only.

    Raises:
        ValueError: ``sub_batch`` is below 1, or the model has batch normalisation or dropout in training mode, whose
            result depends on how a batch is divided (checked where a batch is really divided).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, sub_batch: int) -> None:
        if sub_batch < 1:
            raise ValueError(f"sub_batch must be at least 1, got {sub_batch}")
        self._model, self._optimizer, self._loss_of, self._sub_batch = model, optimizer, loss_of, sub_batch

    def __call__(self, inputs: Tensor, targets: Tensor) -> float:
        """Step once; gives the mean loss over the batch."""
        count = len(inputs)
        if count > self._sub_batch:
            refuse_inexact(self._model)
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for begin in range(0, count, self._sub_batch):
            part = slice(begin, min(begin + self._sub_batch, count))
            quiet = getattr(self._model, "no_sync", nullcontext) if part.stop < count else nullcontext
            with quiet():
                share = (part.stop - part.start) / count
                loss = self._loss_of(self._model, inputs[part], targets[part]) * share
                loss.backward()
            total += float(loss.detach())
        self._optimizer.step()
        return total


def refuse_inexact(model: nn.Module) -> None:
    """Raise ``ValueError`` where accumulation is not the whole batch's step: the layers at fault are named."""
    faulty = [
        name
        for name, module in model.named_modules()
        if module.training
        and (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        )
    ]
    if faulty:
        raise ValueError(
            f"layers {', '.join(faulty[:5])} depend on how a batch is divided, so sub-batches would train another model; "
            "set accumulates: false for this job, or take GroupNorm or no dropout"
        )


class TrainingSession:
    """What the agent told this process, and how it answers.

    Outside an agent it runs ``default_iterations`` steps with the full batch and writes nothing.

    iterations_wanted, batch, sub_batch, profiling: what to do. every: seconds between reports and checkpoints.
    """

    def __init__(self, default_iterations: int = 10, default_batch: int = 8, every: float = 2.0) -> None:
        environment = os.environ
        self.iterations_wanted = int(environment.get("GOSSAMER_ITERATIONS", default_iterations))
        self.batch = int(environment.get("GOSSAMER_BATCH", default_batch))
        self.sub_batch = int(environment.get("GOSSAMER_SUB_BATCH", self.batch))
        self.profiling = environment.get("GOSSAMER_PROFILE") == "1"
        self._resume = environment.get("GOSSAMER_RESUME") == "1"
        folder = environment.get("GOSSAMER_JOB_FOLDER")
        self._folder = Path(folder) if folder and int(environment.get("RANK", "0")) == 0 else None
        self._source = Path(folder) if folder else None
        self._every = every

    def iterations(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        """Count the steps, from the last checkpoint on; saves, reports, and leaves the final weights behind.

        Draws of batches should depend on the step's number only, so that a resumed run sees the same data.
        """
        first = self._restore(model, optimizer)
        reported, since, count = time.monotonic(), time.monotonic(), 0
        for iteration in range(first, self.iterations_wanted):
            yield iteration
            count += 1
            now = time.monotonic()
            last = iteration + 1 == self.iterations_wanted
            if now - reported >= self._every or last or (self.profiling and count == 2):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                    now = time.monotonic()
                self._report(iteration + 1, (now - since) / count)
                if not self.profiling:
                    self._save(model, optimizer, iteration + 1)
                reported, since, count = time.monotonic(), time.monotonic(), 0

    def _report(self, iteration: int, seconds: float) -> None:
        if self._folder is not None:
            used = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
            with atomic_write(self._folder / "progress.json") as temporary:
                temporary.write_text(json.dumps({"iteration": iteration, "seconds": seconds, "memory": used}))

    def _save(self, model: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if self._folder is not None:
            state: dict[str, Any] = {
                "model": _bare(model).state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration,
            }  # fmt: skip
            with atomic_write(self._folder / "checkpoint.pt") as temporary:
                torch.save(state, temporary)

    def _restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        path = self._source / "checkpoint.pt" if self._source else None
        if not self._resume or path is None or not path.exists():
            return 0
        state = torch.load(path, weights_only=True, map_location=next(_bare(model).parameters()).device)
        _bare(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["iteration"])


def _bare(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of data parallelism."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner
