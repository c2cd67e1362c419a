"""Loading dense models: plain folders, and GGUF files that become plain folders once."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_gguf import BLOCKS, write_tiny_gguf
from tiny_models import tiny_model
from transformers import PreTrainedTokenizerFast

from gossamer.compress import _models
from gossamer.compress._blocks import iter_blocks, linears
from gossamer.compress._models import load_dense


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of the test's own, and no network."""

    def refuse(*_: object) -> None:
        raise AssertionError("touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(_models, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "models"


def test_a_gguf_file_becomes_a_plain_model_with_exactly_its_weights(tmp_path: Path, cache: Path) -> None:
    stored = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load_dense(tmp_path / "tiny.gguf")
    model = loaded.model
    assert not hasattr(model.config, "quantization_config")
    assert loaded.path.parent == cache
    assert "quantization_config" not in json.loads((loaded.path / "config.json").read_text())
    assert len(iter_blocks(model)) == BLOCKS
    assert {type(layer) for block in iter_blocks(model) for layer in linears(block).values()} == {torch.nn.Linear}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    np.testing.assert_array_equal(model.model.embed_tokens.weight.detach(), stored["token_embd.weight"])
    for index, layer in enumerate(model.model.layers):
        for ours, theirs in (("gate", "gate"), ("up", "up"), ("down", "down")):
            weight = getattr(layer.mlp, f"{ours}_proj").weight.detach()
            np.testing.assert_array_equal(weight, stored[f"blk.{index}.ffn_{theirs}.weight"])
        np.testing.assert_array_equal(layer.self_attn.v_proj.weight.detach(), stored[f"blk.{index}.attn_v.weight"])
        query = layer.self_attn.q_proj.weight.detach().numpy()  # its rows are permuted for rotary positions
        np.testing.assert_array_equal(np.sort(query, axis=0), np.sort(stored[f"blk.{index}.attn_q.weight"], axis=0))
    text = "the a x"
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"]) == text


def test_the_second_load_converts_nothing_and_gives_the_same(tmp_path: Path, cache: Path, monkeypatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    first = load_dense(tmp_path / "tiny.gguf")
    monkeypatch.setattr(_models, "_convert", None)
    second = load_dense(tmp_path / "tiny.gguf")
    assert (first.path, first.fingerprint) == (second.path, second.fingerprint)
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))


def test_every_dtype_and_content_has_a_folder_of_its_own(tmp_path: Path, cache: Path) -> None:
    stored = write_tiny_gguf(tmp_path / "tiny.gguf")
    half = load_dense(tmp_path / "tiny.gguf", torch.bfloat16)
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    expected = torch.from_numpy(stored["blk.1.ffn_down.weight"]).bfloat16()
    assert torch.equal(half.model.model.layers[1].mlp.down_proj.weight, expected)
    whole = load_dense(tmp_path / "tiny.gguf")
    write_tiny_gguf(tmp_path / "tiny.gguf", seed=1)
    other = load_dense(tmp_path / "tiny.gguf")
    assert len({loaded.path for loaded in (half, whole, other)}) == 3
    assert len({loaded.fingerprint for loaded in (half, whole, other)}) == 3


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")

    def half_way(gguf: Path, dtype: torch.dtype, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(_models, "_convert", half_way)
    with pytest.raises(KeyboardInterrupt):
        load_dense(tmp_path / "tiny.gguf")
    assert list(cache.iterdir()) == []


def test_leftovers_of_killed_processes_are_removed_and_those_of_running_ones_kept(tmp_path: Path, cache: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    dead, alive, other = cache / ".4194304.x", cache / f".{os.getppid()}.x", cache / "unrelated"
    for folder in (dead, alive, other):
        folder.mkdir(parents=True)
    path = load_dense(tmp_path / "tiny.gguf").path
    assert set(cache.iterdir()) == {alive, other, path}


def plain_folder(path: Path) -> Path:
    """A tiny LLaMA with a tokenizer, saved the ordinary way."""
    tiny_model("llama").save_pretrained(path)
    from tokenizers import Tokenizer, models

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(path)
    return path


def test_a_plain_folder_is_loaded_in_place_in_the_dtype_asked_for(tmp_path: Path, cache: Path) -> None:
    folder = plain_folder(tmp_path / "model")
    loaded = load_dense(folder, torch.bfloat16)
    assert (loaded.path, loaded.name) == (folder, str(folder))
    assert loaded.model.dtype == torch.bfloat16
    assert not cache.exists()


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model")
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    same, original = load_dense(copy).fingerprint, load_dense(folder).fingerprint
    tiny_model("llama", seed=9).save_pretrained(copy)
    assert same == original != load_dense(copy).fingerprint


def test_what_cannot_be_loaded_gives_one_line(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", architecture="nonesuch")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "nonesuch"}')
    (empty / "model.safetensors").write_bytes(b"")
    vision = plain_folder(tmp_path / "vision")
    (vision / "config.json").write_text('{"model_type": "vit"}')
    for source in (tmp_path / "odd.gguf", tmp_path / "cut.gguf", empty, vision):
        with pytest.raises(ValueError, match="cannot be loaded as a causal language model") as caught:
            load_dense(source)
        assert "\n" not in str(caught.value)
        assert str(source) in str(caught.value)
    with pytest.raises(ValueError, match="nonesuch"):
        load_dense(tmp_path / "odd.gguf")


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "some"}}))
    with pytest.raises(ValueError, match="compressed by 'some': give the dense model"):
        load_dense(folder)
