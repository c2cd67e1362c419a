"""A whole model goes through compression: what comes out, and what interruption leaves behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gossamer.cli import main
from gossamer.compress import (
    Recipe,
    Settings,
    Text,
    compress,
    compressed_layers,
    load,
    read_about,
    read_recipe,
    summarise_layers,
)
from gossamer.weights import CompressedLinear

TEXT = Text("letters", "abcdefgh " * 400, "hgfedcba " * 400, "made for this test")
SMALL = {"samples": 4, "seqlen": 24}


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), "llama")


def save_tiny(folder: Path, family: str) -> Path:
    tiny_model(family).to(torch.bfloat16).save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(8)} | {"<unk>": 8}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>").save_pretrained(folder)
    return folder


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "gemma3"])
@pytest.mark.parametrize("propagate", ["sequential", "dense"])
def test_every_family_is_pruned_stored_and_loaded(family: str, propagate: str, tmp_path: Path) -> None:
    dense = save_tiny(tmp_path / "dense", family)
    out = compress(dense, tmp_path / "out", Settings(format="bitmap", propagate=propagate, **SMALL), TEXT)
    layers = compressed_layers(load(out).model)
    assert len(layers) == len(read_about(out)["layers"]) > 0
    for layer in layers.values():
        zeros = (layer.weight_format.to_dense() == 0).sum(1)
        assert (zeros >= layer.in_features // 2).all()


def test_the_loaded_model_is_the_pruned_one_and_auto_classes_load_it(dense_folder: Path, tmp_path: Path) -> None:
    out = compress(dense_folder, tmp_path / "out", Settings(format="bitmap", **SMALL), TEXT)
    ours = load(out).model
    theirs = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(8)[None]
    plain = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.bfloat16)
    for name, layer in compressed_layers(ours).items():
        plain.get_submodule(name).weight.data = layer.weight_format.to_dense()
    with torch.no_grad():
        expected = plain(ids).logits.float()
        torch.testing.assert_close(ours(ids).logits.float(), expected, rtol=0.1, atol=0.1)
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
    assert all(isinstance(theirs.get_submodule(name), CompressedLinear) for name in compressed_layers(ours))


def test_lossless_changes_no_weight(dense_folder: Path, tmp_path: Path) -> None:
    out = compress(dense_folder, tmp_path / "out", Settings(sparsity=0.0, format="lossless", **SMALL), TEXT)
    plain = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.bfloat16)
    for name, layer in compressed_layers(load(out).model).items():
        assert torch.equal(layer.weight_format.to_dense(), plain.get_submodule(name).weight)


def test_n_of_m_keeps_n_of_every_m(dense_folder: Path, tmp_path: Path) -> None:
    out = compress(dense_folder, tmp_path / "out", Settings(pattern="2:4", format="bitmap", **SMALL), TEXT)
    for layer in compressed_layers(load(out).model).values():
        kept = (layer.weight_format.to_dense() != 0).view(layer.out_features, -1, 4).sum(-1)
        assert (kept <= 2).all()


def test_auto_says_what_it_chose(dense_folder: Path, tmp_path: Path) -> None:
    out = compress(dense_folder, tmp_path / "out", Settings(**SMALL), TEXT)
    about = read_about(out)
    assert {layer["format"] for layer in about["layers"]} <= {"bitmap", "lossless", "dense"}
    stored = sum(layer["format"] != "dense" for layer in about["layers"])
    assert len(compressed_layers(load(out).model)) == stored
    assert sum(int(row[1]) for row in summarise_layers(about, by_format=True)) == len(about["layers"])


def test_a_repeated_run_is_taken_as_done_and_another_is_refused(dense_folder: Path, tmp_path: Path) -> None:
    settings = Settings(format="bitmap", **SMALL)
    out = compress(dense_folder, tmp_path / "out", settings, TEXT)
    before = weights_of(out)
    assert compress(dense_folder, out, settings, TEXT) == out
    with pytest.raises(FileExistsError, match="exists already"):
        compress(dense_folder, out, Settings(sparsity=0.3, **SMALL), TEXT)
    assert weights_of(out) == before


def test_a_relative_path_is_remembered_as_an_absolute_one(
    dense_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dense_folder.parent)
    out = compress(dense_folder.name, tmp_path / "out", Settings(format="bitmap", **SMALL), TEXT)
    assert read_about(out)["run"]["model"] == str(dense_folder)


class Stop(Exception):
    """Thrown from the progress call."""


def test_an_interrupted_run_resumes_to_the_same_bytes(dense_folder: Path, tmp_path: Path) -> None:
    settings = Settings(format="bitmap", score="sparsegpt", **SMALL)
    undisturbed = compress(dense_folder, tmp_path / "undisturbed", settings, TEXT)

    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise Stop

    with pytest.raises(Stop):
        compress(dense_folder, tmp_path / "out", settings, TEXT, stop)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="not finished"):
        load(tmp_path / "out")
    with pytest.raises(ValueError, match="another settings"):
        compress(dense_folder, tmp_path / "out", Settings(sparsity=0.3, **SMALL), TEXT)
    resumed = compress(dense_folder, tmp_path / "out", settings, TEXT)
    assert weights_of(resumed) == weights_of(undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "undisturbed"]


KILLED = """
import sys, pathlib
sys.path.insert(0, sys.argv[3])
from test_pipeline import SMALL, TEXT
from gossamer.compress import Settings, compress
print("ready", flush=True)
compress(sys.argv[1], sys.argv[2], Settings(format="bitmap", **SMALL), TEXT)
"""


@pytest.mark.slow
def test_killing_it_anywhere_changes_nothing(dense_folder: Path, tmp_path: Path) -> None:
    undisturbed = compress(dense_folder, tmp_path / "undisturbed", Settings(format="bitmap", **SMALL), TEXT)
    moments = random.Random(0)
    for attempt in range(20):
        out = tmp_path / f"out{attempt}"
        command = [sys.executable, "-c", KILLED, str(dense_folder), str(out), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(moments.uniform(0.0, 1.5))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        if out.exists():
            assert weights_of(out) == weights_of(undisturbed)
        resumed = compress(dense_folder, out, Settings(format="bitmap", **SMALL), TEXT)
        assert weights_of(resumed) == weights_of(undisturbed)


def test_a_damaged_folder_is_refused(dense_folder: Path, tmp_path: Path) -> None:
    out = compress(dense_folder, tmp_path / "out", Settings(format="bitmap", **SMALL), TEXT)
    content = bytearray(weights_of(out))
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load(out)
    (out / "gossamer.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        load(out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "no-such-model"),
        (["DENSE", "--sparsity", "1.0"], "sparsity must be in [0, 1)"),
        (["DENSE", "--pattern", "4:2"], "0 < N < M"),
        (["DENSE", "--pattern", "3:7"], "7"),
        (["DENSE", "--score", "best"], "score must be one of"),
        (["DENSE", "--format", "zip"], "format must be one of"),
        (["DENSE", "--text", "SHORT"], "text"),
        (["DENSE", "--out", "/proc/out"], "out"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str],
    message: str,
    dense_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "short.txt").write_text("too short\n\nby far\n")
    known = {"DENSE": str(dense_folder), "SHORT": str(tmp_path / "short.txt")}
    command = ["gossamer", "compress", *(known.get(word, word) for word in arguments)]
    if "--out" not in arguments:
        command += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        main()
    lines = capfd.readouterr().err.strip().splitlines()
    assert stopped.value.code == 2
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_is_one_line_and_the_run_resumes(dense_folder: Path, tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); from gossamer.cli import main;"
        "sys.argv = ['gossamer'] + sys.argv[1:]; main()"
    )
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"abcdefgh {'abc' * (i % 7)} {i}" for i in range(400)))
    arguments = [
        "compress",
        str(dense_folder),
        "--out",
        str(tmp_path / "out"),
        "--format",
        "bitmap",
        "--text",
        str(text),
    ]
    arguments += ["--samples", "4", "--seqlen", "24"]
    # -B: Python 3.11 would leave compiled modules cut off at the limit
    full = [sys.executable, "-B", "-c", program, *arguments]
    done = subprocess.run(full, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    again = subprocess.run(
        [sys.executable, "-m", "gossamer.cli", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["out"] == str(tmp_path / "out")


def test_a_found_formula_and_a_found_allocation_prune_a_model(dense_folder: Path, tmp_path: Path) -> None:
    settings = Settings(score="mul(W, sqrt(F))", allocation=(0.25, 0.5, 0.75), format="bitmap", **SMALL)
    out = compress(dense_folder, tmp_path / "out", settings, TEXT)
    assert compress(dense_folder, out, settings, TEXT) == out  # known as the result of this run
    for name, layer in compressed_layers(load(out).model).items():
        share = settings.allocation[int(name.split(".")[2])]
        zeros = (layer.weight_format.to_dense() == 0).sum(1)
        assert (zeros >= int(layer.in_features * share)).all()
        assert (zeros <= int(layer.in_features * share) + 2).all()


def test_an_allocation_moves_n_between_blocks(dense_folder: Path, tmp_path: Path) -> None:
    settings = Settings(score="sparsegpt", pattern="4:8", allocation=(0.25, 0.5, 0.75), format="bitmap", **SMALL)
    out = compress(dense_folder, tmp_path / "out", settings, TEXT)
    for name, layer in compressed_layers(load(out).model).items():
        kept = (layer.weight_format.to_dense() != 0).view(-1, 8).sum(1)
        assert int(kept.max()) == (6, 4, 2)[int(name.split(".")[2])]


def test_an_allocation_for_another_model_is_refused(dense_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allocation is for 2 blocks, but the model has 3"):
        compress(dense_folder, tmp_path / "out", Settings(allocation=(0.5, 0.5), **SMALL), TEXT)


def test_a_model_is_binarised_with_n_moved_by_outliers_and_loads(dense_folder: Path, tmp_path: Path) -> None:
    settings = Settings(score="ria", pattern="4:8", allocation="owl", format="stb", **SMALL)
    out = compress(dense_folder, tmp_path / "out", settings, TEXT)
    kept = {}
    for name, layer in compressed_layers(load(out).model).items():
        counts = (layer.weight_format.to_dense() != 0).view(-1, 8).sum(1)
        kept[name.split(".")[2]] = int(counts.max())
    assert sum(kept.values()) == 12
    layers = read_about(out)["layers"]
    assert all(layer["format"] == "stb" and 0 < layer["nominal_bits"] < 1.5 for layer in layers)


@pytest.mark.parametrize("bad", [{"pattern": "2:4"}, {"pattern": None}, {"pattern": "4:8", "score": "sparsegpt"}])
def test_binarising_needs_n_of_8_and_a_ranking(bad: dict) -> None:
    with pytest.raises(ValueError, match="'stb' needs a pattern N:8"):
        Settings(format="stb", **bad)


def test_a_recipe_gives_the_run_again(dense_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("\n\n".join(f"{'abcdefgh' * 12} {i}" for i in range(60)))
    settings = Settings(sparsity=0.4, score="ria", allocation=(0.3, 0.4, 0.5), format="bitmap", **SMALL)
    recipe = Recipe(str(dense_folder), settings, Path("letters.txt"))
    (tmp_path / "recipe.toml").write_text(recipe.toml())
    found = read_recipe(tmp_path / "recipe.toml")
    assert found == Recipe(str(dense_folder), settings, tmp_path / "letters.txt")
    assert main_exits(["compress", "--recipe", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")]) == 0
    assert read_recipe(tmp_path / "out").settings == settings


def main_exits(arguments: list[str]) -> int:
    sys.argv = ["gossamer", *arguments]
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("model", "not TOML"), ("x = 1", "needs the model"), ('model = "m"\n[settings]\nfoo = 1', "unknown settings foo")],
)
def test_bad_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path / "recipe.toml")
