"""A compressed model takes less resident memory than the dense one, after loading and after decoding."""

from __future__ import annotations

from pathlib import Path

import torch
from test_pipeline import TEXT, dense_folder
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gossamer.compress import Settings, compress, resident_memory

__all__ = ["dense_folder"]  # a fixture

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=64,
)  # fmt: skip


def test_compressed_weights_take_less_memory_than_dense_ones(tmp_path: Path, dense_folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    letters: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(dense_folder, local_files_only=True)
    letters.save_pretrained(tmp_path / "dense")
    out = compress(tmp_path / "dense", tmp_path / "out", Settings(format="bitmap", samples=2, seqlen=16), TEXT)
    resident_memory(out, 2)  # the first decode of a machine measures what `auto` chooses from, with copies of weights
    dense, compressed = resident_memory(tmp_path / "dense", 2), resident_memory(out, 2)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert weights > 70e6
    assert 0.95 * weights < dense.loaded < 1.25 * weights
    assert compressed.loaded < 0.75 * dense.loaded  # 0.57 of the bytes, and the process's own noise
    assert compressed.decoded < 0.85 * dense.decoded  # both with 50 MB of compiled code and work space
