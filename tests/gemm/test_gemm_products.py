"""Planned products against float64: every small shape, every option, canaries around C."""

from collections.abc import Iterator

import numpy as np
import pytest

from gossamer.codegen import host_target
from gossamer.gemm import gemm_plan

EPS = float(np.finfo(np.float32).eps)
OPTIONS = [
    {"epilogue": "none"},
    {"epilogue": "bias_elu", "prepacked": True},
    {"epilogue": "relu", "transb": True, "alpha": 2.0, "beta": 0.5},
    {"epilogue": "bias_relu", "transb": True, "prepacked": True, "beta": 1.0},
]


def check(m: int, n: int, k: int, epilogue: str = "none", transb: bool = False, prepacked: bool = False,
          alpha: float = 1.0, beta: float = 0.0, slack: int = 0, **plan_options: object) -> None:  # fmt: skip
    """One product with canaries on all sides, against float64 within 2 K eps (|A| |B|)."""
    generator = np.random.default_rng(m * 10_000 + n * 100 + k)
    a = generator.standard_normal((m, k + slack)).astype(np.float32)[:, :k]
    shape = (n, k) if transb else (k, n)
    b = generator.standard_normal((shape[0], shape[1] + slack)).astype(np.float32)[:, : shape[1]]
    frame = np.full((m + 2, n + 9), 7.0, np.float32)
    c = frame[1:-1, 4 : 4 + n]
    before = generator.standard_normal((m, n)).astype(np.float32)
    c[:] = before if beta else np.nan
    bias = generator.standard_normal(n).astype(np.float32) if "bias" in epilogue else None
    plan = gemm_plan(
        m, n, k, transb=transb, prepack_b=b if prepacked else None, epilogue=epilogue, alpha=alpha, beta=beta,
        **plan_options,  # type: ignore[arg-type]
    )  # fmt: skip
    plan.run(a, None if prepacked else b, c, bias)
    wide = (b.T if transb else b).astype(np.float64)
    expected = alpha * (a.astype(np.float64) @ wide) + (beta * before.astype(np.float64) if beta else 0)
    size = abs(alpha) * (abs(a).astype(np.float64) @ abs(wide)) + abs(beta * before) + 1
    if bias is not None:
        expected, size = expected + bias, size + abs(bias)
    if epilogue.endswith("relu"):
        expected = np.maximum(expected, 0)
    if epilogue.endswith("elu") and not epilogue.endswith("relu"):
        expected = np.where(expected > 0, expected, np.expm1(np.minimum(expected, 0)))
    assert (abs(c - expected) <= 2 * (k + 2) * EPS * size).all(), (m, n, k)
    c[:] = 7
    assert (frame == 7).all(), (m, n, k)


def sampled() -> Iterator[tuple[int, int, int]]:
    """Sizes on both sides of every lane and tile boundary; the products of all would take minutes."""
    generator = np.random.default_rng(0)
    for m, n, k in generator.integers(1, 34, (150, 3)):
        yield int(m), int(n), int(k)
    yield from [(1, 1, 1), (33, 33, 33), (6, 16, 1), (12, 17, 2), (1, 33, 33), (33, 1, 33), (33, 2, 16), (4, 3, 33)]


@pytest.mark.parametrize("option", range(len(OPTIONS)))
def test_small_shapes_are_right_to_rounding_and_write_nothing_else(option: int) -> None:
    for m, n, k in list(sampled())[option :: 1 if option == 0 else 4]:
        check(m, n, k, **OPTIONS[option])  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_shape_up_to_33_is_right_to_rounding_and_writes_nothing_else() -> None:
    for m in range(1, 34):
        for n in range(1, 34):
            for k in range(1, 34):
                check(m, n, k, **OPTIONS[(m + n + k) % len(OPTIONS)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 300, 147), (130, 49, 1100), (128, 1, 700), (100, 13, 512), (70, 500, 13), (40, 700, 1)]
)
def test_blocked_and_irregular_products_are_right(m: int, n: int, k: int) -> None:
    for slack in (0, 5):
        check(m, n, k, slack=slack)
        check(m, n, k, slack=slack, prepacked=True, epilogue="bias_elu", alpha=0.5, beta=1.0)
    check(m, n, k, transb=True, epilogue="relu")
    check(m, n, k, slack=1000, transb=True)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_rows(threads: int) -> None:
    check(97, 33, 600, threads=threads)
    check(2, 33, 20, threads=threads, prepacked=True)


def test_a_stack_runs_in_one_call_with_one_b_or_many() -> None:
    generator = np.random.default_rng(3)
    a = generator.standard_normal((9, 17, 20)).astype(np.float32)
    many = generator.standard_normal((9, 20, 23)).astype(np.float32)
    expected = np.matmul(a.astype(np.float64), many)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(gemm_plan(17, 23, 20).run_many(a, many), expected, **close)
    np.testing.assert_allclose(gemm_plan(17, 23, 20, prepack_b=many).run_many(a), expected, **close)
    c = np.empty((9, 17, 23), np.float32)
    plan = gemm_plan(17, 23, 20, prepack_b=many[0])
    for _ in range(2):
        assert plan.run_many(a, c=c) is c
        np.testing.assert_allclose(c, np.matmul(a.astype(np.float64), many[0]), **close)
        a *= 2  # the same arrays with new numbers


def test_running_again_without_c_never_writes_the_result_of_before() -> None:
    a, b = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    plan = gemm_plan(3, 5, 4)
    first = plan.run(a, b)
    second = plan.run(2 * a, b)
    third = plan.run(a, b)
    assert (first == 4).all() and (second == 8).all() and third is not first


def bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float32 numbers, cut off."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def widened(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 9), (33, 40, 600), (64, 1, 33), (1, 100, 65)])
@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("transb", [False, True])
def test_bfloat16_operands_are_summed_in_float32(m: int, n: int, k: int, prepacked: bool, transb: bool) -> None:
    generator = np.random.default_rng(4)
    a = bits(generator.standard_normal((m, k)).astype(np.float32))
    b = bits(generator.standard_normal((n, k) if transb else (k, n)).astype(np.float32))
    plan = gemm_plan(m, n, k, "bf16", transb=transb, prepack_b=b if prepacked else None, epilogue="relu")
    found = plan.run(a, None if prepacked else b)
    wide_a, wide_b = widened(a).astype(np.float64), widened(b).astype(np.float64)
    wide_b = wide_b.T if transb else wide_b
    assert (abs(found - np.maximum(wide_a @ wide_b, 0)) <= 2 * k * EPS * (abs(wide_a) @ abs(wide_b)) + EPS).all()


def test_a_lesser_processors_kernels_give_the_same_products() -> None:
    if not host_target().triple.startswith("x86"):
        pytest.skip("needs an x86 processor")
    lesser = host_target(frozenset({"avx2", "fma"}))
    for m, n, k in ((16, 16, 16), (17, 19, 23), (33, 2, 30)):
        check(m, n, k, target=lesser)


def test_one_tile_size_gives_the_same_products() -> None:
    check(25, 36, 64, tiling="fixed")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"m": 0}, "m must be at least 1"),
        ({"dtype": "f16"}, "dtype must be one of f32, bf16"),
        ({"epilogue": "gelu"}, "epilogue must be one of"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"tiling": "auto"}, "tiling must be one of"),
        ({"prepack_b": np.zeros((4, 4), np.float32)}, "prepack_b must have shape"),
    ],
)
def test_plans_that_make_no_sense_are_refused(options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gemm_plan(**{"m": 2, "n": 3, "k": 4, **options})


def test_operands_that_do_not_fit_are_refused_and_named() -> None:
    plan = gemm_plan(2, 3, 4)
    a, b, c = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match="a must be a NumPy array of float32, got float64"):
        plan.run(a.astype(np.float64), b)
    with pytest.raises(ValueError, match=r"b must have shape \(4, 3\), got \(3, 4\)"):
        plan.run(a, np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="consecutive entries"):
        plan.run(np.ones((2, 8), np.float32)[:, ::2], b)
    with pytest.raises(ValueError, match="consecutive entries"):
        plan.run(a[::-1], b)
    with pytest.raises(ValueError, match="share no memory"):
        plan.run(a, b, a[:, :3])
    with pytest.raises(ValueError, match="bias must be given exactly"):
        plan.run(a, b, c, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="is missing"):
        plan.run(a)
    with pytest.raises(ValueError, match="left out"):
        gemm_plan(2, 3, 4, prepack_b=b).run(a, b)
    with pytest.raises(ValueError, match="c is missing"):
        gemm_plan(2, 3, 4, beta=1.0).run(a, b)
    with pytest.raises(ValueError, match="stack of 2"):
        plan.run_many(np.ones((2, 2, 4), np.float32), np.ones((3, 4, 3), np.float32))


def test_explain_says_tiles_and_packing() -> None:
    assert "B as it lies" in gemm_plan(26, 36, 256).explain()
    assert "sums along the depth" in gemm_plan(26, 1, 256).explain()
