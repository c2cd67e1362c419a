"""Preconditioned SGD: a preconditioner ``P = Q^T Q`` fitted by stochastic descent on a Lie group.

With v random and h = H v, the criterion ``E[h^T P h + v^T P^-1 v]`` is least where ``P = |H|^-1``; with h the gradient
itself, where P whitens gradients, ``P = E[g g^T]^(-1/2)`` (Li, IEEE TNNLS 2018 and 2022). A relative change E of Q,
``dQ = E Q``, changes it by ``2 (a^T E a - b^T E b)`` with ``a = Q h`` and ``b = Q^-T v``; every step follows this gradient
within the group.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from gossamer.train.precondition._interface import Closure, Preconditioner
from gossamer.train.precondition._layers import Affine, find_layers
from gossamer.train.precondition._settings import Settings

_TINY = 1e-30


class PSGD(Preconditioner):
    """PSGD for every trained parameter.

    kind: "kron" gives every tensor, seen as a matrix, a triangular factor per side; "affine" first joins weight and bias of
        a layer into one matrix; "lowrank" takes all parameters as one vector, ``Q = (I + U V^T) diag(d)``.
    criterion: "hessian" fits to products of the Hessian with noise, for which ``backward`` differentiates twice;
        "whitening" fits to the gradients.
    rate: step of the fit, relative to the largest entry of its gradient.
    max_size: sides longer than this get a diagonal factor.
    rank: of U and V, for "lowrank".
    seed: of the noise, the same on all ranks.

    ``settings.curvature_every`` is the period of the fit; damping is added to h as ``damping * v``, so that the curvature
    fitted is ``H + damping I``. There is nothing to invert.

    >>> model = nn.Linear(4, 3)
    >>> psgd = PSGD(model, criterion="whitening")
    >>> psgd.backward(model(torch.randn(8, 4)).square().mean())
    >>> psgd.step()
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        kind: Literal["kron", "affine", "lowrank"] = "kron",
        criterion: Literal["hessian", "whitening"] = "hessian",
        rate: float = 0.01,
        max_size: int = 2048,
        rank: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__(model, settings)
        if kind not in ("kron", "affine", "lowrank"):
            raise ValueError(f"kind must be 'kron', 'affine' or 'lowrank', got {kind!r}")
        if criterion not in ("hessian", "whitening"):
            raise ValueError(f"criterion must be 'hessian' or 'whitening', got {criterion!r}")
        if not 0 < rate < 1:
            raise ValueError(f"rate must be between 0 and 1, got {rate}")
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        self.kind, self.criterion, self.rate, self.max_size, self.rank = kind, criterion, rate, max_size, rank
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._noise: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._batches = 0
        joined = (
            [layer for layer in find_layers(model, self.settings) if isinstance(layer, Affine)]
            if kind == "affine"
            else []
        )
        self._joined = {layer.weight: layer.bias for layer in joined if layer.bias}

    def observe(self, loss: Tensor, output: Tensor | None = None) -> None:
        """Multiply the Hessian of the loss with this step's noise."""
        if self.criterion == "whitening" or not self.settings.due(self.steps)[0]:
            return
        with self._phase("capture"):
            if not self._noise:
                self._noise = self._draw()
            parameters = list(self.parameters.values())
            first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            used = [
                (g, v) for g, v in zip(first, self._noise.values(), strict=True) if g is not None and g.requires_grad
            ]
            second = torch.autograd.grad(
                [g for g, _ in used], parameters, [v for _, v in used], retain_graph=True, allow_unused=True
            )
            for name, h in zip(self.parameters, second, strict=True):
                if h is not None:
                    self._products[name] = self._products[name] + h if name in self._products else h.detach().clone()
            self._batches += 1

    def _draw(self) -> dict[str, Tensor]:
        return {name: torch.empty_like(p, requires_grad=False).normal_(generator=self._generator)
                for name, p in self.parameters.items()}  # fmt: skip

    def _missing(self) -> list[str]:
        if self.criterion == "hessian" and not self._batches:
            return ["the Hessian is due and nothing was observed since the last step: backward(loss)"]
        return []

    def _problems(self) -> list[str]:
        bad = [name for name, h in self._products.items() if not torch.isfinite(h).all()]
        return [f"the Hessian's products of {', '.join(bad)} hold NaN or Inf"] if bad else []

    def _discard(self) -> None:
        self._noise, self._products, self._batches = {}, {}, 0

    def _update_curvature(self) -> None:
        if self.criterion == "whitening":
            noise, products = self._draw(), {name: g.detach() for name, g in self._gradients().items()}
        else:
            noise = self._noise
            products = {
                name: self._products.get(name, torch.zeros_like(v)) / (self._batches * self.ranks.size)
                for name, v in noise.items()
            }
            with self._phase("exchange"):
                self.ranks.sum_([h.view(-1) for h in products.values()])
        products = {name: h + self.settings.damping * noise[name] for name, h in products.items()}
        if self.kind == "lowrank":
            self._fit_lowrank(_flat(noise, self.parameters), _flat(products, self.parameters))
        else:
            for name in products:
                if name not in self._joined.values():
                    self._fit_kron(name, self._matrix(noise, name), self._matrix(products, name))
        self._discard()

    def _matrix(self, tensors: dict[str, Tensor], name: str) -> Tensor:
        """A tensor as a matrix; with its bias as last column where these are joined."""
        tensor = tensors[name]
        matrix = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
        bias = self._joined.get(name)
        matrix = torch.cat([matrix, tensors[bias].unsqueeze(1)], 1) if bias else matrix
        return matrix.to(self.settings.stored(matrix.dtype))

    def _fit_kron(self, name: str, v: Tensor, h: Tensor) -> None:
        keys = f"{name}/left", f"{name}/right"
        if keys[0] not in self._state:
            scale = float((v.square().mean() / h.square().mean().clamp(min=_TINY)) ** 0.25)
            for key, size, start in zip(keys, v.shape, (scale, 1.0), strict=True):
                one = torch.ones(size, dtype=v.dtype, device=v.device) * start
                self._state[key] = one if size > self.max_size else torch.diag(one)
        left, right = (self._state[key] for key in keys)
        ratio = (_diagonal(left).max() / _diagonal(right).max()).sqrt()
        left /= ratio
        right *= ratio
        a = _times(right, _times(left, h).T).T
        b = _solve(left, _solve(right, v.T).T)
        for factor, x, y in ((left, a, b), (right, a.T, b.T)):
            if factor.dim() == 1:
                gradient = (x.square() - y.square()).sum(1)
                factor -= self.rate / gradient.abs().max().clamp(min=_TINY) * gradient * factor
            else:
                gradient = torch.triu(x @ x.T - y @ y.T)
                factor -= self.rate / gradient.abs().max().clamp(min=_TINY) * (gradient @ factor)

    def _fit_lowrank(self, v: Tensor, h: Tensor) -> None:
        if "/d" not in self._state:
            scale = float((v.square().mean() / h.square().mean().clamp(min=_TINY)) ** 0.25)
            self._state["/d"] = torch.full_like(v, scale)
            for key in ("/U", "/V"):
                noise = torch.empty(len(v), self.rank, dtype=v.dtype, device=v.device).normal_(
                    generator=self._generator
                )
                self._state[key] = noise * (0.1 * len(v) ** -0.5)
        u, w, d = self._state["/U"], self._state["/V"], self._state["/d"]
        eye = torch.eye(self.rank, dtype=v.dtype, device=v.device)
        a = d * h
        a = a + u @ (w.T @ a)
        b = v / d
        b = b - w @ torch.linalg.solve(eye + u.T @ w, u.T @ b)
        p_h = d * (a + w @ (u.T @ a))
        p_v = (b - u @ torch.linalg.solve(eye + w.T @ u, w.T @ b)) / d
        gradient = h * p_h - v * p_v
        # One of U and V a step: together they would count a change of their product twice.
        if torch.rand((), generator=self._generator, device=v.device) < 0.5:
            wa, wb = w.T @ a, w.T @ b
            rate = self.rate / (a.norm() * (w @ wa).norm() + b.norm() * (w @ wb).norm()).clamp(min=_TINY)
            u -= rate * ((torch.outer(a, wa) - torch.outer(b, wb)) @ (eye + w.T @ u))
        else:
            ua, ub = u.T @ a, u.T @ b
            rate = self.rate / (a.norm() * (u @ ua).norm() + b.norm() * (u @ ub).norm()).clamp(min=_TINY)
            change = torch.outer(a, ua) - torch.outer(b, ub)
            w -= rate * (change + w @ (u.T @ change))
        d -= self.rate / gradient.abs().max().clamp(min=_TINY) * gradient * d

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        if self.kind == "lowrank":
            u, w, d = self._state["/U"], self._state["/V"], self._state["/d"]
            y = d * _flat(gradients, self.parameters)
            y = y + u @ (w.T @ y)
            y = d * (y + w @ (u.T @ y))
            sizes = [p.numel() for p in self.parameters.values()]
            parts = zip(self.parameters.items(), y.split(sizes), strict=True)
            return {name: part.view(p.shape) for (name, p), part in parts if name in gradients}
        found: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            if name in self._joined.values() or f"{name}/left" not in self._state:
                continue
            left, right = self._state[f"{name}/left"], self._state[f"{name}/right"]
            y = _times(left, self._matrix(gradients, name))
            y = _times(right, y.T)
            y = _times(right, y, transposed=True).T
            y = _times(left, y, transposed=True)
            bias = self._joined.get(name)
            if bias:
                found[bias] = y[:, -1]
                y = y[:, :-1]
            found[name] = y.reshape(gradient.shape)
        return found

    def _extra_state(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def _load_extra(self, state: Any) -> None:
        self._generator.set_state(state["generator"])


def _flat(tensors: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) if name in tensors else torch.zeros_like(p).reshape(-1)
                      for name, p in parameters.items()])  # fmt: skip


def _diagonal(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.diagonal()


def _times(factor: Tensor, matrix: Tensor, transposed: bool = False) -> Tensor:
    """``Q X`` or ``Q^T X``."""
    if factor.dim() == 1:
        return factor.unsqueeze(1) * matrix
    return (factor.T if transposed else factor) @ matrix


def _solve(factor: Tensor, matrix: Tensor) -> Tensor:
    """``Q^-T X``."""
    if factor.dim() == 1:
        return matrix / factor.unsqueeze(1)
    return torch.linalg.solve_triangular(factor.T, matrix, upper=False)
