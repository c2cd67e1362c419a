"""Fine-tuning on a pruned base that stays compressed, with a low-rank repair of what pruning removed.

The base ``W`` of every layer is pruned once and stored as a bitmap; it is never trained, so its zeros are exact for good.
Two low-rank adapters are trained beside it: the task's LoRA, and a residual one that begins as the truncated singular
value decomposition of what pruning took away (SALR, AAAI 2026). Both run as one product. Backward passes decode the base
again instead of keeping a dense copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.compress._blocks import dense_weight, iter_blocks, linears
from gossamer.compress._masks import keep_n_of_m, keep_per_layer, keep_per_row
from gossamer.compress._statistics import LinearStatistics
from gossamer.weights import BitmapWeight

SELECTIONS = ("row", "layer", "2:4")
SCORES = ("magnitude", "wanda")
_EXACT_SVD = 4096
_OVERSAMPLE, _POWER_STEPS = 10, 4
_PANEL = 1 << 22
"""Entries that torch decodes at a time: scattering them takes several times their memory."""


@dataclass(frozen=True)
class SALRConfig:
    """How to prune and repair.

    sparsity: share of zeros; at 0 the base is not pruned. selection: "row" prunes as many in every row, "layer" ranks the
        whole matrix, "2:4" keeps two of every four (``sparsity`` must then be 0.5).
    score: "magnitude" as published, or "wanda": magnitude times root mean square of the input, which takes statistics.
    rank, alpha, dropout: of the task adapter, whose product is scaled by ``alpha / rank``; dropout touches it alone.
    residual_rank: of the repair, 0 for none. train_residual: whether it is trained.
    targets: last names of the layers to convert, all linear layers inside blocks by default.

    Raises:
        ValueError: from construction, naming the setting.
    """

    sparsity: float = 0.5
    selection: str = "row"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    residual_rank: int = 16
    train_residual: bool = True
    targets: tuple[str, ...] | None = None
    score: str = "magnitude"

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {', '.join(SELECTIONS)}, got {self.selection!r}")
        if self.score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {self.score!r}")
        if self.selection == "2:4" and self.sparsity != 0.5:
            raise ValueError(f"selection '2:4' prunes exactly half, got sparsity {self.sparsity}")
        if self.rank < 1 or self.residual_rank < 0:
            raise ValueError(f"need rank >= 1 and residual_rank >= 0, got {self.rank} and {self.residual_rank}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


def truncated_residual(removed: Tensor, rank: int, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``B`` ``(out, rank)`` and ``A`` ``(rank, in)``, float32, whose product is nearest to ``removed`` in Frobenius norm.

    Singular values are divided evenly between both. The energy that is left is at most ``1 - rank / min(out, in)`` of the
    whole, for any matrix.

    Args:
        removed: ``(out, in)``.
        rank: capped at ``min(out, in)``.
        scales: ``(in,)``: be nearest after inputs were multiplied by these (root mean squares of the inputs).

    Raises:
        ValueError: ``removed`` is no finite matrix, or ``scales`` are not positive.
    """
    if removed.ndim != 2 or not bool(removed.isfinite().all()):
        raise ValueError(f"removed must be a finite matrix, got shape {tuple(removed.shape)}")
    weighted = removed.float()
    if scales is not None:
        if scales.shape != (removed.shape[1],) or not bool((scales > 0).all()):
            raise ValueError(f"scales must be {removed.shape[1]} positive numbers, got shape {tuple(scales.shape)}")
        weighted = weighted * scales.float()
    rank = min(rank, *removed.shape)
    if min(removed.shape) <= _EXACT_SVD:
        left, values, right = _leading(weighted, rank)
    else:
        left, values, right = torch.svd_lowrank(weighted, min(rank + _OVERSAMPLE, *removed.shape), _POWER_STEPS)
        left, values, right = left[:, :rank], values[:rank], right[:, :rank].t()
    root = values.sqrt()
    second = root[:, None] * right
    return (left * root).contiguous(), (second if scales is None else second / scales.float()).contiguous()


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leading singular vectors through the eigenvectors of the smaller Gram matrix in float64: far faster than an SVD."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().t()
    energies, vectors = torch.linalg.eigh(wide @ wide.t())
    left = vectors.flip(1)[:, :rank]
    values = energies.flip(0)[:rank].clamp_min(0.0).sqrt()
    right = (left.t() @ wide) / values.clamp_min(1e-300)[:, None]
    right = torch.where((values > 1e-12 * values[:1].clamp_min(1e-300))[:, None], right, 0.0)
    if matrix.shape[0] > matrix.shape[1]:
        left, right = right.t(), left.t()
    return left.float(), values.float(), right.float()


class SparseBase(nn.Module):
    """A frozen matrix ``(out, in)`` without its zeros; decoded when it is needed, in forward and in backward passes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        stored = BitmapWeight.from_dense(weight.detach().cpu().contiguous(), layout="rows")
        self.shape, self.dtype = stored.shape, stored.dtype
        self._starts: list[int] | None = None
        for name, array in stored.arrays().items():
            self.register_buffer(name, array.to(weight.device))

    def arrays(self) -> dict[str, Tensor]:
        """The stored arrays, as :meth:`BitmapWeight.from_arrays` takes them."""
        return dict(self.named_buffers())

    def decode(self) -> Tensor:
        """The dense matrix, anew."""
        arrays = self.arrays()
        if arrays["bitmap"].device.type == "cpu":
            bitmap, values = arrays["bitmap"], arrays["values"]
            offsets = {"row_offset": arrays["row_offset"]}
            return BitmapWeight(self.shape, self.dtype, "rows", bitmap, values, offsets).to_dense()
        if self._starts is None:
            self._starts = arrays["row_offset"][:: _panel_rows(self.shape)].tolist()
        return _decoded_by_torch(arrays["bitmap"], arrays["values"].view(self.dtype), self.shape, self._starts)

    def fill(self, arrays: Mapping[str, Tensor]) -> None:
        """Take other stored arrays of the same shapes in place of its own.

        Raises:
            ValueError: their shapes differ.
        """
        for name, own in self.arrays().items():
            if arrays[name].shape != own.shape:
                raise ValueError(f"stored {name} has shape {tuple(arrays[name].shape)}, not {tuple(own.shape)}")
            own.copy_(arrays[name])
        self._starts = None

    def forward(self, x: Tensor) -> Tensor:
        """``x @ W.T`` in the dtype of ``x``."""
        product: Tensor = _Product.apply(x, self)
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())


class _Product(torch.autograd.Function):
    """``x @ W.T`` that remembers neither ``W`` nor ``x``: the gradient needs ``W`` alone, which is decoded anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: SparseBase) -> Tensor:
        ctx.base = base
        return F.linear(x, base.decode().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.base.decode().to(gradient.dtype), None


def _panel_rows(shape: tuple[int, int]) -> int:
    return max(1, _PANEL // max(shape[1], 1))


def _decoded_by_torch(bitmap: Tensor, values: Tensor, shape: tuple[int, int], starts: list[int]) -> Tensor:
    """Row-layout bitmap to dense with torch operations, for devices without a kernel of ours for this layout.

    A panel of rows at a time; ``starts`` says where the values of each begin, on the host, so that nothing waits for it.
    """
    dense = torch.zeros(shape, dtype=values.dtype, device=values.device)
    octets, bits = (
        bitmap.view(torch.uint8).view(shape[0], -1, 1),
        torch.arange(8, device=bitmap.device, dtype=torch.uint8),
    )
    rows = _panel_rows(shape)
    for panel, first, last in zip(range(len(starts)), starts, [*starts[1:], len(values)], strict=True):
        own = slice(panel * rows, (panel + 1) * rows)
        keep = ((octets[own] >> bits) & 1).flatten(1)[:, : shape[1]].bool()
        dense[own].masked_scatter_(keep, values[first:last])
    return dense


class SALRLinear(nn.Module):
    """A linear layer ``y = Ŵ x + s B A x + R_B R_A x + bias`` with ``Ŵ`` a :class:`SparseBase`.

    ``lora_A (rank, in)``, ``lora_B (out, rank)``, ``residual_A``, ``residual_B`` are float32 parameters; nothing else
    trains.

    Args:
        weight: the dense ``(out, in)`` matrix.
        bias: ``(out,)`` or None, frozen.
        statistics: of the layer's inputs: the repair is then nearest in the layer's output instead of its weights.

    Raises:
        ValueError: ``config.score`` is "wanda" and there are no statistics.
    """

    def __init__(
        self, weight: Tensor, config: SALRConfig, bias: Tensor | None = None, statistics: LinearStatistics | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.out_features, self.in_features = weight.shape
        scales = None if statistics is None else statistics.second_moment.sqrt().clamp_min(1e-6).to(weight.device)
        kept = torch.where(_keep(weight, config, scales), weight, torch.zeros_like(weight))
        self.base = SparseBase(kept)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        second, first = truncated_residual(weight.float() - kept.float(), config.residual_rank, scales)
        self.residual_A = nn.Parameter(first, requires_grad=config.train_residual)
        self.residual_B = nn.Parameter(second, requires_grad=config.train_residual)
        self.lora_A = nn.Parameter(torch.empty(config.rank, self.in_features, device=weight.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, config.rank, device=weight.device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    @property
    def scaling(self) -> float:
        """Of the task adapter's product."""
        return self.config.alpha / self.config.rank

    def forward(self, x: Tensor) -> Tensor:
        """``(..., in)`` to ``(..., out)``, in the dtype of ``x``."""
        y = self.base(x)
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        if self.training and self.config.dropout > 0:
            task = F.dropout(x, self.config.dropout) @ self.lora_A.to(x.dtype).t()
            y = y + (task @ self.lora_B.to(x.dtype).t()) * self.scaling
            return y + (x @ self.residual_A.to(x.dtype).t()) @ self.residual_B.to(x.dtype).t()
        first = torch.cat([self.lora_A, self.residual_A]).to(x.dtype)
        second = torch.cat([self.lora_B * self.scaling, self.residual_B], 1).to(x.dtype)
        return y + (x @ first.t()) @ second.t()

    def merged(self, densify: bool = False) -> Tensor:
        """The dense matrix that this layer computes, float32; it has no zeros left.

        Raises:
            ValueError: unless ``densify``: merging gives up what pruning gained.
        """
        if not densify:
            raise ValueError(
                "merging the adapters fills the zeros of the pruned base; say densify=True to do it anyway"
            )
        repair = self.residual_B @ self.residual_A
        return (self.base.decode().float() + self.scaling * self.lora_B @ self.lora_A + repair).detach()

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.config}"


def _keep(weight: Tensor, config: SALRConfig, scales: Tensor | None) -> Tensor:
    size = weight.detach().float().abs()
    if config.score == "wanda":
        if scales is None:
            raise ValueError("score 'wanda' needs statistics of the inputs")
        size = size * scales.float()
    if config.selection == "2:4":
        return keep_n_of_m(size, 2, 4)
    return (keep_per_row if config.selection == "row" else keep_per_layer)(size, config.sparsity)


def convert_(
    model: nn.Module,
    config: SALRConfig,
    statistics: Mapping[str, LinearStatistics] | None = None,
    progress: Any = lambda done, total: None,
) -> dict[str, SALRLinear]:
    """Replace the linear layers inside the blocks of ``model`` by :class:`SALRLinear`, in place; freeze all the rest.

    Args:
        statistics: by full layer name, for scores that need them and repairs that are nearest in the outputs; see
            :class:`SALRLinear`.

    Returns:
        The new layers by full name.

    Raises:
        ValueError: ``config.targets`` matches nothing, or 2:4 does not divide a layer.
    """
    found = {
        f"{block.name}.{name}": (block.module, name, layer)
        for block in iter_blocks(model)
        for name, layer in linears(block).items()
        if config.targets is None or name.rpartition(".")[2] in config.targets
    }
    if not found:
        raise ValueError(f"targets {config.targets} match no linear layer inside the blocks")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers: dict[str, SALRLinear] = {}
    for full, (block, name, layer) in found.items():
        own = None if statistics is None else statistics[full]
        layers[full] = SALRLinear(dense_weight(layer).contiguous(), config, layer.bias, own)
        parent, _, last = name.rpartition(".")
        setattr(block.get_submodule(parent), last, layers[full])
        progress(len(layers), len(found))
    return layers
