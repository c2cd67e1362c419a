"""Fine-tuning from end to end on a tiny model: what is learned, saved, loaded and resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from gossamer.compress._blocks import iter_blocks, linears, set_dense_weight
from gossamer.compress._examples import Batch, Example, batches, completion_loss, mean_nll, read_examples
from gossamer.compress._finetune import TrainingSettings, finetune, residual_rates
from gossamer.compress._models import DenseModel
from gossamer.compress._salr import SALRConfig, convert_
from gossamer.compress._salr_files import load_finetuned, salr_layers

EXAMPLES = [Example(f"{a}{b}\n", f"{b}{a}") for a in "abcdefgh" for b in "abcdefgh"]
SETTINGS = TrainingSettings(steps=8, batch=8, lr=8e-3, residual_lr=8e-4, checkpoint_every=3)
CONFIG = SALRConfig(rank=4, residual_rank=4)


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 1

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % 90 for letter in text]}


class Tiny(DenseModel):
    fingerprint = "tiny"  # type: ignore[assignment]


def tiny() -> DenseModel:
    return Tiny(tiny_model("llama"), Letters(), "tiny", Path("."))  # type: ignore[arg-type]


def test_the_loss_counts_completions_only_and_equals_the_models_own() -> None:
    model = tiny_model("llama")
    (batch,) = batches([Example("ab\n", "cde"), Example("a\n", "b")], Letters(), 2, 64)
    assert batch.ids.shape == (2, 7)
    total = 0.0
    for row, (start, stop) in enumerate(((3, 7), (2, 4))):
        ids = batch.ids[row : row + 1, :stop]
        labels = ids.clone()
        labels[:, :start] = -100
        total += float(model(input_ids=ids, labels=labels).loss.detach()) * (stop - start)
    loss, tokens = completion_loss(model, batch)
    assert tokens == 6
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("score", ["magnitude", "wanda"])
def test_training_lowers_the_loss_and_a_loaded_folder_is_the_trained_model(tmp_path: Path, score: str) -> None:
    dense = tiny()
    config = replace(CONFIG, score=score)
    result = finetune(dense, tmp_path / "out", EXAMPLES, EXAMPLES[::7], config, SETTINGS)
    assert result["nll_after"] < result["nll_before"]
    loaded = load_finetuned(tiny_model("llama"), tmp_path / "out").eval()
    assert mean_nll(loaded, EXAMPLES[::7], Letters(), 8) == pytest.approx(result["nll_after"], rel=1e-5)
    with pytest.raises(ValueError, match="was fine-tuned from tiny"):
        load_finetuned(tiny_model("llama", seed=5), tmp_path / "out")
    with pytest.raises(ValueError, match=r"no salr\.json"):
        load_finetuned(tiny_model("llama"), tmp_path)


def test_the_folder_holds_what_the_formula_says(tmp_path: Path) -> None:
    result = finetune(tiny(), tmp_path, EXAMPLES, (), CONFIG, TrainingSettings(steps=1))
    shapes = [layer.weight.shape for block in iter_blocks(tiny_model("llama")) for layer in linears(block).values()]
    bits = sum(rows * -(-columns // 64) * 8 for rows, columns in shapes)
    offsets = sum(8 * (rows + 1) for rows, _ in shapes)
    values = sum(4 * (rows * columns // 2 + 32) for rows, columns in shapes)
    assert result["base_bytes"] == pytest.approx(bits + offsets + values, rel=0.01)
    assert result["adapter_bytes"] == sum(4 * 8 * (rows + columns) for rows, columns in shapes)


def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = SALRConfig(rank=4, residual_rank=4, dropout=0.2)
    undisturbed = finetune(tiny(), tmp_path / "one", EXAMPLES, (), config, SETTINGS)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "training" and done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(tiny(), tmp_path / "two", EXAMPLES, (), config, SETTINGS, interrupt)
    assert (tmp_path / "two" / "training.pt").is_file()
    assert finetune(tiny(), tmp_path / "two", EXAMPLES, (), config, SETTINGS)["losses"] == undisturbed["losses"]
    assert not (tmp_path / "two" / "training.pt").exists()


def test_a_run_with_other_settings_is_refused(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "training" and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(tiny(), tmp_path, EXAMPLES, (), CONFIG, SETTINGS, interrupt)
    with pytest.raises(ValueError, match="another rank"):
        finetune(tiny(), tmp_path, EXAMPLES, (), SALRConfig(rank=3, residual_rank=4), SETTINGS)


def test_the_step_of_the_repair_is_that_of_the_inputs_largest_singular_value() -> None:
    dense = tiny()
    convert_(dense.model, CONFIG)
    (batch,) = batches(EXAMPLES[:8], Letters(), 8, 64)
    seen = {}
    layer = next(iter(salr_layers(dense.model).values()))
    handle = layer.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].detach()))
    rates = residual_rates(dense.model, batch, lr=1.0)
    handle.remove()
    x = seen["x"].reshape(-1, 32).double()
    largest = float(torch.linalg.svdvals(x)[0]) ** 2 / len(x)
    assert rates[0] == pytest.approx(min(max(1 / largest, 0.1), 10.0), rel=1e-3)
    assert residual_rates(dense.model, batch, lr=1e-9) == [1e-8] * len(rates)


def test_peft_loads_both_adapters_onto_the_pruned_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    dense = tiny()
    finetune(dense, tmp_path, EXAMPLES, (), CONFIG, SETTINGS)
    layers = salr_layers(dense.model)
    pruned = tiny_model("llama")
    for block in iter_blocks(pruned):
        for name, layer in linears(block).items():
            set_dense_weight(layer, layers[f"{block.name}.{name}"].base.decode())
    theirs = peft.PeftModel.from_pretrained(pruned, str(tmp_path), adapter_name="task")
    theirs.load_adapter(str(tmp_path / "residual"), adapter_name="residual")
    theirs.base_model.set_adapter(["task", "residual"])
    (batch,) = batches(EXAMPLES[:4], Letters(), 4, 64)
    with torch.no_grad():
        ours = dense.model.eval()(input_ids=batch.ids).logits
        torch.testing.assert_close(theirs.eval()(input_ids=batch.ids).logits, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('{"question": "2+2?", "answer": "It is <<2+2=4>>4"}\n{"question": "q", "answer": "a"}\n', 2),
        ('[{"instruction": "i", "output": "o"}]', 1),
    ],
)
def test_examples_are_read_and_annotations_dropped(tmp_path: Path, text: str, count: int) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    examples = read_examples(path)
    assert len(examples) == count
    assert "<<" not in examples[0].completion


def test_bad_examples_and_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for text, message in (("{", "not JSON"), (json.dumps({"x": 1}), "question/answer"), ("[]", "no examples")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_examples(path)
    with pytest.raises(ValueError, match="steps"):
        TrainingSettings(steps=0)
    with pytest.raises(ValueError, match="examples must not be empty"):
        finetune(tiny(), tmp_path, [])


def test_long_prompts_are_cut_and_may_leave_nothing_to_predict() -> None:
    (batch,) = batches([Example("abcdefgh", "ab")], Letters(), 1, 4)
    assert isinstance(batch, Batch)
    assert batch.ids.shape == (1, 4)
    assert completion_loss(tiny_model("llama"), batch)[1] == 0
    assert math.isfinite(mean_nll(tiny_model("llama"), [Example("abcdefgh", "ab")], Letters(), 1, 4))
