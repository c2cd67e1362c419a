"""The structured comparison: every method on one task, tuned with the same number of trials, by steps, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.train.precondition._blocks import Diagonal, UnitWise
from gossamer.train.precondition._interface import Preconditioner
from gossamer.train.precondition._kfac import KFAC
from gossamer.train.precondition._newton import NewtonCG
from gossamer.train.precondition._psgd import PSGD
from gossamer.train.precondition._settings import Settings
from gossamer.train.precondition._shampoo import Shampoo
from gossamer.train.precondition._smw import SMW
from gossamer.train.precondition._tasks import TASKS, Task

_EVALUATE_EVERY = 10
_DIVERGED = 20.0


@dataclass(frozen=True)
class Method:
    """A way to train. make: the preconditioner, or None; rates: learning rates to try; momentum: of the SGD behind it."""

    make: Callable[[nn.Module, float], Preconditioner] | None
    rates: tuple[float, ...]
    momentum: float = 0.9
    adam: bool = False


def _every(curvature: int, inverse: int, damping: float, decay: float, rate: float) -> Settings:
    return Settings(curvature_every=curvature, inverse_every=inverse, damping=damping, decay=decay,
                    kl_clip=1e-2, learning_rate=rate)  # fmt: skip


METHODS: dict[str, Method] = {
    "sgd": Method(None, (0.03, 0.1, 0.3, 1.0)),
    "adam": Method(None, (1e-3, 3e-3, 1e-2, 3e-2), adam=True),
    "kfac": Method(lambda model, rate: KFAC(model, _every(1, 5, 3e-3, 0.95, rate)), (0.01, 0.03, 0.1, 0.3)),
    "kfac-empirical": Method(
        lambda model, rate: KFAC(model, _every(1, 5, 3e-3, 0.95, rate), fisher="empirical"), (0.01, 0.03, 0.1, 0.3)
    ),
    "kfac-eigen": Method(
        lambda model, rate: KFAC(model, _every(1, 5, 3e-3, 0.95, rate), solver="eigen"), (0.01, 0.03, 0.1, 0.3)
    ),
    "diagonal": Method(lambda model, rate: Diagonal(model, _every(1, 1, 3e-3, 0.95, rate)), (1e-3, 3e-3, 0.01, 0.03)),
    "unit-wise": Method(lambda model, rate: UnitWise(model, _every(2, 10, 3e-3, 0.9, rate)), (3e-3, 0.01, 0.03, 0.1)),
    "smw": Method(lambda model, rate: SMW(model, _every(1, 1, 0.1, 0.0, rate)), (0.03, 0.1, 0.3, 1.0)),
    "shampoo": Method(
        lambda model, rate: Shampoo(model, Settings(inverse_every=10, damping=1e-6, decay=0.95), graft=True),
        (0.1, 0.3, 1.0, 3.0),
    ),
    "psgd-kron": Method(
        lambda model, rate: PSGD(model, Settings(damping=1e-3), criterion="whitening", rate=0.05), (1e-3, 3e-3, 0.01, 0.03)
    ),
    "psgd-affine": Method(
        lambda model, rate: PSGD(model, Settings(damping=1e-3, ignore=["token", "position"]), kind="affine",
                                 criterion="whitening", rate=0.05),
        (1e-3, 3e-3, 0.01, 0.03),
    ),
    "psgd-lowrank": Method(
        lambda model, rate: PSGD(model, Settings(damping=1e-3), kind="lowrank", criterion="whitening", rate=0.05),
        (1e-3, 3e-3, 0.01, 0.03),
    ),
    "newton-cg": Method(
        lambda model, rate: NewtonCG(model, Settings(damping=0.3), max_iterations=10, warm_start=0.5), (0.3, 1.0), 0.0
    ),
}  # fmt: skip
"""Every method of the comparison by name, with the periods and damping that it is compared with."""


@dataclass(frozen=True)
class Run:
    """One training run.

    steps_to_target: first evaluated step whose held-out loss reached the target, None where none did.
    seconds: of all training steps, evaluation left out. state_bytes: kept between steps beside the parameters.
    curve: ``(step, seconds, held-out loss)`` at every evaluation.
    """

    method: str
    rate: float
    seed: int
    steps: int
    steps_to_target: int | None
    seconds: float
    loss: float
    accuracy: float
    state_bytes: int
    phases: dict[str, float]
    curve: list[tuple[int, float, float]]

    @property
    def seconds_to_target(self) -> float | None:
        """Training time until the target."""
        return next((seconds for step, seconds, _ in self.curve if step == self.steps_to_target), None)

    def as_json(self) -> dict[str, Any]:
        """JSON scalars, lists and objects."""
        return {**asdict(self), "seconds_to_target": self.seconds_to_target}


def train(task: Task, name: str, rate: float, steps: int, seed: int = 0, stop_at_target: bool = False) -> Run:
    """Train a fresh model of ``task`` by the method called ``name``.

    Raises:
        ValueError: there is no such method.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    method = METHODS[name]
    model = task.build(seed)
    preconditioner = method.make(model, rate) if method.make else None
    optimizer: torch.optim.Optimizer
    if method.adam:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=method.momentum)
    curve: list[tuple[int, float, float]] = []
    seconds, reached, accuracy = 0.0, None, 0.0
    for step in range(1, steps + 1):
        x, labels = task.batch(100_000 * seed + step)
        start = time.perf_counter()
        _one_step(task, model, optimizer, preconditioner, x, labels)
        seconds += time.perf_counter() - start
        if step % _EVALUATE_EVERY and step != steps:
            continue
        loss, accuracy = task.evaluate(model)
        curve.append((step, seconds, loss if math.isfinite(loss) else _DIVERGED))
        if reached is None and loss <= task.target:
            reached = step
        if not loss < _DIVERGED or (reached and stop_at_target):
            break
    state = sum(
        value.nbytes for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    )
    costs = preconditioner.costs() if preconditioner else None
    return Run(
        method=name, rate=rate, seed=seed, steps=curve[-1][0], steps_to_target=reached, seconds=seconds, loss=curve[-1][2],
        accuracy=accuracy, state_bytes=state + (costs.total_bytes if costs else 0),
        phases=dict(costs.seconds) if costs else {}, curve=curve,
    )  # fmt: skip


def _one_step(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, preconditioner: Preconditioner | None, x: Tensor,
    labels: Tensor,
) -> None:  # fmt: skip
    optimizer.zero_grad()
    output = model(x)
    loss = task.loss(output, labels)
    if not torch.isfinite(loss):
        return  # evaluation will say that it diverged
    if preconditioner is None:
        loss.backward()
    else:
        preconditioner.backward(loss, output)
        preconditioner.step(lambda: task.loss(model(x), labels))
    optimizer.step()


def tune(task: Task, name: str, steps: int, seed: int = 0, on_run: Callable[[Run], None] | None = None) -> Run:
    """The best run of a method over its learning rates: fewest steps to the target, then least loss."""
    runs = []
    for rate in METHODS[name].rates:
        runs.append(train(task, name, rate, steps, seed))
        if on_run is not None:
            on_run(runs[-1])
    return min(runs, key=lambda run: (run.steps_to_target or steps + 1, run.loss))


def compare(
    task: str, methods: Sequence[str] = (), steps: int = 300, seed: int = 0, on_run: Callable[[Run], None] | None = None
) -> list[Run]:
    """The best run of every method on a task, the fewest steps to the target first.

    methods: names of :data:`METHODS`, all by default. on_run: sees every trial as it ends.

    Raises:
        ValueError: there is no such task or method, or ``steps`` is less than 1.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {unknown[0]!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    made = TASKS[task]()
    best = [tune(made, name, steps, seed, on_run) for name in methods or METHODS]
    return sorted(best, key=lambda run: (run.steps_to_target or steps + 1, run.loss))
