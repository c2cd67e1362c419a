"""The repeated blocks of a network and the linear layers inside them, found by structure and never by name.

A language model is a list of equal blocks between an embedding and a head. LLaMA calls it ``model.layers``, OPT
``model.decoder.layers``, GPT-2 ``transformer.h``: the list itself looks the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_KINDS = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Block:
    """One repeated block. ``name`` is its dotted path inside the model."""

    name: str
    module: nn.Module


def iter_blocks(model: nn.Module) -> list[Block]:
    """The blocks of ``model``, in order: its largest list of modules of one class that contain linear layers.

    The list with the most weights in linear layers wins; of nested lists (experts inside a block) the outer one.

    Raises:
        ValueError: there is no such list.

    >>> body = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    >>> [block.name for block in iter_blocks(nn.ModuleDict({"body": body, "head": nn.Linear(4, 9)}))]
    ['body.0', 'body.1', 'body.2']
    """
    best, best_size = None, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and (size := _linear_size(module)) > best_size:
            best, best_size = (name, module), size
    if best is None:
        raise ValueError(f"{type(model).__name__} has no list of equal blocks with linear layers in it")
    name, members = best
    prefix = f"{name}." if name else ""
    return [Block(f"{prefix}{index}", module) for index, module in enumerate(members)]


def _linear_size(members: nn.ModuleList) -> int:
    """Weights in the linear layers of ``members``; 0 unless all are of one class and each has some."""
    if len({type(member) for member in members}) != 1:
        return 0
    sizes = [sum(linear.weight.numel() for linear in linears(member).values()) for member in members]
    return sum(sizes) if all(sizes) else 0


def linears(block: Block | nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of ``block`` by their dotted path inside it, in the order of definition.

    GPT-2's ``Conv1D`` counts as one. It stores its weight transposed, as ``(in, out)``: read and write weights through
    :func:`dense_weight` and :func:`set_dense_weight`.
    """
    module = block.module if isinstance(block, Block) else block
    return {name: child for name, child in module.named_modules() if isinstance(child, _KINDS)}


def dense_weight(linear: nn.Linear) -> Tensor:
    """The weight of ``linear`` as ``(out, in)``; a view wherever the layer allows, so do not write to it."""
    weight = linear.weight.detach()
    return weight.t() if isinstance(linear, Conv1D) else weight


def set_dense_weight(linear: nn.Linear, weight: Tensor) -> None:
    """Overwrite the weight of ``linear`` in place with ``weight`` ``(out, in)``, cast to the layer's dtype.

    Raises:
        ValueError: ``weight`` has another shape.

    >>> layer = nn.Linear(3, 2); set_dense_weight(layer, torch.ones(2, 3)); dense_weight(layer).sum().item()
    6.0
    """
    own = dense_weight(linear)
    if weight.shape != own.shape:
        raise ValueError(f"weight must have shape {tuple(own.shape)}, got {tuple(weight.shape)}")
    with torch.no_grad():
        own.copy_(weight)
