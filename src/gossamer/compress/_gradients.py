"""How the loss depends on every weight: what a backward pass over calibration text leaves behind.

Two kinds of statistic come out of the same pass. Those per *sequence* are what gradient-based pruning metrics take
(Das et al., "GBLM-Pruner", 2023; Dong et al., "Pruner-Zero", ICML 2024): they see a weight's gradient after it was
summed over all tokens, where contributions of opposite sign cancel. Those per *token* do not cancel:
``fisher[i, j] = E_t (∂loss/∂y_i)² x_j²`` is the empirical Fisher information of weight ``(i, j)`` under the
assumption that tokens are independent, and its noise falls with the number of tokens instead of sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.compress._blocks import dense_weight, iter_blocks, linears

GRADIENT_SCALE = 100.0
"""Gradients of a sequence's mean loss are multiplied by this, as published metrics take them."""


@dataclass
class GradientStatistics:
    """Sums over the sequences seen, of one linear layer with weight ``(out, in)``; float32.

    magnitude: Σ |g|; energy: Σ g², where g is ``GRADIENT_SCALE`` times the gradient of one sequence's mean loss.
    token_energy: Σ_t (∂L/∂y_i)² x_j², ``(out, in)``; output_energy: Σ_t (∂L/∂y_i)², ``(out,)``, where L is the summed loss.
    """

    magnitude: Tensor
    energy: Tensor
    token_energy: Tensor
    output_energy: Tensor
    tokens: int = 0

    @classmethod
    def zeros_like(cls, weight: Tensor) -> GradientStatistics:
        """Nothing seen yet of a layer with ``weight`` ``(out, in)``, on its device."""
        like = torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.contiguous_format)
        return cls(like, like.clone(), like.clone(), like[:, 0].clone())

    def update(self, x: Tensor, gradient: Tensor, predicted: int) -> None:
        """Add one sequence: inputs ``(tokens, in)``, gradients of the summed loss at the outputs ``(tokens, out)``."""
        of_sequence = (gradient.t() @ x).mul_(GRADIENT_SCALE / predicted)
        self.magnitude += of_sequence.abs()
        self.energy += of_sequence.square_()
        squared = gradient.square()
        self.token_energy.addmm_(squared.t(), x.square())
        self.output_energy += squared.sum(0)
        self.tokens += len(x)

    @property
    def l2(self) -> Tensor:
        """``sqrt(Σ g²)`` over sequences, ``(out, in)``: the terminal G of published metrics."""
        return self.energy.sqrt()

    @property
    def fisher(self) -> Tensor:
        """``E_t (∂L/∂y_i)² x_j²``, ``(out, in)``."""
        return self.token_energy / max(self.tokens, 1)

    @property
    def output_fisher(self) -> Tensor:
        """``E_t (∂L/∂y_i)²``, ``(out,)``."""
        return self.output_energy / max(self.tokens, 1)

    @property
    def weighted_moment(self) -> Tensor:
        """E x² of every input with each token weighted by the squared gradient of all outputs at it, ``(in,)``.

        What :attr:`fisher` tells of inputs without its noise: it is averaged over all rows.
        """
        return self.token_energy.sum(0) / self.output_energy.sum().clamp_min(1e-30)


def gradient_statistics(
    model: nn.Module, windows: Tensor, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, GradientStatistics]:
    """Statistics of the next-token loss of ``model`` for every linear layer inside its blocks, by its full name.

    One forward and one backward pass per window; gradients of parameters are never stored. The model is put into eval
    mode, and its parameters are as they were afterwards.

    Args:
        model: a causal language model of transformers, float32.
        windows: ``(sequences, seqlen)`` int64 token ids.
        progress: called after every window.

    Raises:
        ValueError: ``windows`` is not 2-D with at least two tokens each, or a layer's gradients are zero or not finite.
    """
    if windows.ndim != 2 or len(windows) == 0 or windows.shape[1] < 2:
        raise ValueError(f"windows must have shape (sequences, seqlen >= 2), got {tuple(windows.shape)}")
    model.eval()
    layers = {f"{block.name}.{name}": layer for block in iter_blocks(model) for name, layer in linears(block).items()}
    statistics = {name: GradientStatistics.zeros_like(dense_weight(layer)) for name, layer in layers.items()}
    handles = [
        layer.register_forward_hook(_watcher(statistics[name], windows.shape[1] - 1)) for name, layer in layers.items()
    ]
    wanted = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        for index, window in enumerate(windows):
            _backward(model, window)
            progress(index + 1, len(windows))
    finally:
        for handle in handles:
            handle.remove()
        for parameter, requires in wanted.items():
            parameter.requires_grad_(requires)
    _check(statistics)
    return statistics


def _backward(model: nn.Module, window: Tensor) -> None:
    """Back-propagate the summed loss of ``window``; only activations get gradients."""
    embed: Any = model.get_input_embeddings  # of PreTrainedModel, which nn.Module does not know
    embedding = embed()(window[None]).detach().requires_grad_()
    logits = model(inputs_embeds=embedding, use_cache=False).logits[0, :-1].float()
    F.cross_entropy(logits, window[1:], reduction="sum").backward()


def _watcher(statistics: GradientStatistics, predicted: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0].detach().reshape(-1, args[0].shape[-1]).float()

        def look(gradient: Tensor) -> None:
            statistics.update(x, gradient.reshape(-1, gradient.shape[-1]).float(), predicted)

        output.register_hook(look)

    return watch


def _check(statistics: dict[str, GradientStatistics]) -> None:
    for name, own in statistics.items():
        if not bool(own.energy.isfinite().all()):
            raise ValueError(f"the gradients of layer {name} are not finite on the calibration text")
        if not bool(own.energy.any()):
            raise ValueError(f"the gradients of layer {name} are all zero: the calibration text does not reach it")
