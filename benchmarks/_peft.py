"""Layers and models of PEFT, the peer of adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Adapter = tuple[Tensor, Tensor, float]
"""``A (rank, in)``, ``B (out, rank)`` and the scale of their product."""


def peft_layer(
    shape: tuple[int, int], count: int, rank: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Any, list[Adapter]]:
    """PEFT's LoRA layer ``(out, in)`` with all of ``count`` adapters active and unmerged, and their matrices."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.lora import LoraConfig

    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=2 * rank)
    layer: Any = LoraLinear(nn.Linear(shape[1], shape[0], bias=False), "0", config=config, r=rank, lora_alpha=2 * rank)
    for number in range(1, count):
        layer.update_layer(str(number), rank, lora_alpha=2 * rank, config=config)
    names = [str(number) for number in range(count)]
    for name in names:
        nn.init.normal_(layer.lora_B[name].weight, std=0.02)
    layer.set_adapter(names)
    layer = layer.to(device, dtype).eval()
    adapters = [(layer.lora_A[n].weight.data, layer.lora_B[n].weight.data, layer.scaling[n]) for n in names]
    return layer, adapters


def peft_lora(model: nn.Module, rank: int) -> nn.Module:
    """``model`` with PEFT's LoRA on all linear layers but the head; its adapters are float32, as PEFT makes them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    found: nn.Module = get_peft_model(model, config)
    return found
