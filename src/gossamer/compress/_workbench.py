"""What a search judges candidates on: one dense model, statistics of its layers, and texts it must not report on.

Everything that does not depend on the candidate is computed once: dense weights, input statistics with Hessians,
gradient statistics. To judge a candidate is then to mask the weights and to run one short text, without calibrating
again: all layers are pruned by the statistics of the dense model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.compress._blocks import Block, dense_weight, iter_blocks, linears, set_dense_weight
from gossamer.compress._calibrate import calibrate
from gossamer.compress._evaluate import perplexity
from gossamer.compress._gradients import GradientStatistics, gradient_statistics
from gossamer.compress._statistics import LinearStatistics

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``."""


def _silent(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, eq=False)
class BenchLayer:
    """One linear layer: ``weight`` is a copy of the dense ``(out, in)`` float32 one, ``module`` holds what is tried."""

    name: str
    block: int
    module: nn.Linear
    weight: Tensor
    statistics: LinearStatistics
    gradients: GradientStatistics | None


class Workbench:
    """A dense model whose layers can be replaced and restored.

    Args:
        model: a causal language model in float32; it is dense again whenever :meth:`trying` ends.
        calibration: ``(windows, seqlen)`` token ids for all statistics.
        gradients: also collect gradient statistics (a backward pass per window).
        hessian: also collect Hessians.
        progress: told how far calibration has come.
    """

    def __init__(
        self, model: nn.Module, calibration: Tensor, gradients: bool = True, hessian: bool = True,
        progress: Progress = _silent,
    ) -> None:  # fmt: skip
        self.model = model
        self.device = next(model.parameters()).device
        calibration = calibration.to(self.device)
        self.blocks: list[Block] = iter_blocks(model)
        found: dict[str, GradientStatistics] = {}
        if gradients:
            found = gradient_statistics(model, calibration, lambda done, total: progress("gradients", done, total))
        self.layers: list[BenchLayer] = []
        for step in calibrate(model, calibration, "dense", hessian=hessian):
            for name, module in linears(step.block).items():
                full = f"{step.block.name}.{name}"
                weight = dense_weight(module).float().clone(memory_format=torch.contiguous_format)
                own = step.statistics[name]
                self.layers.append(BenchLayer(full, step.index, module, weight, own, found.get(full)))
            progress("statistics", step.index + 1, step.total)

    @contextmanager
    def trying(self, weights: Iterator[tuple[BenchLayer, Tensor]]) -> Iterator[nn.Module]:
        """The model with these weights in place of the dense ones, until the block ends."""
        try:
            for layer, weight in weights:
                set_dense_weight(layer.module, weight)
            yield self.model
        finally:
            self.restore()

    def perplexity(self, weights: Iterator[tuple[BenchLayer, Tensor]], windows: Tensor) -> float:
        """Perplexity over ``windows`` ``(count, seqlen)`` with ``weights``; infinite where the model breaks down."""
        with self.trying(weights) as model:
            try:
                found = perplexity(model, windows.flatten().to(self.device), windows.shape[1])
            except OverflowError:
                return math.inf
        return found if math.isfinite(found) else math.inf

    def restore(self) -> None:
        """Put all dense weights back."""
        for layer in self.layers:
            set_dense_weight(layer.module, layer.weight)

    def weights_per_block(self) -> list[int]:
        """Weights in the linear layers of every block."""
        sizes = [0] * len(self.blocks)
        for layer in self.layers:
            sizes[layer.block] += layer.weight.numel()
        return sizes
