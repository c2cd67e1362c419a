"""Objects on disk: found again, told apart by processor, and never trusted when damaged."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gossamer.codegen import BASES, Job, MicroKernel, Program, host_target
from gossamer.codegen import _compile as compiling
from gossamer.codegen._micro_ir import micro_ir


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiling, "cache_dir", lambda: tmp_path)
    return tmp_path / "kernels"


def test_an_object_is_written_once_and_a_damaged_one_is_compiled_again(cache: Path) -> None:
    target = host_target()
    module = micro_ir(MicroKernel(2, 1), target)
    first = compiling._object(module, target)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    assert compiling._object(module, target) == first
    file.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert compiling._object(module, target) == first
    assert file.read_bytes() == whole


def test_another_processor_or_feature_never_finds_the_object() -> None:
    target = host_target()
    text = str(micro_ir(MicroKernel(2, 1), target))
    digests = {
        compiling._digest(text, target),
        compiling._digest(text, replace(target, cpu="generic")),
        compiling._digest(text, replace(target, features=target.features + ",+crc32")),
        compiling._digest(text + " ", target),
    }
    assert len(digests) == 4


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "cache_dir", lambda: Path("/proc/no/such/folder"))
    target = host_target()
    kernel = MicroKernel(3, 1)
    assert compiling.addresses(micro_ir(kernel, target), target)[kernel.name] != 0


def test_a_program_runs_its_jobs_for_every_item_of_a_stack() -> None:
    generator = np.random.default_rng(0)
    lanes = host_target().lanes()
    a = generator.integers(-5, 6, (7, 4, 9)).astype(np.float32)
    b = generator.integers(-5, 6, (9, lanes)).astype(np.float32)
    c = np.zeros((7, 4, lanes), np.float32)
    kernel = MicroKernel(2, 1)
    program = Program([Job(kernel, (0, 0), 36, (1, 0), 4 * lanes, (2, 0), 4 * lanes, 9, 2)])
    bases = [array.ctypes.data for array in (a, b, c)]
    program.run(bases, [a.strides[0], 0, c.strides[0]], 7)
    np.testing.assert_array_equal(c, a @ b)
    assert len(bases) < BASES
