"""The kernels become the instructions they were written for, whatever processor the tests run on."""

import re

import numpy as np
import pytest
from llvmlite import binding
from numba import njit, types

from gossamer.core.hardware import cpu_features
from gossamer.core.jit import OPTIONS
from gossamer.weights._bitmap_avx512 import _one_run
from gossamer.weights._bitmap_expand import FEATURES as AVX2
from gossamer.weights._bitmap_expand import shuffle_table
from gossamer.weights._bitmap_matvec import _two_runs

MATRIX = [types.uint64, types.uint16, types.int64, types.float32, types.float32]
TABLE = types.Array(types.uint8, 1, "C")


def assembly(kernel, cpu, value_type, *more):
    """What LLVM makes of the loops of ``kernel`` on an x86 processor called ``cpu``."""
    arrays = [types.Array(value_type if kind is types.uint16 else kind, 1, "C") for kind in MATRIX]
    arguments = (*arrays, *more, types.int64, types.int64)
    fresh = njit(kernel.py_func, **{**OPTIONS, "cache": False})
    fresh.compile(arguments)
    text = fresh.inspect_llvm(arguments)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    module = binding.parse_assembly(re.sub(r'"target-(cpu|features)"="[^"]*"', "", text))
    module.triple = "x86_64-unknown-linux-gnu"
    return target.create_target_machine(cpu=cpu, opt=3).emit_assembly(module)


@pytest.mark.parametrize("cpu", ["icelake-server", "sapphirerapids"])
def test_avx512_kernel_expands_with_one_instruction(cpu):
    half = assembly(_one_run, cpu, types.uint16)
    assert half.count("vpexpandw") >= 4 and "popcnt" in half and "vfmadd" in half
    assert assembly(_one_run, cpu, types.float32).count("vexpandps") >= 4


@pytest.mark.skipif(not cpu_features() >= AVX2, reason="the kernel's instructions exist on AVX2 processors only")
def test_avx2_kernel_shuffles_and_keeps_its_registers():
    text = assembly(_two_runs, "znver3", types.uint16, TABLE)
    assert text.count("vpshufb") >= 8 and "pdep" in text and "vfmadd" in text
    assert not re.search(r"vmov[a-z]+\s+%ymm\d+, -?\d*\(%rsp\)", text)


def test_shuffle_tables_follow_their_definition():
    packed = np.arange(100, 108, dtype=np.uint16)
    table = shuffle_table("uint16").reshape(256, 8, 4)
    for byte in (0, 1, 0b10110001, 255):
        spread = np.zeros(8, np.uint32)
        source = packed.view(np.uint8)
        for lane in range(8):
            entry = [0 if control & 0x80 else source[control] for control in table[byte, lane]]
            spread[lane] = np.array(entry, np.uint8).view(np.uint32)[0]
        marked = [lane for lane in range(8) if byte >> lane & 1]
        expected = np.zeros(8, np.uint32)
        expected[marked] = packed[: len(marked)].astype(np.uint32) << 16
        assert np.array_equal(spread, expected)
