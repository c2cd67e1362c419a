"""Newton's direction by conjugate gradients, from products alone: Hessian-free optimisation (Martens, ICML 2010).

``(C + damping I) d = g`` is solved with C the generalised Gauss-Newton matrix ``J^T H_L J`` of the model's outputs, or the
Hessian; a product with C costs about two backward passes through the graph that the forward pass left.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gossamer.train.precondition._interface import Closure, Preconditioner
from gossamer.train.precondition._settings import Settings

_KEEP_GROWTH = 1.3
_PROGRESS = 5e-4
_MOST_HALVINGS = 20


class NewtonCG(Preconditioner):
    """Truncated Newton for every trained parameter. Use it with SGD and a learning rate of about 1.

    curvature: "ggn" (never negative; needs the output, of which alone the loss must be a function) or "hessian" (a
        direction of negative curvature ends the iteration).
    max_iterations: of conjugate gradients in a step.
    warm_start: share of the last direction to start from; 0 starts from nothing.
    adapt: whether ``step(closure)`` also picks, of the iterates, the one with the least loss (halved until it
        lowers the loss at all), and follows Levenberg and
        Marquardt's rule: damping times 3/2 where the loss falls by less than a quarter of what the model promised, times
        2/3 where by more than three quarters.

    The periods of curvature and inverse do not apply: every preconditioned gradient is solved for anew. Costs nothing
    between steps but the last direction; within a step it keeps the graph of the batch.

    >>> model = nn.Linear(3, 1)
    >>> newton = NewtonCG(model, Settings(damping=1e-6))
    >>> x, y = torch.randn(16, 3), torch.randn(16, 1)
    >>> output = model(x)
    >>> newton.backward((output - y).square().mean(), output)
    >>> newton.step()
    >>> torch.optim.SGD(model.parameters(), lr=1.0).step()  # least squares: solved in one step
    >>> bool(((model(x) - y).mul(x).mean(0).abs() < 1e-3).all())
    True
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        curvature: Literal["ggn", "hessian"] = "ggn",
        max_iterations: int = 100,
        warm_start: float = 0.0,
        adapt: bool = True,
    ) -> None:
        super().__init__(model, settings)
        if curvature not in ("ggn", "hessian"):
            raise ValueError(f"curvature must be 'ggn' or 'hessian', got {curvature!r}")
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
        if not 0 <= warm_start < 1:
            raise ValueError(f"warm_start must be in [0, 1), got {warm_start}")
        self.curvature = curvature
        self.max_iterations = max_iterations
        self.warm_start = warm_start
        self.adapt = adapt
        self.damping = self.settings.damping
        self.iterations = 0
        self._graphs: list[tuple[Tensor, Tensor | None]] = []

    def observe(self, loss: Tensor, output: Tensor | None = None) -> None:
        """Keep the graph of the batch until :meth:`step`.

        Raises:
            ValueError: ``curvature`` is "ggn" and the output was not given.
        """
        if self.curvature == "ggn" and output is None:
            raise ValueError("curvature='ggn' needs the model's output: backward(loss, output)")
        if self.settings.due(self.steps)[2]:
            self._graphs.append((loss, output))

    def product(self, vector: dict[str, Tensor]) -> dict[str, Tensor]:
        """The curvature of the observed batches, of all ranks, times ``vector``; without damping."""
        parts = [vector[name] for name in self.parameters]
        total = [torch.zeros_like(part) for part in parts]
        with torch.enable_grad():
            for loss, output in self._graphs:
                found = (
                    self._hessian(loss, parts)
                    if output is None or self.curvature == "hessian"
                    else self._ggn(loss, output, parts)
                )
                for entry, part in zip(total, found, strict=True):
                    if part is not None:
                        entry += part.detach()
        torch._foreach_div_(total, float(len(self._graphs) * self.ranks.size))
        self.ranks.sum_([entry.view(-1) for entry in total])
        return dict(zip(self.parameters, total, strict=True))

    def _hessian(self, loss: Tensor, vector: list[Tensor]) -> tuple[Tensor | None, ...]:
        parameters = list(self.parameters.values())
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [(g, v) for g, v in zip(first, vector, strict=True) if g is not None and g.requires_grad]
        return torch.autograd.grad(
            [g for g, _ in used], parameters, [v for _, v in used], retain_graph=True, allow_unused=True
        )

    def _ggn(self, loss: Tensor, output: Tensor, vector: list[Tensor]) -> tuple[Tensor | None, ...]:
        parameters = list(self.parameters.values())
        dual = torch.zeros_like(output, requires_grad=True)
        pulled = torch.autograd.grad(output, parameters, dual, create_graph=True, allow_unused=True)
        used = [(p, v) for p, v in zip(pulled, vector, strict=True) if p is not None]
        (pushed,) = torch.autograd.grad([p for p, _ in used], dual, [v for _, v in used])  # J v
        (slope,) = torch.autograd.grad(loss, output, create_graph=True)
        (curved,) = torch.autograd.grad(slope, output, pushed, retain_graph=True)
        return torch.autograd.grad(output, parameters, curved, retain_graph=True, allow_unused=True)

    def _keeps_graph(self) -> bool:
        return self.settings.due(self.steps)[2]

    def _missing(self) -> list[str]:
        due = self.settings.due(self.steps)[2]
        return [] if self._graphs or not due else ["nothing was observed since the last step: backward(loss, output)"]

    def _update_curvature(self) -> None:
        """The graph is the curvature."""

    def _discard(self) -> None:
        self._graphs = []

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        if not self._graphs:
            raise ValueError("nothing was observed since the last step: backward(loss, output)")
        sizes = [p.numel() for p in self.parameters.values()]
        g = torch.cat([gradients[name].reshape(-1) if name in gradients else torch.zeros_like(p).view(-1)
                       for name, p in self.parameters.items()])  # fmt: skip

        def multiply(flat: Tensor) -> Tensor:
            parts = zip(self.parameters.items(), flat.split(sizes), strict=True)
            image = self.product({name: part.view(p.shape) for (name, p), part in parts})
            return torch.cat([part.reshape(-1) for part in image.values()]) + self.damping * flat

        start = self._state.get("/last")
        iterates = self._conjugate_gradients(multiply, g, None if start is None else start * self.warm_start)
        chosen = iterates[-1][0]
        if self.adapt and closure is not None:
            chosen = self._choose(iterates, closure)
        if self.warm_start:
            self._state["/last"] = chosen.clone()
        self._discard()
        parts = zip(self.parameters.items(), chosen.split(sizes), strict=True)
        return {name: part.view(p.shape) for (name, p), part in parts if name in gradients}

    def _conjugate_gradients(self, multiply: Any, g: Tensor, start: Tensor | None) -> list[tuple[Tensor, float]]:
        """Iterates of the solution of ``C x = g`` at growing distances, each with the fall of the loss that it promises."""
        x = torch.zeros_like(g) if start is None else start
        residual = g.clone() if start is None else g - multiply(x)
        direction = residual.clone()
        square = float(residual.dot(residual))
        kept: list[tuple[Tensor, float]] = []
        next_kept = 1
        promises: list[float] = [0.5 * float(x.dot(g + residual))]
        for iteration in range(1, self.max_iterations + 1):
            self.iterations = iteration
            if square <= 1e-30 * max(1.0, float(g.dot(g))):
                break
            image = multiply(direction)
            curvature = float(direction.dot(image))
            if curvature <= 0:  # only the Hessian's can be; what was found so far, or else the gradient itself
                if iteration == 1:
                    x = x + direction
                    promises.append(float(x.dot(g)))
                break
            step = square / curvature
            x = x + step * direction
            residual -= step * image
            previous, square = square, float(residual.dot(residual))
            direction = residual + (square / previous) * direction
            promises.append(0.5 * float(x.dot(g + residual)))
            if iteration >= next_kept:
                kept.append((x, promises[-1]))
                next_kept = math.ceil(iteration * _KEEP_GROWTH)
            window = max(10, iteration // 10)
            if iteration > window and promises[-1] > 0:
                gained = promises[-1] - promises[-1 - window]
                if gained < window * _PROGRESS * promises[-1]:
                    break
        return kept if kept and kept[-1][0] is x else [*kept, (x, promises[-1])]

    def _choose(self, iterates: list[tuple[Tensor, float]], closure: Closure) -> Tensor:
        """Backtrack over the iterates while the loss falls; adapt the damping to how well the model foretold it."""
        before = self._loss(closure)
        chosen, promised = iterates[-1]
        least = self._loss_after(chosen, closure)
        for earlier, promise in reversed(iterates[:-1]):
            loss = self._loss_after(earlier, closure)
            if not loss < least and math.isfinite(least):
                break
            chosen, promised, least = earlier, promise, loss
        if promised > 0:  # Levenberg and Marquardt's rule
            ratio = (before - least) / promised
            if not ratio >= 0.25:
                self.damping *= 1.5
            elif ratio > 0.75:
                self.damping *= 2 / 3
        for _ in range(_MOST_HALVINGS):
            if least < before:
                break
            chosen = 0.5 * chosen
            least = self._loss_after(chosen, closure)
        return chosen

    def _loss(self, closure: Closure) -> float:
        total = torch.tensor([float(closure())], dtype=torch.float64, device=self._device)
        self.ranks.sum_([total])
        return float(total) / self.ranks.size

    def _loss_after(self, direction: Tensor, closure: Closure) -> float:
        """The loss with parameters moved against ``direction``; they are put back bit for bit."""
        parameters = list(self.parameters.values())
        saved = [p.detach().clone() for p in parameters]
        parts = direction.split([p.numel() for p in parameters])
        try:
            for p, part in zip(parameters, parts, strict=True):
                p.sub_(part.view(p.shape).to(p.dtype))
            return self._loss(closure)
        finally:
            for p, old in zip(parameters, saved, strict=True):
                p.copy_(old)

    def _extra_state(self) -> dict[str, Any]:
        return {"damping": self.damping}

    def _load_extra(self, state: Any) -> None:
        self.damping = float(state["damping"])
