"""Facts about the machine, and the parts of kernels that are not kernels."""

import re
import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import config

from gossamer.core import hardware as hw
from gossamer.core.jit import aligned_bytes, entry, kernel, row_shares


def test_slug_is_a_file_name_that_tells_brand_family_cores_and_gpu():
    machine = hw.Hardware("Intel(R) Xeon(R) Gold 6454S CPU @ 2.20GHz", "sapphirerapids", 8, 1, 1, "NVIDIA H200")
    assert machine.slug == "intel-xeon-gold-6454s-sapphirerapids-8c-nvidia-h200"
    assert hw.Hardware("AMD EPYC", "zen3", 2, 1, 1, None).slug == "amd-epyc-zen3-2c"
    assert re.fullmatch(r"[a-z0-9-]+", hw.hardware().slug)


def test_this_machine_has_cores_memory_and_caches():
    machine = hw.hardware()
    assert machine.cores >= 1 and machine.llc_bytes >= 1 << 18 and machine.memory_bytes > 1 << 28
    assert machine is hw.hardware()


def test_features_follow_the_target_that_numba_is_told(monkeypatch):
    hw.cpu_features.cache_clear()
    monkeypatch.setattr(config, "CPU_FEATURES", "+avx2,-avx512f,+fma")
    try:
        assert hw.cpu_features() == {"avx2", "fma"}
    finally:
        hw.cpu_features.cache_clear()


def test_cache_folder_follows_the_platform_convention(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hw.cache_dir() == tmp_path / "gossamer" and hw.cache_dir().is_dir()


def test_ceilings_are_measured_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hw, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(hw, "_FMA_STEPS", 1000)
    assert hw.fma_peak() > 0 and hw.copy_bandwidth(2) == hw.copy_bandwidth(2) > 0
    assert len(list((tmp_path / "gossamer").glob("ceilings-*.json"))) == 1


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert hw._gpu_name() is None


@kernel
def _entries(values, out):
    for i in range(len(values)):
        out[i] = entry(values, i)


def test_every_half_precision_pattern_is_read_as_its_value():
    bits = np.arange(1 << 16).astype(np.uint16)
    out = np.empty(1 << 16, np.float32)
    _entries(bits.view(np.int16), out)
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(np.signbit(out), np.signbit(expected))
    _entries(bits, out)
    assert np.array_equal(out.view(np.uint32), bits.astype(np.uint32) << 16)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 9))
def test_row_shares_cover_all_rows_in_order(work, parts):
    shares = row_shares(np.concatenate([[0], np.cumsum(work)]), parts)
    assert shares[0] == 0 and shares[-1] == len(work) and len(shares) == parts + 1
    assert np.all(np.diff(shares) >= 0)


def test_starting_kernel_threads_leaves_torch_alone():
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from gossamer.weights import BitmapWeight; BitmapWeight.from_dense(torch.eye(3))\n"
        "torch.nn.functional.linear(torch.eye(3), torch.eye(3)); print(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1", done.stderr


def test_aligned_bytes_are_aligned_and_zero():
    for size in (1, 63, 8192):
        block = aligned_bytes(size, 64)
        assert block.ctypes.data % 64 == 0 and block.size == size and not block.any()
