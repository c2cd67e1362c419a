"""Random language models, one per family, small enough to run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96
_LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_LLAMA_LIKE),
    "mistral": lambda: MistralConfig(**_LLAMA_LIKE, sliding_window=8),
    "qwen2": lambda: Qwen2Config(**_LLAMA_LIKE),
    "qwen3": lambda: Qwen3Config(**_LLAMA_LIKE, head_dim=8),
    "gemma3": lambda: Gemma3TextConfig(
        **_LLAMA_LIKE,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}


def tiny_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of ``family`` with weights large enough that its blocks matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return model


def tiny_windows(samples: int = 6, seqlen: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids ``(samples, seqlen)``."""
    return torch.randint(0, VOCABULARY, (samples, seqlen), generator=torch.Generator().manual_seed(seed))
