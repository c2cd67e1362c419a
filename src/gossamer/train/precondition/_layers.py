"""The layers whose curvature is known, each as a sum over positions of ``gradient outer input``.

For an example with positions t (tokens, pixels; one in a plain layer) a linear layer's gradient is
``sum_t g_t a_t^T`` with inputs ``a_t`` and output gradients ``g_t``. A convolution is one whose inputs are its patches; an
embedding one whose inputs are one-hot; a normalisation scales its normalised input by a diagonal weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.train.precondition._settings import Settings

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)
SUPPORTED = "Linear, Conv1d, Conv2d, Embedding, LayerNorm, RMSNorm, GroupNorm, BatchNorm"


@dataclass(frozen=True)
class Layer:
    """A module with parameters of its own. weight, bias: their names in the model; bias is "" where there is none."""

    name: str
    module: nn.Module
    weight: str
    bias: str

    @property
    def device(self) -> torch.device:
        """Where its weight is."""
        return self._parameter().device

    @property
    def dtype(self) -> torch.dtype:
        """Its weight's."""
        return self._parameter().dtype

    def _parameter(self) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight


@dataclass(frozen=True)
class Affine(Layer):
    """Linear or convolution: weight ``(outputs, inputs)`` once a convolution's kernel is flattened."""

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self._parameter().shape[0]

    @property
    def inputs(self) -> int:
        """Columns of the flattened weight."""
        return self._parameter()[0].numel()

    def rows_in(self, x: Tensor) -> Tensor:
        """Inputs of shape ``(batch, positions, inputs)``."""
        if isinstance(self.module, nn.Linear):
            return x.reshape(x.shape[0], -1, x.shape[-1])
        return _patches(self.module, x)

    def rows_out(self, g: Tensor) -> Tensor:
        """Output gradients of shape ``(batch, positions, outputs)``."""
        if isinstance(self.module, nn.Linear):
            return g.reshape(g.shape[0], -1, g.shape[-1])
        return g.flatten(2).transpose(1, 2)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Weight and bias of ``tensors`` as one matrix ``(outputs, inputs [+ 1])``."""
        weight = tensors[self.weight].reshape(self.outputs, -1)
        return torch.cat([weight, tensors[self.bias][:, None]], 1) if self.bias else weight

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`matrix`."""
        shape = self._parameter().shape
        if not self.bias:
            return {self.weight: matrix.reshape(shape)}
        return {self.weight: matrix[:, :-1].reshape(shape), self.bias: matrix[:, -1]}


@dataclass(frozen=True)
class Lookup(Layer):
    """Embedding: weight ``(rows, width)``."""

    @property
    def rows(self) -> int:
        """Entries of the vocabulary."""
        return self._parameter().shape[0]

    @property
    def width(self) -> int:
        """Size of a vector."""
        return self._parameter().shape[1]

    def rows_in(self, x: Tensor) -> Tensor:
        """Indices of shape ``(batch, positions)``."""
        return x.reshape(x.shape[0], -1)

    def rows_out(self, g: Tensor, x: Tensor) -> Tensor:
        """Gradients of shape ``(batch, positions, width)``, zero where the index is that of padding."""
        g = g.reshape(g.shape[0], -1, g.shape[-1])
        padding = self.module.padding_idx
        assert padding is None or isinstance(padding, int)
        return g if padding is None else g * self.rows_in(x).ne(padding).unsqueeze(-1)


@dataclass(frozen=True)
class Scaling(Layer):
    """Normalisation: weight of ``width`` entries (any shape), and perhaps a bias of the same shape."""

    @property
    def width(self) -> int:
        """Entries of the weight."""
        return self._parameter().numel()

    def example_gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """Every example's gradient of weight and bias: ``(batch, width, 1 or 2)``."""
        normal = _normalised(self.module, x)
        parts = [g * normal, g] if self.bias else [g * normal]
        if isinstance(self.module, nn.LayerNorm | nn.RMSNorm):
            return torch.stack([part.reshape(len(x), -1, self.width).sum(1) for part in parts], -1)
        return torch.stack([part.reshape(len(x), self.width, -1).sum(2) for part in parts], -1)

    def pair(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Weight and bias of ``tensors`` side by side: ``(width, 1 or 2)``."""
        names = [self.weight, self.bias] if self.bias else [self.weight]
        return torch.stack([tensors[name].reshape(-1) for name in names], -1)

    def split(self, pair: Tensor) -> dict[str, Tensor]:
        """Undo :meth:`pair`."""
        names = [self.weight, self.bias] if self.bias else [self.weight]
        return {name: pair[:, i].reshape(self._parameter().shape) for i, name in enumerate(names)}


def find_layers(model: nn.Module, settings: Settings) -> list[Affine | Lookup | Scaling]:
    """The layers of ``model`` that have trained parameters and are not ignored.

    Raises:
        ValueError: some are not supported, or parameters are shared between modules; all of them are named.
    """
    layers: list[Affine | Lookup | Scaling] = []
    refused: list[str] = []
    owners: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False, remove_duplicate=False) if p.requires_grad}
        if not own or settings.ignores(name, module):
            continue
        shared = [f"{name}.{key} is also {owners[p]}" for key, p in own.items() if p in owners]
        refused += shared
        owners.update({p: f"{name}.{key}" for key, p in own.items()})
        kind, reason = _kind(module)
        if kind is None or not set(own) <= {"weight", "bias"} or "weight" not in own:
            reason = reason or f"its trained parameters are {', '.join(own)}"
            refused.append(f"{name or 'the model itself'} ({type(module).__name__}: {reason})")
        elif not shared:
            dot = f"{name}." if name else ""
            layers.append(kind(name, module, f"{dot}weight", f"{dot}bias" if "bias" in own else ""))
    if refused:
        raise ValueError(
            f"no curvature is known for: {'; '.join(refused)}. Supported are {SUPPORTED} with parameters of their own; "
            "name modules in Settings(ignore=[...]) to leave their gradients as they are"
        )
    return layers


def _kind(module: nn.Module) -> tuple[type[Affine] | type[Lookup] | type[Scaling] | None, str]:
    if isinstance(module, nn.Linear):
        return Affine, ""
    if isinstance(module, nn.Conv1d | nn.Conv2d) and not module.transposed:
        return (Affine, "") if module.groups == 1 else (None, f"{module.groups} groups")
    if isinstance(module, nn.Embedding):
        odd = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        return (Lookup, "") if not odd else (None, f"{odd[0]} is set")
    if isinstance(module, _NORMS):
        return Scaling, ""
    return None, ""


def _patches(conv: nn.Module, x: Tensor) -> Tensor:
    """The input of every output position: ``(batch, positions, channels * kernel)``."""
    assert isinstance(conv, nn.Conv1d | nn.Conv2d)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)
    sizes = [tuple(conv.kernel_size), tuple(conv.dilation), tuple(conv.stride)]
    if isinstance(conv, nn.Conv1d):
        x, sizes = x.unsqueeze(2), [(1, *size) for size in sizes]
    kernel, dilation, stride = sizes
    return F.unfold(x, kernel, dilation=dilation, stride=stride).transpose(1, 2)


def _normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """What the norm multiplies with its weight."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, eps=norm.eps)
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=norm.eps)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    own = norm.training or norm.running_mean is None
    if own:
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)
    return F.batch_norm(x, norm.running_mean, norm.running_var, training=False, eps=norm.eps)


def names_of(layers: Iterable[Layer]) -> set[str]:
    """The names of all their parameters."""
    return {name for layer in layers for name in (layer.weight, layer.bias) if name}
