"""Natural gradient with the whole Fisher matrix, by the Gram matrix of the batch.

With the scaled gradients of m examples (or draws of labels) as columns of U, ``F = U U^T``, and by Sherman, Morrison and
Woodbury ``(F + damping I)^-1 g = (g - U (damping I + U^T U)^-1 U^T g) / damping``: an m x m system whatever the number of
parameters (Ren and Goldfarb, 2019). U is never formed: the Gram matrix of a linear layer is the elementwise product of
those of its inputs and of its output gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.train.precondition._capture import FisherKind
from gossamer.train.precondition._fisher import AnyLayer, LayerFisher, LikelihoodName
from gossamer.train.precondition._interface import Closure
from gossamer.train.precondition._layers import Affine, Lookup, Scaling
from gossamer.train.precondition._likelihood import Likelihood
from gossamer.train.precondition._settings import Settings

Rows = tuple[Tensor, Tensor]


class SMW(LayerFisher):
    """The exact damped natural gradient for the Fisher matrix of the current batch; nothing is averaged over steps.

    Keeps inputs and output gradients of the batch. Arguments and errors: as :class:`LayerFisher`; ``decay`` must be 0.

    Every rank makes its rows of the Gram matrix from all ranks' inputs and output gradients, sent layer by layer.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        fisher: FisherKind = "empirical",
        likelihood: LikelihoodName | Likelihood = "categorical",
        samples: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(model, settings, fisher=fisher, likelihood=likelihood, samples=samples, seed=seed)
        if self.settings.decay:
            raise ValueError(
                f"decay must be 0 for SMW, whose Fisher matrix is that of one batch; got {self.settings.decay}"
            )
        self._pending: dict[str, list[Rows]] = {}
        self._kept: dict[str, Rows] = {}
        self._begin = 0

    def _blank_keys(self, layer: AnyLayer) -> tuple[str, ...]:
        return ()

    def _blank(self, layer: AnyLayer) -> dict[str, Tensor]:
        return {}

    def _weight_of(self, layer: AnyLayer, key: str, predictions: float, rows: float) -> float:
        return 1.0

    def _absorb(self, layer: AnyLayer, x: Tensor, g: Tensor, number: int) -> None:
        if x.shape[0] != self._capture.examples:
            raise ValueError(
                f"module {layer.name!r} got {x.shape[0]} rows for {self._capture.examples} examples: its examples "
                "cannot be told apart; keep the batch as first dimension, or ignore the module"
            )
        self._pending.setdefault(layer.name, []).append(self._rows_of(layer, x, g))

    def _rows_of(self, layer: AnyLayer, x: Tensor, g: Tensor) -> Rows:
        dtype = self._stored(layer)
        if isinstance(layer, Affine):
            return layer.rows_in(x).to(dtype), layer.rows_out(g).to(dtype)
        if isinstance(layer, Lookup):
            return layer.rows_in(x), layer.rows_out(g, x).to(dtype)
        return x.new_empty(len(x), 0), layer.example_gradients(x.to(g.dtype), g).to(dtype)

    def _problems(self) -> list[str]:
        bad = [name for name, batches in self._pending.items() if not all(map(_finite, batches))]
        return [f"the curvature of {', '.join(bad)} holds NaN or Inf"] if bad else []

    def _discard(self) -> None:
        super()._discard()
        self._pending.clear()

    def _update_curvature(self) -> None:
        total = torch.tensor([float(self._capture.total)], dtype=torch.float64, device=self._device)
        self.ranks.sum_([total])
        scale = float(total) ** -0.5
        self._kept = {}
        own = None
        for layer in self.layers:
            batches = self._pending.get(layer.name)
            if not batches:
                continue
            x, g = (torch.cat(parts) for parts in zip(*batches, strict=True))
            mine = x, g * scale
            self._kept[layer.name] = mine
            with self._phase("exchange"):
                everyone = [
                    torch.cat(self.ranks.gather(part)) if part.numel() or part.dim() > 2 else part for part in mine
                ]
            gram = _gram(layer, mine, (everyone[0], everyone[1]))
            if own is not None and gram.shape != own.shape:
                raise ValueError(
                    f"module {layer.name!r} took part in {len(gram)} of {len(own)} example gradients; every layer must be "
                    "called in every micro-batch, or be ignored"
                )
            own = gram if own is None else own.add_(gram)
        assert own is not None  # something was observed
        with self._phase("exchange"):
            parts = self.ranks.gather(own)
        self._state["/gram"] = torch.cat(parts)
        self._begin = sum(len(part) for part in parts[: self.ranks.rank])
        self._discard()

    def _update_inverse(self) -> None:
        gram = self._state["/gram"]
        wide = gram.double()
        wide.diagonal().add_(self.settings.damping)
        self._state["/factor"] = torch.linalg.cholesky(wide)

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        layers = [layer for layer in self.layers if layer.name in self._kept and layer.weight in gradients]
        factor = self._state["/factor"]
        end = self._begin + len(next(iter(self._kept.values()))[1])
        products = factor.new_zeros(len(factor))
        for layer in layers:
            products[self._begin : end] += _dot(layer, self._kept[layer.name], gradients).double()
        self.ranks.sum_([products])
        weights = torch.cholesky_solve(products.unsqueeze(1), factor).squeeze(1)[self._begin : end]
        found: dict[str, Tensor] = {}
        for layer in layers:
            rows = self._kept[layer.name]
            found |= _combine(layer, rows, weights.to(rows[1].dtype))
        found = {name: part.contiguous() for name, part in found.items()}
        self.ranks.sum_([part.view(-1) for part in found.values()])
        return {name: (gradients[name] - part) / self.settings.damping for name, part in found.items()}


def _finite(rows: Rows) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in rows)


def _gram(layer: AnyLayer, mine: Rows, everyone: Rows) -> Tensor:
    """Inner products of example gradients of ``mine`` with those of ``everyone``."""
    (x, g), (others_x, others_g) = mine, everyone
    if isinstance(layer, Scaling):
        return g.flatten(1) @ others_g.flatten(1).T
    positions = g.shape[1]
    if isinstance(layer, Affine):
        if positions > 1 and len(others_x) * positions**2 > layer.inputs * layer.outputs:
            gram = (g.mT @ x).flatten(1) @ (others_g.mT @ others_x).flatten(1).T
            return gram + g.sum(1) @ others_g.sum(1).T if layer.bias else gram
        same = x.flatten(0, 1) @ others_x.flatten(0, 1).T
        same = same + 1 if layer.bias else same
    else:
        same = (x.reshape(-1, 1) == others_x.reshape(1, -1)).to(g.dtype)
    pairs = same.mul_(g.flatten(0, 1) @ others_g.flatten(0, 1).T)
    return pairs.view(len(g), positions, len(others_g), -1).sum((1, 3))


def _dot(layer: AnyLayer, rows: Rows, gradients: dict[str, Tensor]) -> Tensor:
    """Inner products of every example's gradient with ``gradients``."""
    x, g = rows
    if isinstance(layer, Scaling):
        return g.flatten(1) @ layer.pair(gradients).reshape(-1).to(g.dtype)
    weight = gradients[layer.weight].to(g.dtype)
    if isinstance(layer, Lookup):
        return (weight[x] * g).sum((1, 2))
    found = ((g @ weight.reshape(layer.outputs, -1)) * x).sum((1, 2))
    return found + g.sum(1) @ gradients[layer.bias].to(g.dtype) if layer.bias else found


def _combine(layer: AnyLayer, rows: Rows, weights: Tensor) -> dict[str, Tensor]:
    """The sum of example gradients, weighted."""
    x, g = rows
    if isinstance(layer, Scaling):
        return layer.split(torch.einsum("n,nwk->wk", weights, g))
    weighted = (g * weights.view(-1, 1, 1)).flatten(0, 1)
    if isinstance(layer, Lookup):
        out = g.new_zeros(layer.rows, layer.width)
        return {layer.weight: out.index_add_(0, x.reshape(-1), weighted)}
    matrix = weighted.T @ x.flatten(0, 1)
    if layer.bias:
        matrix = torch.cat([matrix, weighted.sum(0).unsqueeze(1)], 1)
    return layer.split(matrix)
