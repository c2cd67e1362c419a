"""Catches the inputs of layers and the gradients of their outputs, in the steps in which the curvature is due.

The empirical Fisher takes output gradients from the ordinary backward pass. The exact and the Monte-Carlo Fisher need
backward passes of their own from the model's output; these go to the outputs of layers only, never to weights, so that
they cost half of an ordinary one and wake no hook of DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gossamer.train.precondition._layers import Affine, Lookup, Scaling
from gossamer.train.precondition._likelihood import Likelihood

FisherKind = Literal["exact", "mc", "empirical"]
Absorb = Callable[["Affine | Lookup | Scaling", Tensor, Tensor, int], None]


class Capture:
    """Hooks on layers that hand ``(layer, input, output gradients, number of the pass)`` to ``absorb``.

    absorb: called once per layer and backward pass, with gradients of the sum over predictions of the loss.
    wanted: says whether the current step needs the curvature.
    scale: what the ordinary loss is multiplied with.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Affine | Lookup | Scaling],
        kind: FisherKind,
        absorb: Absorb,
        wanted: Callable[[], bool],
        scale: Callable[[], float],
    ) -> None:
        self.kind = kind
        self.absorb = absorb
        self.wanted = wanted
        self.scale = scale
        self.predictions = 0
        self.examples = 0
        self.total = 0  # predictions of all micro-batches of this step whose gradients came
        self._counted = True
        self._calls: dict[str, tuple[Affine | Lookup | Scaling, Tensor, GradientEdge]] = {}
        self._open = False
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(lambda *_: self._begin()),
        ]
        for layer in layers:
            self._handles.append(layer.module.register_forward_hook(self._hook(layer)))
        # Last: the model may be a layer itself.
        self._handles.append(model.register_forward_hook(lambda _module, _args, output: self._end(output)))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def own_passes(self, output: Tensor, likelihood: Likelihood, samples: int, generator: torch.Generator) -> None:
        """The backward passes of the exact or the Monte-Carlo Fisher."""
        self._count(output)
        detached = output.detach()
        if self.kind == "exact":
            seeds = likelihood.exact(detached)
        else:
            weight = samples**-0.5  # the mean over samples of outer products
            seeds = (likelihood.sample(detached, generator) * weight for _ in range(samples))
        calls = list(self._calls.values())
        edges = [edge for _, _, edge in calls]
        for number, seed in enumerate(seeds):
            found = torch.autograd.grad(output, edges, seed, retain_graph=True, allow_unused=True)
            with torch.no_grad():
                for (layer, x, _), g in zip(calls, found, strict=True):
                    if g is not None:
                        self._deliver(layer, x, g, number)
        self._calls.clear()

    def _begin(self) -> None:
        self._open = torch.is_grad_enabled() and self.wanted()
        self._calls.clear()

    def _end(self, output: Any) -> None:
        """The graph of the forward pass is complete; the ordinary backward pass needs to know its size."""
        if self._open and self.kind == "empirical" and isinstance(output, Tensor):
            self._count(output)
        self._open = False

    def _count(self, output: Tensor) -> None:
        if output.dim() < 2:
            raise ValueError(f"output must have shape (batch, ..., outputs), got {tuple(output.shape)}")
        self.examples = output.shape[0]
        self.predictions = output.numel() // output.shape[-1]
        self._counted = False

    def _hook(self, layer: Affine | Lookup | Scaling) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def seen(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._open or not output.requires_grad:
                return
            if layer.name in self._calls:
                raise ValueError(
                    f"module {layer.name!r} is called more than once in a forward pass; its weight is shared then, which "
                    "no curvature here covers: name it in Settings(ignore=[...])"
                )
            x = args[0].detach()
            self._calls[layer.name] = layer, x, get_gradient_edge(output)
            if self.kind == "empirical":
                output.register_hook(lambda g: self._ordinary(layer, x, g))

        return seen

    @torch.no_grad()
    def _ordinary(self, layer: Affine | Lookup | Scaling, x: Tensor, g: Tensor) -> None:
        if not self.predictions:
            raise ValueError(
                "the model's output must be one tensor of shape (batch, ..., outputs), or fisher not empirical"
            )
        self._deliver(layer, x, g * (self.predictions / self.scale()), 0)

    def _deliver(self, layer: Affine | Lookup | Scaling, x: Tensor, g: Tensor, number: int) -> None:
        if x.shape[0] not in (self.examples, self.predictions):
            raise ValueError(
                f"module {layer.name!r} got an input of shape {tuple(x.shape)}, whose first dimension is neither the batch "
                f"({self.examples}) nor the predictions ({self.predictions}) of the output; keep the batch first "
                "(positions of an embedding: expand them to the batch), or ignore the module"
            )
        if not self._counted:
            self.total += self.predictions
            self._counted = True
        self.absorb(layer, x, g, number)
