"""Shampoo: a preconditioner per dimension of every tensor, from its gradients alone.

For a gradient G of order k the statistic of dimension i is the sum of ``mat_i(G) mat_i(G)^T``; G is multiplied along each
dimension with that statistic to the power ``-1 / (2 k)`` (Gupta et al., ICML 2018). Small dimensions are merged and large
ones cut into blocks, as in its scalable form (Anil et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch
from torch import Tensor, nn

from gossamer.train.precondition._interface import Closure, Preconditioner
from gossamer.train.precondition._ranks import assign_by_cost
from gossamer.train.precondition._roots import inverse_roots
from gossamer.train.precondition._settings import Settings
from gossamer.train.precondition._symmetric import add_gram_

_BATCH_ENTRIES = 1 << 26


@dataclass(frozen=True)
class _Block:
    """A part of a parameter. shape: of the merged parameter; where: the block's slices in it."""

    name: str
    shape: tuple[int, ...]
    where: tuple[slice, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.where)

    def key(self, mode: int) -> str:
        starts = ",".join(str(part.start) for part in self.where)
        return f"{self.name}[{starts}]:{mode}"


class Shampoo(Preconditioner):
    """Shampoo for every trained parameter, of whatever layer.

    settings: ``damping`` is relative to the largest eigenvalue of each statistic; ``decay=0`` adds up all gradients, as
        published, and a decay averages them.
    block_size: dimensions are merged up to this size and cut into blocks of it.
    root: how to make the roots: "eigen", "newton" or "auto", see :func:`inverse_roots`.
    graft: give every preconditioned gradient its gradient's norm, so that a learning rate tuned for SGD fits.

    Needs no ``backward`` of its own: ``loss.backward()`` does.

    >>> model = nn.Linear(4, 3)
    >>> shampoo = Shampoo(model, Settings(damping=1e-6))
    >>> model(torch.randn(8, 4)).square().mean().backward()
    >>> shampoo.step()
    >>> sorted(shampoo.costs().nbytes)
    ['root', 'statistic']
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings | None = None,
        *,
        block_size: int = 1024,
        root: Literal["auto", "eigen", "newton"] = "auto",
        graft: bool = False,
    ) -> None:
        super().__init__(model, settings)
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if root not in ("auto", "eigen", "newton"):
            raise ValueError(f"root must be 'auto', 'eigen' or 'newton', got {root!r}")
        self.root = root
        self.graft = graft
        self._blocks = [
            block for name, parameter in self.parameters.items() for block in _cut(name, parameter.shape, block_size)
        ]

    def _update_curvature(self) -> None:
        decay = self.settings.decay
        gradients = self._gradients()
        for block in self._blocks:
            if block.name not in gradients:
                continue
            part = gradients[block.name].reshape(block.shape)[block.where]
            for mode, size in enumerate(block.sizes):
                name = f"{block.key(mode)}/statistic"
                dtype = self.settings.stored(part.dtype)
                if name not in self._state:
                    self._state[name] = torch.zeros(size, size, dtype=dtype, device=part.device)
                elif decay:
                    self._state[name].mul_(decay)
                rows = part.movedim(mode, -1).reshape(-1, size).to(dtype)
                add_gram_(self._state[name], rows, 1 - decay if decay else 1.0)

    def _update_inverse(self) -> None:
        jobs = [
            (f"{block.key(mode)}", size, 2 * len(block.sizes))
            for block in self._blocks
            for mode, size in enumerate(block.sizes)
            if f"{block.key(mode)}/statistic" in self._state
        ]
        owners = assign_by_cost([float(size) ** 3 for _, size, _ in jobs], self.ranks.size)
        mine = [job for job, owner in zip(jobs, owners, strict=True) if owner == self.ranks.rank]
        for batch in _batches(mine, self._device.type):
            statistics = [self._state[f"{key}/statistic"] for key, _, _ in batch]
            stack = statistics[0].unsqueeze(0) if len(batch) == 1 else torch.stack(statistics)
            for key, _, _ in batch:
                self._state.pop(f"{key}/root", None)  # the old ones need not be there while the new ones are made
            roots = inverse_roots(stack, batch[0][2], self.settings.damping, self.root)
            for (key, _, _), root in zip(batch, roots.unbind(), strict=True):
                self._state[f"{key}/root"] = root if len(batch) == 1 else root.clone()
        if self.ranks.size > 1:
            for key, _, _ in jobs:
                statistic = self._state[f"{key}/statistic"]
                wide = torch.promote_types(statistic.dtype, torch.float32)
                self._state.setdefault(f"{key}/root", torch.empty_like(statistic, dtype=wide))
            with self._phase("exchange"):
                self.ranks.share_([self._state[f"{key}/root"] for key, _, _ in jobs], owners)

    def _directions(self, gradients: dict[str, Tensor], closure: Closure | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for block in self._blocks:
            if block.name not in gradients or f"{block.key(0)}/root" not in self._state:
                continue
            gradient = gradients[block.name]
            part = gradient.reshape(block.shape)[block.where]
            for mode in range(len(block.sizes)):
                root = self._state[f"{block.key(mode)}/root"]
                part = torch.tensordot(part.to(root.dtype), root, dims=([0], [0]))  # the other dimensions move up
            if block.sizes == block.shape:
                found[block.name] = part.view(gradient.shape)
            else:
                whole = found.setdefault(block.name, part.new_empty(gradient.shape))
                whole.view(block.shape)[block.where] = part
        if self.graft:
            names = list(found)
            before = torch._foreach_norm([gradients[name] for name in names])
            after = torch._foreach_norm([found[name] for name in names])
            for name, old, new in zip(names, before, after, strict=True):
                found[name] *= old / new.clamp(min=torch.finfo(new.dtype).tiny)
        return found


def _merged(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """Neighbouring dimensions multiplied while the product stays within ``limit``; ones disappear.

    >>> _merged((64, 32, 3, 3), 512)
    (64, 288)
    """
    out: list[int] = []
    for size in reversed(shape):
        if out and out[0] * size <= limit:
            out[0] *= size
        elif size > 1 or not out:
            out.insert(0, size)
    return tuple(out) or (1,)


def _cut(name: str, shape: tuple[int, ...], limit: int) -> Iterator[_Block]:
    merged = _merged(tuple(shape), limit)
    cuts = []
    for size in merged:
        count = math.ceil(size / limit)
        edges = [size * i // count for i in range(count + 1)]  # as equal as can be
        cuts.append([slice(a, b) for a, b in pairwise(edges)])
    for where in product(*cuts):
        yield _Block(name, merged, where)


def _batches(jobs: list[tuple[str, int, int]], device: str) -> Iterator[list[tuple[str, int, int]]]:
    """Jobs of one size and root together: all that fit on a GPU, one on a CPU, which gains nothing from more."""
    groups: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for job in jobs:
        groups.setdefault(job[1:], []).append(job)
    for (size, _), group in groups.items():
        step = max(1, _BATCH_ENTRIES // size**2) if device == "cuda" or size <= 64 else 1
        for start in range(0, len(group), step):
            yield group[start : start + step]
