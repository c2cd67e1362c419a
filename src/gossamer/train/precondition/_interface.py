"""The one interface of all preconditioners.

A training step with any of them, beside any torch optimizer::

    output = model(x)
    preconditioner.backward(loss_function(output, y), output)
    preconditioner.step()  # .grad now holds the preconditioned gradient
    optimizer.step()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.train.precondition._costs import Clock, Costs
from gossamer.train.precondition._ranks import NonFiniteCurvature, Ranks
from gossamer.train.precondition._settings import Settings, now

Closure = Callable[[], Tensor | float]


class Preconditioner(ABC):
    """Replaces gradients by curvature-corrected ones, between ``backward`` and the optimizer's step.

    model: whose parameters' ``.grad`` it rewrites. settings: see :class:`Settings`.

    With several ranks the curvature is that of all ranks' batches together and the work of inverting is shared; the
    gradients themselves must be averaged already, by DDP or a :class:`gossamer.train.GradientExchanger`.
    """

    def __init__(self, model: nn.Module, settings: Settings | None = None) -> None:
        self.model = model
        self.settings = settings or Settings()
        self.ranks = Ranks(self.settings.group)
        self.steps = 0
        self.parameters = {
            f"{prefix}.{name}" if prefix else name: parameter
            for prefix, module in model.named_modules()
            if not self.settings.ignores(prefix, module)
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError("model has no parameter that is trained and not ignored")
        self._device = next(iter(self.parameters.values())).device
        self._state: dict[str, Tensor] = {}
        self._clock = Clock()

    def backward(self, loss: Tensor, output: Tensor | None = None) -> None:
        """``loss.backward()``, scaled by ``settings.loss_scale``, with what the method has to see before and during it.

        loss: the mean over the predictions of this (micro-)batch. output: what the model returned for it, of shape
        ``(batch, ..., outputs)``; methods that need none ignore it. Call it once per micro-batch.
        """
        self.observe(loss, output)
        scale = now(self.settings.loss_scale)
        (loss if scale == 1.0 else loss * scale).backward(retain_graph=self._keeps_graph())

    def observe(self, loss: Tensor, output: Tensor | None = None) -> None:  # noqa: B027
        """Take what the method needs from the graph of a (micro-)batch, before it is back-propagated.

        :meth:`backward` does this; call it yourself only where something else calls ``backward``.
        """

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> None:
        """Update what is due, and precondition the gradients in place.

        closure: computes the current batch's loss again; only methods that adapt their damping call it.

        Raises:
            NonFiniteCurvature: NaN or Inf in a gradient or in the curvature of any rank (``on_nonfinite="raise"``).
            ValueError: the curvature is due but nothing was observed.
        """
        curvature, inverse, precondition = self.settings.due(self.steps)
        if curvature and (missing := self.ranks.agree(self._missing())):
            raise ValueError("; ".join(missing))
        if (curvature or self.settings.on_nonfinite == "skip") and not self._healthy(curvature):
            self._discard()
            return
        if curvature:
            with self._phase("curvature"):
                self._update_curvature()
        if inverse:
            with self._phase("inverse"):
                self._update_inverse()
        if precondition:
            with self._phase("precondition"):
                self._rewrite_gradients(closure)
        self.steps += 1

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call :meth:`step` by itself before each step of ``optimizer``; returns the handle that undoes it."""
        return optimizer.register_step_pre_hook(lambda *_: self.step())

    def costs(self) -> Costs:
        """Seconds by phase and bytes by kind so far, on this rank."""
        self._clock.settle()
        nbytes: dict[str, int] = {}
        for name, tensor in self._state.items():
            kind = name.rpartition("/")[2]
            nbytes[kind] = nbytes.get(kind, 0) + tensor.nbytes
        return Costs(dict(self._clock.seconds), dict(self._clock.calls), nbytes)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on: the count of steps, curvature and inverses."""
        return {"method": type(self).__name__, "steps": self.steps, "tensors": dict(self._state), **self._extra_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a preconditioner made alike.

        Raises:
            ValueError: the state is of another method or of parameters of other shapes.
        """
        if state.get("method") != type(self).__name__:
            raise ValueError(f"state is that of {state.get('method')!r}, this is a {type(self).__name__}")
        for name, tensor in state["tensors"].items():
            expected = self._expected_shape(name)
            if expected is not None and tuple(tensor.shape) != expected:
                raise ValueError(f"state {name!r} has shape {tuple(tensor.shape)}, this model needs {expected}")
        self.steps = int(state["steps"])
        self._state = {name: tensor.to(self._device, copy=True) for name, tensor in state["tensors"].items()}
        self._load_extra(state)

    @abstractmethod
    def _update_curvature(self) -> None:
        """Take this step's statistics into the curvature."""

    def _update_inverse(self) -> None:  # noqa: B027
        """Make what :meth:`_directions` multiplies with."""

    @abstractmethod
    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        """The preconditioned gradients, by parameter's name; a name that is missing keeps its gradient."""

    def _keeps_graph(self) -> bool:
        """Whether :meth:`step` goes through the graph again."""
        return False

    def _missing(self) -> list[str]:
        """What should have been observed for this step and was not."""
        return []

    def _problems(self) -> list[str]:
        """What is not finite in the statistics of this step."""
        return []

    def _discard(self) -> None:  # noqa: B027
        """Forget the statistics of this step."""

    def _extra_state(self) -> dict[str, Any]:
        return {}

    def _load_extra(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        pass

    def _expected_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the state; None where it is not known beforehand."""
        return None

    def _phase(self, name: str) -> Any:
        return self._clock.phase(name, self._device)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def _healthy(self, curvature: bool) -> bool:
        gradients = self._gradients()
        problems = []
        if gradients:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients.values()))])
            if not math.isfinite(norms.sum().item()):
                bad = [name for name, norm in zip(gradients, norms.tolist(), strict=True) if not math.isfinite(norm)]
                problems.append(f"the gradients of {', '.join(bad)} hold NaN or Inf")
        if curvature:
            problems += self._problems()
        problems = self.ranks.agree(problems)
        if problems and self.settings.on_nonfinite == "raise":
            self._discard()
            raise NonFiniteCurvature("; ".join(problems))
        return not problems

    def _rewrite_gradients(self, closure: Closure | None) -> None:
        gradients = self._gradients()
        directions = self._directions(gradients, closure)
        if self.settings.kl_clip is not None and directions:
            product = sum(float((gradients[name] * direction).sum()) for name, direction in directions.items())
            step = now(self.settings.learning_rate) ** 2 * product
            if step > self.settings.kl_clip:
                torch._foreach_mul_(list(directions.values()), math.sqrt(self.settings.kl_clip / step))
        for name, direction in directions.items():
            gradients[name].copy_(direction)
