"""What the methods share that build a Fisher matrix from inputs and output gradients of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer.train.precondition._capture import Capture, FisherKind
from gossamer.train.precondition._interface import Preconditioner
from gossamer.train.precondition._layers import Affine, Lookup, Scaling, find_layers
from gossamer.train.precondition._likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from gossamer.train.precondition._settings import Settings, now

AnyLayer = Affine | Lookup | Scaling
LikelihoodName = Literal["categorical", "bernoulli", "gaussian"]
_LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
}


class LayerFisher(Preconditioner):
    """Statistics of layers, summed over micro-batches and ranks, as one process with the whole batch would have them.

    fisher: "exact" (the expectation over the model's labels, outputs x positions backward passes), "mc" (``samples``
        draws of labels, a backward pass each) or "empirical" (the data's labels, no pass of its own).
    likelihood: what the model's output stands for; its name or an instance. "empirical" does not ask.
    seed: of the draws; ranks draw differently.

    Raises:
        ValueError: a module with trained parameters is not supported, or shares them; it is named.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        fisher: FisherKind = "mc",
        likelihood: LikelihoodName | Likelihood = "categorical",
        samples: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(model, settings)
        if fisher not in ("exact", "mc", "empirical"):
            raise ValueError(f"fisher must be 'exact', 'mc' or 'empirical', got {fisher!r}")
        if isinstance(likelihood, str) and likelihood not in _LIKELIHOODS:
            raise ValueError(f"likelihood must be one of {', '.join(_LIKELIHOODS)}, got {likelihood!r}")
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.fisher = fisher
        self.samples = samples
        self.likelihood = _LIKELIHOODS[likelihood]() if isinstance(likelihood, str) else likelihood
        self.layers = find_layers(model, self.settings)
        self._generator = torch.Generator(self._device).manual_seed(seed * 65_537 + self.ranks.rank)
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._capture = Capture(
            model, self.layers, fisher, self._absorb_timed, self._wants_curvature, lambda: now(self.settings.loss_scale)
        )

    def observe(self, loss: Tensor, output: Tensor | None = None) -> None:
        """Run the backward passes of the exact or Monte-Carlo Fisher.

        Raises:
            ValueError: these are due, and ``output`` was not given.
        """
        if self.fisher == "empirical" or not self._wants_curvature():
            return
        if output is None:
            raise ValueError(f"fisher={self.fisher!r} needs the model's output: backward(loss, output)")
        with self._phase("capture"):
            self._capture.own_passes(output, self.likelihood, self.samples, self._generator)

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._capture.remove()

    @abstractmethod
    def _absorb(self, layer: AnyLayer, x: Tensor, g: Tensor, number: int) -> None:
        """Add an input and its output gradients (of the loss summed over predictions) to the sums."""

    @abstractmethod
    def _blank(self, layer: AnyLayer) -> dict[str, Tensor]:
        """Zero sums of a layer, by the names under which the curvature is kept."""

    @abstractmethod
    def _weight_of(self, layer: AnyLayer, key: str, predictions: float, rows: float) -> float:
        """What turns a sum into the mean that the curvature is."""

    def _sum(self, layer: AnyLayer, key: str) -> Tensor:
        name = f"{layer.name}/{key}"
        if name not in self._sums:
            self._sums.update({f"{layer.name}/{kind}": blank for kind, blank in self._blank(layer).items()})
        return self._sums[name]

    def _stored(self, layer: AnyLayer) -> torch.dtype:
        return self.settings.stored(layer.dtype)

    def _wants_curvature(self) -> bool:
        return self.settings.due(self.steps)[0]

    def _absorb_timed(self, layer: AnyLayer, x: Tensor, g: Tensor, number: int) -> None:
        if self.fisher != "empirical":  # inside the phase already
            self._absorb(layer, x, g, number)
            return
        with self._phase("capture"):
            self._absorb(layer, x, g, number)

    def _missing(self) -> list[str]:
        how = (
            "backward(loss, output)"
            if self.fisher != "empirical"
            else "a forward pass of the whole model with gradients"
        )
        return (
            [] if self._capture.total else [f"the curvature is due and nothing was observed since the last step: {how}"]
        )

    def _problems(self) -> list[str]:
        bad = []
        for name, total in self._sums.items():
            # A NaN or Inf in a row of a Gram matrix is on its diagonal too.
            entries = (
                total.diagonal(dim1=-2, dim2=-1) if total.dim() > 1 and total.shape[-1] == total.shape[-2] else total
            )
            if not torch.isfinite(entries).all():
                bad.append(name.rpartition("/")[0])
        return [f"the curvature of {', '.join(dict.fromkeys(bad))} holds NaN or Inf"] if bad else []

    def _discard(self) -> None:
        self._sums, self._rows, self._capture.total = {}, {}, 0

    def _update_curvature(self) -> None:
        for layer in self.layers:  # one that was not called has no rows, and its sums are zero
            if f"{layer.name}/{next(iter(self._blank_keys(layer)))}" not in self._sums:
                self._sums.update({f"{layer.name}/{kind}": blank for kind, blank in self._blank(layer).items()})
        names = [f"{layer.name}/{key}" for layer in self.layers for key in self._blank_keys(layer)]
        rows = [float(self._rows.get(layer.name, 0)) for layer in self.layers]
        counts = torch.tensor([float(self._capture.total), *rows], dtype=torch.float64, device=self._device)
        if self.ranks.size > 1:
            with self._phase("exchange"):
                self.ranks.sum_([counts, *(self._sums[name] for name in names)])
        predictions, *rows = counts.tolist()
        for layer, row_count in zip(self.layers, rows, strict=True):
            for key in self._blank_keys(layer):
                total = self._sums.pop(f"{layer.name}/{key}")
                if row_count:
                    total.mul_(self._weight_of(layer, key, predictions, row_count))
                    self._average(f"{layer.name}/{key}", total)
        self._discard()

    @abstractmethod
    def _blank_keys(self, layer: AnyLayer) -> tuple[str, ...]:
        """The keys of :meth:`_blank`."""

    def _average(self, name: str, current: Tensor) -> None:
        old = self._state.get(name)
        if old is None or self.settings.decay == 0:
            self._state[name] = current
        else:
            old.lerp_(current, 1 - self.settings.decay)

    def _extra_state(self) -> dict[str, object]:
        return {"generator": self._generator.get_state()}

    def _load_extra(self, state: object) -> None:
        assert isinstance(state, dict)
        self._generator.set_state(state["generator"])
