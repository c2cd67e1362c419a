"""NEON code, run: an emulator executes the emitted object against float64."""

import struct

import numpy as np
import pytest

from gossamer.codegen import MicroKernel, emit

unicorn = pytest.importorskip("unicorn")
CODE, STACK, DATA, BACK = 0x10000, 0x80000, 0x100000, 0x20000


def text_section(code: bytes) -> tuple[bytes, int]:
    """The bytes of ``.text`` of a relocatable ELF file and the offset of its only function."""
    start, count, names = (
        int.from_bytes(code[0x28:0x30], "little"),
        *(int.from_bytes(code[at : at + 2], "little") for at in (0x3C, 0x3E)),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * number) for number in range(count)]
    table = headers[names]
    for header in headers:
        place = table[4] + header[0]
        name = code[place : code.index(b"\0", place)]
        if name == b".text":
            return code[header[4] : header[4] + header[5]], 0
    raise AssertionError("no .text")


def has_relocations(code: bytes) -> bool:
    start, count = int.from_bytes(code[0x28:0x30], "little"), int.from_bytes(code[0x3C:0x3E], "little")
    kinds = [struct.unpack_from("<IIQQQQIIQQ", code, start + 64 * number) for number in range(count)]
    names = kinds[int.from_bytes(code[0x3E:0x40], "little")]
    found = []
    for header in kinds:
        place = names[4] + header[0]
        found.append(code[place : code.index(b"\0", place)])
    return b".rela.text" in found


def run_neon(
    kernel: MicroKernel, a: np.ndarray, b: np.ndarray, c: np.ndarray, tiles: int, bias: np.ndarray
) -> np.ndarray:
    """Execute the kernel on copies of the arrays; returns C as it is afterwards."""
    code = emit(kernel, "aarch64-neon", "obj")
    assert isinstance(code, bytes)
    assert not has_relocations(code)
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    for place, size in ((CODE, 0x10000), (BACK, 0x1000), (STACK - 0x10000, 0x20000), (DATA, 0x400000)):
        machine.mem_map(place, size)
    machine.mem_write(CODE, text_section(code)[0])
    places, at = [], DATA
    for array in (a, b, c, bias):
        machine.mem_write(at, array.tobytes())
        places.append(at)
        at += -(-array.nbytes // 4096) * 4096 + 4096
    from unicorn import arm64_const as register

    machine.reg_write(register.UC_ARM64_REG_CPACR_EL1, 3 << 20)
    values = [places[0], a.strides[0], places[1], b.strides[0], places[2], c.strides[0], a.shape[1], tiles]
    for number, value in enumerate(values):
        machine.reg_write(getattr(register, f"UC_ARM64_REG_X{number}"), value)
    machine.reg_write(register.UC_ARM64_REG_SP, STACK)
    machine.mem_write(STACK, struct.pack("<QQQ", places[3], 0, b.shape[1]))
    machine.reg_write(register.UC_ARM64_REG_LR, BACK)
    machine.emu_start(CODE, BACK)
    return np.frombuffer(machine.mem_read(places[2], c.nbytes), c.dtype).reshape(c.shape)


SHAPES = [(6, 3, 0), (5, 4, 0), (4, 4, 1), (3, 6, 2), (6, 3, 3), (1, 2, 1), (2, 1, 3)]


@pytest.mark.parametrize(("rows", "vectors", "edge"), SHAPES)
@pytest.mark.parametrize("depth", [1, 2, 4, 5, 8, 9, 17, 64, 67])
def test_neon_object_multiplies_exactly_and_writes_nothing_else(rows: int, vectors: int, edge: int, depth: int) -> None:
    generator = np.random.default_rng(rows * 100 + vectors * 10 + depth)
    columns = 4 * (vectors - 1) + (edge or 4)
    tiles = 2
    # Small integers: every sum is exact in float32, so the answer must be equal to the last bit.
    a, b = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((tiles * rows, depth), (depth, columns)))
    c = np.full((tiles * rows + 1, columns + 5), 77.0, np.float32)
    expected = c.copy()
    expected[: tiles * rows, :columns] = a.astype(np.float64) @ b.astype(np.float64)
    found = run_neon(MicroKernel(rows, vectors, edge=edge), a, b, c, tiles, np.zeros(1, np.float32))
    np.testing.assert_array_equal(found, expected)


def test_neon_min_plus_adds_to_what_is_there() -> None:
    generator = np.random.default_rng(1)
    a, b = (generator.integers(0, 1000, shape).astype(np.float32) for shape in ((4, 21), (21, 16)))
    c = generator.integers(0, 400, (4, 16)).astype(np.float32)
    kernel = MicroKernel(4, 4, semiring="min_plus", update="accumulate")
    expected = np.minimum(c, (a[:, :, None] + b[None]).min(1))
    np.testing.assert_array_equal(run_neon(kernel, a, b, c, 1, np.zeros(1, np.float32)), expected)


def test_neon_bias_and_relu_come_last() -> None:
    generator = np.random.default_rng(2)
    a, b = (generator.integers(-8, 9, shape).astype(np.float32) for shape in ((5, 11), (11, 16)))
    bias = generator.integers(-50, 50, 16).astype(np.float32)
    c = np.full((5, 16), np.nan, np.float32)
    found = run_neon(MicroKernel(5, 4, bias=True, activation="relu"), a, b, c, 1, bias)
    np.testing.assert_array_equal(found, np.maximum(a @ b + bias, 0))
