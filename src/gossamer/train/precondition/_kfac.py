"""Kronecker-factored approximate curvature.

The Fisher block of a linear layer is approximated by ``A (x) B``, A the mean of ``a a^T`` over its inputs and B that of
``g g^T`` over its output gradients (Martens and Grosse, ICML 2015; convolutions: Grosse and Martens, ICML 2016; positions
that share weights, "expand" and "reduce": Eschenhagen et al., NeurIPS 2023). No Kronecker product is ever formed:
``(A (x) B)^-1`` applied to a gradient G is ``B^-1 G A^-1``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer.train.precondition._capture import FisherKind
from gossamer.train.precondition._fisher import AnyLayer, LayerFisher, LikelihoodName
from gossamer.train.precondition._interface import Closure
from gossamer.train.precondition._layers import Affine, Lookup, Scaling
from gossamer.train.precondition._likelihood import Likelihood
from gossamer.train.precondition._ranks import assign_by_cost
from gossamer.train.precondition._settings import Settings
from gossamer.train.precondition._symmetric import add_gram_, damped_inverses, eigen, mirror_, zero_gram


class KFAC(LayerFisher):
    """K-FAC for Linear, Conv1d, Conv2d and Embedding layers; 2 x 2 blocks per unit for normalisation layers.

    sharing: how positions of an example enter, "expand" (each is a data point) or "reduce" (inputs averaged, gradients
        summed over them); an embedding always expands.
    solver: "cholesky" inverts ``A + pi sqrt(damping) I`` and ``B + sqrt(damping) / pi I``, where ``pi**2`` is the ratio of
        the mean eigenvalues of A and B; "eigen" inverts ``A (x) B + damping I`` itself, for about ten times the work.
    bias: "joint" treats it as the weight of an input that is always 1; "separate" divides it by B alone.

    Other arguments and errors: as :class:`LayerFisher`. An embedding's A is diagonal: the frequencies of its rows.

    >>> model = nn.Linear(4, 3)
    >>> kfac = KFAC(model, Settings(damping=0.01, inverse_every=10))
    >>> output = model(torch.randn(8, 4))
    >>> kfac.backward(nn.functional.cross_entropy(output, torch.arange(8) % 3), output)
    >>> kfac.step()
    >>> sorted(kfac.costs().nbytes.items())
    [('A_inverse', 100), ('B_inverse', 36)]
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
        sharing: Literal["expand", "reduce"] = "expand",
        solver: Literal["cholesky", "eigen"] = "cholesky",
        bias: Literal["joint", "separate"] = "joint",
    ) -> None:
        for name, given, accepted in (
            ("sharing", sharing, ("expand", "reduce")),
            ("solver", solver, ("cholesky", "eigen")),
            ("bias", bias, ("joint", "separate")),
        ):
            if given not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {given!r}")
        super().__init__(model, settings, fisher=fisher, likelihood=likelihood, samples=samples, seed=seed)
        self.sharing = sharing
        self.solver = solver
        self.bias = bias

    def factors(self) -> dict[str, Tensor]:
        """The curvature by layer: ``NAME/A`` and ``NAME/B`` (an embedding's A is a vector), ``NAME/block`` of norms.

        Empty after an inversion without averaging (``decay=0``), which leaves no factors.
        """
        kept = {name: t for name, t in self._state.items() if name.rpartition("/")[2] in ("A", "B", "block")}
        return {name: mirror_(t.clone()) if t.dim() == 2 else t.clone() for name, t in kept.items()}

    def _joint(self, layer: Affine) -> bool:
        return bool(layer.bias) and self.bias == "joint"

    def _blank_keys(self, layer: AnyLayer) -> tuple[str, ...]:
        return ("block",) if isinstance(layer, Scaling) else ("A", "B")

    def _blank(self, layer: AnyLayer) -> dict[str, Tensor]:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._stored(layer), device=layer.device)

        if isinstance(layer, Scaling):
            wide = 2 if layer.bias else 1
            return {"block": zeros(layer.width, wide, wide)}
        if isinstance(layer, Lookup):
            return {"A": zeros(layer.rows), "B": zeros(layer.width, layer.width)}
        sizes = {"A": layer.inputs + self._joint(layer), "B": layer.outputs}
        return {key: zero_gram(size, self._stored(layer), layer.device) for key, size in sizes.items()}

    def _absorb(self, layer: AnyLayer, x: Tensor, g: Tensor, number: int) -> None:
        dtype = self._stored(layer)
        if isinstance(layer, Scaling):
            each = layer.example_gradients(x.to(g.dtype), g).to(dtype).transpose(0, 1)  # (width, batch, 1 or 2)
            self._sum(layer, "block").baddbmm_(each.mT, each)
            self._rows[layer.name] = 1
            return
        out = layer.rows_out(g, x) if isinstance(layer, Lookup) else layer.rows_out(g)
        if self.sharing == "reduce" and isinstance(layer, Affine):
            out = out.sum(1, keepdim=True)
        add_gram_(self._sum(layer, "B"), out.reshape(-1, out.shape[-1]).to(dtype))
        if number == 0:
            self._absorb_inputs(layer, x, dtype)

    def _absorb_inputs(self, layer: Affine | Lookup, x: Tensor, dtype: torch.dtype) -> None:
        total = self._sum(layer, "A")
        rows = layer.rows_in(x)
        if isinstance(layer, Lookup):
            total += torch.bincount(rows.reshape(-1), minlength=layer.rows).to(dtype)
            self._rows[layer.name] = self._rows.get(layer.name, 0) + rows.numel()
            return
        if self.sharing == "reduce":
            rows = rows.mean(1, keepdim=True)
        rows = rows.reshape(-1, layer.inputs).to(dtype)
        add_gram_(total[: layer.inputs, : layer.inputs], rows)
        if self._joint(layer):
            total[-1, :-1] += rows.sum(0)
            total[-1, -1] += len(rows)
        self._rows[layer.name] = self._rows.get(layer.name, 0) + len(rows)

    def _weight_of(self, layer: AnyLayer, key: str, predictions: float, rows: float) -> float:
        return 1 / rows if key == "A" else 1 / predictions

    def _update_inverse(self) -> None:
        fresh = [layer for layer in self.layers if f"{layer.name}/{self._blank_keys(layer)[0]}" in self._state]
        jobs = []  # names and damping of the matrices to be inverted
        for layer in fresh:
            if isinstance(layer, Scaling):
                self._invert_blocks(layer)
                continue
            damping_a, damping_b = self._split_damping(layer)
            if isinstance(layer, Lookup):
                frequencies = self._state[f"{layer.name}/A"]
                if self.solver == "cholesky":
                    self._state[f"{layer.name}/A_inverse"] = 1 / (frequencies + damping_a)
                else:
                    self._state[f"{layer.name}/A_values"] = frequencies.clone()
            else:
                jobs.append((f"{layer.name}/A", damping_a))
            jobs.append((f"{layer.name}/B", damping_b))
        self._invert_shared(jobs)
        if self.settings.decay == 0:  # the next update replaces them
            for layer in fresh:
                for key in self._blank_keys(layer):
                    self._state.pop(f"{layer.name}/{key}", None)

    def _split_damping(self, layer: Affine | Lookup) -> tuple[float, float]:
        a, b = self._state[f"{layer.name}/A"], self._state[f"{layer.name}/B"]
        mean_a = float(a.mean() if a.dim() == 1 else a.diagonal().mean())
        mean_b = float(b.diagonal().mean())
        pi = math.sqrt(mean_a / mean_b) if mean_a > 0 and mean_b > 0 else 1.0
        root = math.sqrt(self.settings.damping)
        return pi * root, root / pi

    def _invert_blocks(self, layer: Scaling) -> None:
        block = self._state[f"{layer.name}/block"].to(torch.promote_types(self._stored(layer), torch.float32))
        damped = block + self.settings.damping * torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
        self._state[f"{layer.name}/block_inverse"] = torch.linalg.inv(damped)

    def _invert_shared(self, jobs: list[tuple[str, float]]) -> None:
        """Each rank inverts its share of the matrices; all get all inverses."""
        names = [name for name, _ in jobs]
        sizes = [len(self._state[name]) for name in names]
        owners = assign_by_cost([float(size) ** 3 for size in sizes], self.ranks.size)
        mine = [i for i, owner in enumerate(owners) if owner == self.ranks.rank]
        keep = self.settings.decay > 0
        kinds = ["inverse"] if self.solver == "cholesky" else ["values", "vectors"]
        for name in names:  # the old ones need not be there while the new ones are made
            for kind in kinds:
                self._state.pop(f"{name}_{kind}", None)
        matrices = [self._state[names[i]].clone() if keep else self._state.pop(names[i]) for i in mine]
        done: dict[str, Tensor] = {}
        if self.solver == "cholesky":
            inverses = damped_inverses(matrices, [jobs[i][1] for i in mine], [names[i] for i in mine])
            done = {f"{names[i]}_inverse": inverse for i, inverse in zip(mine, inverses, strict=True)}
        else:
            for i, (values, vectors) in zip(mine, eigen(matrices), strict=True):
                done |= {f"{names[i]}_values": values, f"{names[i]}_vectors": vectors}
        if self.ranks.size > 1:
            for i, name in enumerate(names):
                for kind in kinds:
                    if owners[i] != self.ranks.rank:
                        like = self._state[name]
                        wide = torch.promote_types(like.dtype, torch.float32)
                        shape = like.shape[:1] if kind == "values" else like.shape
                        done[f"{name}_{kind}"] = torch.empty(shape, dtype=wide, device=like.device)
            with self._phase("exchange"):
                ordered = [(f"{name}_{kind}", owners[i]) for i, name in enumerate(names) for kind in kinds]
                self.ranks.share_([done[name] for name, _ in ordered], [owner for _, owner in ordered])
        self._state.update(done)

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for layer in self.layers:
            key = {Affine: "B", Lookup: "B", Scaling: "block"}[type(layer)]
            ending = "values" if self.solver == "eigen" and key == "B" else "inverse"
            if f"{layer.name}/{key}_{ending}" not in self._state or layer.weight not in gradients:
                continue  # it never took part in a step
            if isinstance(layer, Scaling):
                inverse = self._state[f"{layer.name}/block_inverse"]
                pair = layer.pair(gradients).to(inverse.dtype)
                found |= layer.split((inverse @ pair.unsqueeze(-1)).squeeze(-1))
            elif isinstance(layer, Lookup):
                found[layer.weight] = self._solve_lookup(layer, gradients[layer.weight])
            elif layer.bias and self.bias == "separate":
                weight = gradients[layer.weight]
                found[layer.weight] = self._solve(layer, weight.reshape(layer.outputs, -1)).reshape(weight.shape)
                found[layer.bias] = self._solve_bias(layer, gradients[layer.bias])
            else:
                found |= layer.split(self._solve(layer, layer.matrix(gradients)))
        return found

    def _solve(self, layer: Affine, matrix: Tensor) -> Tensor:
        if self.solver == "cholesky":
            a, b = self._state[f"{layer.name}/A_inverse"], self._state[f"{layer.name}/B_inverse"]
            return b @ matrix.to(b.dtype) @ a
        (la, ua), (lb, ub) = self._eigen_of(layer, "A"), self._eigen_of(layer, "B")
        inner = (ub.T @ matrix.to(ub.dtype) @ ua) / (torch.outer(lb, la) + self.settings.damping)
        return ub @ inner @ ua.T

    def _solve_bias(self, layer: Affine, bias: Tensor) -> Tensor:
        if self.solver == "cholesky":
            inverse = self._state[f"{layer.name}/B_inverse"]
            return inverse @ bias.to(inverse.dtype)
        values, vectors = self._eigen_of(layer, "B")
        return vectors @ ((vectors.T @ bias.to(vectors.dtype)) / (values + self.settings.damping))

    def _solve_lookup(self, layer: Lookup, matrix: Tensor) -> Tensor:
        if self.solver == "cholesky":
            a, b = self._state[f"{layer.name}/A_inverse"], self._state[f"{layer.name}/B_inverse"]
            return (matrix.to(b.dtype) @ b) * a.unsqueeze(1)
        frequencies = self._state[f"{layer.name}/A_values"]
        values, vectors = self._eigen_of(layer, "B")
        inner = (matrix.to(vectors.dtype) @ vectors) / (torch.outer(frequencies, values) + self.settings.damping)
        return inner @ vectors.T

    def _eigen_of(self, layer: AnyLayer, key: str) -> tuple[Tensor, Tensor]:
        return self._state[f"{layer.name}/{key}_values"], self._state[f"{layer.name}/{key}_vectors"]
