"""Fisher matrices without most of their entries: the diagonal, or one block per unit.

Both are sums over examples of parts of ``G G^T``, with G the gradient of one example; a linear layer's is
``sum_t g_t a_t^T`` over its positions, made for a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gossamer.train.precondition._fisher import AnyLayer, LayerFisher
from gossamer.train.precondition._interface import Closure
from gossamer.train.precondition._layers import Affine, Lookup, Scaling
from gossamer.train.precondition._ranks import assign_by_cost
from gossamer.train.precondition._symmetric import damped_inverses

_CHUNK_ENTRIES = 1 << 22


class _PerExample(LayerFisher):
    """Sums of squares and blocks over examples, which need the batch to come first in every layer."""

    def _absorb(self, layer: AnyLayer, x: Tensor, g: Tensor, number: int) -> None:
        if x.shape[0] != self._capture.examples:
            raise ValueError(
                f"module {layer.name!r} got {x.shape[0]} rows for {self._capture.examples} examples: its examples "
                "cannot be told apart; keep the batch as first dimension, use KFAC, or ignore the module"
            )
        self._rows[layer.name] = 1
        self._absorb_examples(layer, x, g)

    def _absorb_examples(self, layer: AnyLayer, x: Tensor, g: Tensor) -> None:
        raise NotImplementedError

    def _weight_of(self, layer: AnyLayer, key: str, predictions: float, rows: float) -> float:
        return 1 / predictions

    def _wide(self, layer: AnyLayer) -> torch.dtype:
        return torch.promote_types(self._stored(layer), torch.float32)


class Diagonal(_PerExample):
    """The diagonal of the Fisher matrix: every gradient is divided by ``F_ii + damping``.

    Arguments and errors: as :class:`LayerFisher`. With ``fisher="empirical"`` and averaging this is what Adam's second
    moment would be without its root and with per-example gradients.
    """

    def _blank_keys(self, layer: AnyLayer) -> tuple[str, ...]:
        return ("weight", "bias") if layer.bias else ("weight",)

    def _blank(self, layer: AnyLayer) -> dict[str, Tensor]:
        names = {"weight": layer.weight, "bias": layer.bias}
        return {
            key: torch.zeros_like(self.parameters[names[key]], dtype=self._stored(layer), requires_grad=False)
            for key in self._blank_keys(layer)
        }

    def _absorb_examples(self, layer: AnyLayer, x: Tensor, g: Tensor) -> None:
        weight = self._sum(layer, "weight")
        if isinstance(layer, Affine):
            out = layer.rows_out(g).to(weight.dtype)
            flat = weight.view(layer.outputs, -1)
            if out.shape[1] == 1:
                flat.addmm_(out[:, 0].square().T, layer.rows_in(x)[:, 0].to(weight.dtype).square())
            else:
                for each in _example_gradients(layer, layer.rows_in(x).to(weight.dtype), out):
                    flat += each.square_().sum(0)
            if layer.bias:
                self._sum(layer, "bias").add_(out.sum(1).square().sum(0))
        elif isinstance(layer, Lookup):
            indices, sums = _by_row(layer, x, g.to(weight.dtype))
            weight.index_add_(0, indices, sums.square_())
        else:
            each = layer.example_gradients(x.to(g.dtype), g).to(weight.dtype).square_().sum(0)
            for name, part in zip(self._blank_keys(layer), each.unbind(-1), strict=True):
                self._sum(layer, name).add_(part.view_as(self._sum(layer, name)))

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        found = {}
        for layer in self.layers:
            for key, name in (("weight", layer.weight), ("bias", layer.bias)):
                inverse = self._state.get(f"{layer.name}/{key}_inverse")
                if inverse is not None and name in gradients:
                    found[name] = gradients[name] * inverse
        return found

    def _update_inverse(self) -> None:
        for layer in self.layers:
            for key in self._blank_keys(layer):
                name = f"{layer.name}/{key}"
                if name not in self._state:
                    continue
                fisher = self._state[name] if self.settings.decay else self._state.pop(name)
                self._state[f"{name}_inverse"] = (fisher.to(self._wide(layer)) + self.settings.damping).reciprocal_()


class UnitWise(_PerExample):
    """One Fisher block per unit: the weights into one output, and its bias (Le Roux et al., NIPS 2007; Ollivier, 2015).

    A linear layer keeps ``outputs`` matrices of ``inputs + 1`` rows, a norm 2 x 2 ones; an embedding its diagonal, because
    its units are single entries of one-hot rows. Arguments and errors: as :class:`LayerFisher`.
    """

    def _blank_keys(self, layer: AnyLayer) -> tuple[str, ...]:
        return ("diagonal",) if isinstance(layer, Lookup) else ("blocks",)

    def _blank(self, layer: AnyLayer) -> dict[str, Tensor]:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._stored(layer), device=layer.device)

        if isinstance(layer, Lookup):
            return {"diagonal": zeros(layer.rows, layer.width)}
        if isinstance(layer, Scaling):
            wide = 2 if layer.bias else 1
            return {"blocks": zeros(layer.width, wide, wide)}
        wide = layer.inputs + bool(layer.bias)
        return {"blocks": zeros(layer.outputs, wide, wide)}

    def _absorb_examples(self, layer: AnyLayer, x: Tensor, g: Tensor) -> None:
        total = self._sum(layer, self._blank_keys(layer)[0])
        if isinstance(layer, Lookup):
            indices, sums = _by_row(layer, x, g.to(total.dtype))
            total.index_add_(0, indices, sums.square_())
            return
        if isinstance(layer, Scaling):
            units = layer.example_gradients(x.to(g.dtype), g).to(total.dtype).transpose(0, 1)
            total.baddbmm_(units.mT, units)
            return
        rows, out = layer.rows_in(x).to(total.dtype), layer.rows_out(g).to(total.dtype)
        if layer.bias:
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
        for each in _example_gradients(layer, rows, out):
            units = each.transpose(0, 1)  # (outputs, examples, inputs)
            total.baddbmm_(units.mT, units)

    def _update_inverse(self) -> None:
        layers = [layer for layer in self.layers if f"{layer.name}/{self._blank_keys(layer)[0]}" in self._state]
        costs = [0.0 if isinstance(layer, Lookup) else float(self._blocks(layer).shape[-1]) ** 3 * len(self._blocks(layer))
                 for layer in layers]  # fmt: skip
        owners = assign_by_cost(costs, self.ranks.size)
        done = []
        for layer, owner in zip(layers, owners, strict=True):
            name = f"{layer.name}/{self._blank_keys(layer)[0]}"
            curvature = self._state[name].to(self._wide(layer))
            if owner != self.ranks.rank:
                done.append(torch.empty_like(curvature))
            elif isinstance(layer, Lookup):
                done.append((curvature + self.settings.damping).reciprocal_())
            else:
                done.append(self._inverse(name, curvature))
            if self.settings.decay == 0:
                del self._state[name]
        with self._phase("exchange"):
            self.ranks.share_(done, owners)
        for layer, inverse in zip(layers, done, strict=True):
            self._state[f"{layer.name}/{self._blank_keys(layer)[0]}_inverse"] = inverse

    def _inverse(self, name: str, blocks: Tensor) -> Tensor:
        if blocks.is_cuda or len(blocks[0]) < 64:  # too small to be worth a call each
            eye = torch.eye(len(blocks[0]), dtype=blocks.dtype, device=blocks.device)
            return torch.cholesky_inverse(torch.linalg.cholesky(blocks + self.settings.damping * eye))
        count = len(blocks)
        return torch.stack(damped_inverses(list(blocks.clone()), [self.settings.damping] * count, [name] * count))

    def _blocks(self, layer: AnyLayer) -> Tensor:
        return self._state[f"{layer.name}/blocks"]

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            inverse = self._state.get(f"{layer.name}/{self._blank_keys(layer)[0]}_inverse")
            if inverse is None or layer.weight not in gradients:
                continue
            if isinstance(layer, Lookup):
                found[layer.weight] = gradients[layer.weight] * inverse
                continue
            rows = layer.matrix(gradients) if isinstance(layer, Affine) else layer.pair(gradients)
            found |= layer.split((inverse @ rows.to(inverse.dtype).unsqueeze(-1)).squeeze(-1))
        return found


def _example_gradients(layer: Affine, rows: Tensor, out: Tensor) -> Iterator[Tensor]:
    """Weight gradients ``(examples, outputs, inputs)`` of a few examples at a time."""
    step = max(1, _CHUNK_ENTRIES // (layer.outputs * rows.shape[-1]))
    for start in range(0, len(rows), step):
        yield out[start : start + step].mT @ rows[start : start + step]


def _by_row(layer: Lookup, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """For every pair of an example and a row that it looked up: the row, and the sum of its gradients there."""
    indices, gradients = layer.rows_in(x), layer.rows_out(g, x)
    example = torch.arange(len(indices), device=x.device).unsqueeze(1)
    pairs, place = torch.unique(example * layer.rows + indices, return_inverse=True)
    sums = gradients.new_zeros(len(pairs), layer.width)
    sums.index_add_(0, place.reshape(-1), gradients.reshape(-1, layer.width))
    return pairs % layer.rows, sums
