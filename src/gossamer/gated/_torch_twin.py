"""The same network for training in torch, and the loss of the original recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.gated._basis import catmull_rom
from gossamer.gated._network import PhaseFunctionedMLP


class TorchTwin(nn.Module):
    """Control points as parameters; ``forward(x, coefficients)`` mixes activations. Initialised from ``network``.

    Training follows Holden et al. (SIGGRAPH 2017): dropout before each layer, Adam at 1e-4, batches of 32,
    :meth:`loss` = mean squared error + 0.01 times the mean magnitude of the parameters, averaged over the tensors.

    >>> import numpy as np
    >>> network = PhaseFunctionedMLP.random([5, 7, 2])
    >>> twin = TorchTwin(network).eval()
    >>> x, phase = np.ones((3, 5), np.float32), np.array([0.1, 2.0, 6.0])
    >>> y = twin(torch.from_numpy(x), twin.coefficients(torch.from_numpy(phase)))
    >>> bool(np.allclose(y.detach(), twin.to_network().forward(x, phase), atol=1e-5))
    True
    """

    def __init__(self, network: PhaseFunctionedMLP, dropout: float = 0.3) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.tensor(layer.weights)) for layer in network.layers])
        self.biases = nn.ParameterList([nn.Parameter(torch.tensor(layer.bias)) for layer in network.layers])
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """``x`` ``(b, in)``, ``coefficients`` ``(b, p)``, to ``(b, out)``."""
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            points = torch.einsum("bi,pio->bpo", self.dropout(x), weight) + bias
            x = torch.einsum("bp,bpo->bo", coefficients, points)
            if number < len(self.weights) - 1:
                x = nn.functional.elu(x)
        return x

    @staticmethod
    def coefficients(phase: Tensor) -> Tensor:
        """Catmull-Rom coefficients of phases, without gradients towards the phase."""
        return torch.from_numpy(catmull_rom(phase.detach().cpu().numpy())).to(phase.device)

    def loss(self, x: Tensor, coefficients: Tensor, y: Tensor) -> Tensor:
        """Mean squared error with the recipe's penalty."""
        parameters = [*self.weights, *self.biases]
        penalty = torch.stack([parameter.abs().mean() for parameter in parameters]).mean()
        return nn.functional.mse_loss(self(x, coefficients), y) + 0.01 * penalty

    def to_network(self, weights_dtype: str = "f32") -> PhaseFunctionedMLP:
        """The trained parameters as a fast network."""
        weights, biases = ([p.detach().cpu().numpy() for p in group] for group in (self.weights, self.biases))
        return PhaseFunctionedMLP(weights, biases, weights_dtype=weights_dtype)
