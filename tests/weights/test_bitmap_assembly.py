"""The kernels become the instructions they were written for, whatever processor the tests run on."""

import re

import numpy as np
import pytest
from llvmlite import binding, ir
from numba import njit, types

from gossamer.core.hardware import cpu_features
from gossamer.core.jit import HALF, LONG, OPTIONS
from gossamer.weights import _bitmap_avx512 as avx512
from gossamer.weights import _bitmap_expand as avx2
from gossamer.weights._bitmap_matvec import _four_runs

MATRIX = [types.uint64, types.uint16, types.int64, types.float32, types.float32]


def spread_on(cpu, dtype):
    """Assembly for an x86 processor called ``cpu`` of a function that spreads sixteen packed values."""
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG, HALF, LONG]), "spread")
    builder = ir.IRBuilder(function.append_basic_block())
    place, marks, target = function.args
    mask = builder.bitcast(marks, ir.VectorType(ir.IntType(1), 16))
    weights = avx512._expand16(builder, dtype, place, mask)
    builder.store(weights, builder.inttoptr(target, weights.type.as_pointer()))
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(module.triple).create_target_machine(cpu=cpu, opt=3)
    return machine.emit_assembly(binding.parse_assembly(str(module)))


@pytest.mark.parametrize("cpu", ["icelake-server", "sapphirerapids", "znver4"])
@pytest.mark.parametrize(
    ("dtype", "instructions"),
    [
        (types.uint16, ["vpexpandw", "vpmovzxwd", "vpslld"]),
        (types.int16, ["vpexpandw", "vcvtph2ps"]),
        (types.float32, ["vexpandps"]),
    ],
)
def test_avx512_decoding_is_one_expanding_load(cpu, dtype, instructions):
    text = spread_on(cpu, dtype)
    for instruction in instructions:
        assert text.count(instruction) == 1, text
    assert "\tj" not in text  # no branches


def loops(kernel, *more):
    """What numba makes of ``kernel`` for this processor, without the wrapper that unpacks Python arguments."""
    arguments = (*[types.Array(kind, 1, "C") for kind in MATRIX], *more, types.int64, types.int64)
    fresh = njit(kernel.py_func, **{**OPTIONS, "cache": False})
    fresh.compile(arguments)
    return fresh.inspect_asm(arguments).split(".Lfunc_end0")[0]


def innermost_loop(assembly, instruction):
    """The block between two labels in which ``instruction`` stands most often."""
    return max(re.split(r"^\.LBB\w+:", assembly, flags=re.MULTILINE), key=lambda block: block.count(instruction))


@pytest.mark.skipif(not cpu_features() >= avx2.FEATURES, reason="its instructions exist on AVX2 processors only")
def test_avx2_kernel_shuffles_and_multiplies_without_calls():
    inner = innermost_loop(loops(_four_runs, types.Array(types.uint8, 1, "C")), "vpshufb")
    assert inner.count("vpshufb") >= 32 and inner.count("vfmadd") >= 32  # 64 columns of four rows, eight at a time
    assert "popcnt" in inner and "call" not in inner


@pytest.mark.skipif(not cpu_features() >= avx512.FEATURES, reason="its instructions exist on AVX-512 processors only")
def test_avx512_kernel_expands_with_one_instruction():
    inner = innermost_loop(loops(avx512._two_runs), "vpexpandw")
    assert inner.count("vpexpandw") >= 8 and inner.count("vfmadd") >= 8 and "call" not in inner  # two rows of 64


def test_shuffle_tables_follow_their_definition():
    packed = np.arange(100, 108, dtype=np.uint16)
    table = avx2.shuffle_table("uint16").reshape(256, 8, 4)
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
