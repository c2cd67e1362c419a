"""What is emitted, for processors that need not be here: multiply-adds as planned, and nothing on the stack."""

from collections.abc import Iterator

import pytest

from gossamer.codegen import (
    DYNAMIC_EDGE,
    CopyKernel,
    InnerKernel,
    MicroKernel,
    emit,
    host_target,
    inner_loop,
    named_target,
    tile_shapes,
)  # fmt: skip

MAIN_TILES = {
    "x86-avx2": [(6, 2), (4, 3), (3, 4), (2, 6), (1, 8)],
    "x86-avx512": [(12, 2), (9, 3), (6, 4), (14, 2)],
    "aarch64-neon": [(6, 3), (5, 4), (4, 4), (3, 6)],
    "aarch64-sve": [(6, 3), (5, 4), (3, 6)],
}


def tiles() -> Iterator[tuple[str, int, int]]:
    for target, shapes in MAIN_TILES.items():
        for rows, vectors in shapes:
            yield target, rows, vectors


@pytest.mark.parametrize(("target", "rows", "vectors"), list(tiles()))
def test_inner_loop_is_all_registers_with_one_multiply_add_per_accumulator(
    target: str, rows: int, vectors: int
) -> None:
    kernel = MicroKernel(rows, vectors)
    loop = inner_loop(str(emit(kernel, target)))
    steps = 4 if named_target(target).by_element else kernel.steps()
    assert loop.multiply_adds == rows * vectors * steps
    assert loop.stack_references == 0


@pytest.mark.parametrize("target", ["x86-avx2", "x86-avx512"])
def test_edges_and_epilogues_leave_the_inner_loop_alone(target: str) -> None:
    rows, vectors = MAIN_TILES[target][0]
    edge = DYNAMIC_EDGE if named_target(target).masks else 3
    kernel = MicroKernel(rows, vectors, edge=edge, padded_b=True, update="accumulate", bias=True, activation="elu")
    assert inner_loop(str(emit(kernel, target))) == inner_loop(str(emit(MicroKernel(rows, vectors), target)))


@pytest.mark.parametrize(
    ("target", "rows", "vectors"), [("x86-avx2", 5, 2), ("x86-avx512", 8, 2), ("aarch64-neon", 4, 4)]
)
def test_min_plus_takes_one_minimum_per_pair_without_the_stack(target: str, rows: int, vectors: int) -> None:
    for element in ("f32", "i32"):
        kernel = MicroKernel(rows, vectors, element=element, semiring="min_plus")
        loop = inner_loop(str(emit(kernel, target)))
        steps = kernel.steps()
        assert (loop.extremes, loop.stack_references) == (rows * vectors * steps, 0)


@pytest.mark.parametrize("target", MAIN_TILES)
def test_the_family_offered_for_tiling_fits_the_registers(target: str) -> None:
    machine = named_target(target)
    for vectors, heights in tile_shapes(machine).items():
        for rows in heights:
            MicroKernel(rows, vectors).check(machine)
            assert rows * vectors < machine.registers


@pytest.mark.slow
@pytest.mark.parametrize("target", MAIN_TILES)
@pytest.mark.parametrize(
    ("semiring", "element"), [("plus_times", "f32"), ("min_plus", "f32"), ("min_plus", "f64"), ("min_plus", "i32")]
)
def test_no_tile_of_the_family_touches_the_stack_in_its_loop(target: str, semiring: str, element: str) -> None:
    if target == "aarch64-sve" and element != "f32":
        pytest.skip("SVE kernels are of float32")
    for vectors, heights in tile_shapes(named_target(target), semiring, element).items():  # type: ignore[arg-type]
        for rows in heights:
            kernel = MicroKernel(rows, vectors, element=element, semiring=semiring)  # type: ignore[arg-type]
            assert inner_loop(str(emit(kernel, target))).stack_references == 0, (rows, vectors)


def test_avx512_edges_are_cut_by_mask_registers() -> None:
    text = str(emit(MicroKernel(4, 2, edge=DYNAMIC_EDGE), "x86-avx512"))
    assert "{%k1}" in text and "vmaskmov" not in text


def test_sve_edges_are_cut_by_predicates_of_any_vector_length() -> None:
    text = str(emit(MicroKernel(4, 2, edge=DYNAMIC_EDGE), "aarch64-sve"))
    assert "whilelo" in text and "ld1rqw" in text and "cntb" in text or "rdvl" in text


def test_neon_multiplies_by_an_element_of_a_register() -> None:
    assert "v0.s[" in str(emit(MicroKernel(5, 4), "aarch64-neon")).replace(" ", "") or ".s[1]" in str(
        emit(MicroKernel(5, 4), "aarch64-neon")
    )


def test_objects_are_of_the_target_machine_and_ir_names_the_kernel() -> None:
    machines = {"x86-avx2": 62, "aarch64-neon": 183}  # e_machine of ELF
    for target, number in machines.items():
        code = emit(MicroKernel(2, 1), target, "obj")
        assert isinstance(code, bytes) and code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == number
    assert 'define void @"plus_times_f32_2x1_store"' in str(emit(MicroKernel(2, 1), "x86-avx2", "ir"))
    assert b"copy_f32" in emit(CopyKernel(), "x86-avx2", "obj")  # type: ignore[operator]
    assert "inner_2x1" in str(emit(InnerKernel(2, 1), "x86-avx2"))


def test_a_processor_without_avx512_gets_avx2_kernels() -> None:
    if not host_target().triple.startswith("x86"):
        pytest.skip("needs an x86 processor")
    lesser = host_target(frozenset({"avx2", "fma"}))
    assert (lesser.vector_bytes, lesser.registers, lesser.masks) == (32, 16, False)
    assert "zmm" not in str(emit(MicroKernel(4, 2), lesser))
    with pytest.raises(RuntimeError, match="AVX2 with FMA"):
        host_target(frozenset({"sse2"}))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"rows": 0, "vectors": 1}, "rows and vectors"),
        ({"rows": 1, "vectors": 1, "element": "f16"}, "element must be"),
        ({"rows": 1, "vectors": 1, "semiring": "plus_min"}, "semiring must be"),
        ({"rows": 1, "vectors": 1, "element": "i32"}, "i32 is for"),
        ({"rows": 1, "vectors": 1, "semiring": "min_plus", "bias": True}, "need semiring plus_times"),
        ({"rows": 1, "vectors": 1, "element": "f64", "activation": "elu"}, "elu needs"),
        ({"rows": 1, "vectors": 1, "b_element": "bf16"}, "padded_b"),
        ({"rows": 6, "vectors": 2, "unroll": 1000}, "unroll must be"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(arguments: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MicroKernel(**arguments)


def test_a_tile_that_does_not_fit_and_an_edge_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 27 registers; x86-avx2 has 16"):
        emit(MicroKernel(12, 2), "x86-avx2")
    with pytest.raises(ValueError, match="edge must be from 0 to 3"):
        emit(MicroKernel(2, 2, edge=DYNAMIC_EDGE), "aarch64-neon")
    with pytest.raises(ValueError, match="target must be one of"):
        emit(MicroKernel(2, 2), "z80")
    with pytest.raises(ValueError, match="kind must be one of"):
        emit(MicroKernel(2, 2), "x86-avx2", "elf")  # type: ignore[arg-type]
