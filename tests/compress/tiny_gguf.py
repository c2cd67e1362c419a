"""A GGUF file of a random LLaMA with two blocks, written from the format's own description."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType

HIDDEN, FFN, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2
LETTERS = [chr(code) for code in range(33, 127)] + ["\u0120"]  # \u0120 stands for a blank in byte-level BPE
TOKENS = ["<|end|>", "<|start|>", *LETTERS, "\u0120a", "th", "the"]
MERGES = ["\u0120 a", "t h", "th e"]


def write_tiny_gguf(path: Path, architecture: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """Write the file; return its matrices as they are after dequantisation, float32, by their GGUF names."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    _add_tokenizer(writer)
    stored = {}
    for name, shape in _shapes().items():
        values = generator.normal(0, 0.2, shape).astype(np.float32)
        kind = GGMLQuantizationType.Q8_0 if len(shape) == 2 else GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        stored[name] = gguf.quants.dequantize(packed, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)


def _shapes() -> dict[str, tuple[int, ...]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for block in range(BLOCKS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            shapes[f"blk.{block}.{name}.weight"] = shape
    return shapes
