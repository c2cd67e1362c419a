"""The hybrid partition against brute force, for every threshold: exact, disjoint, with exact flags, and right products."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import entries, error_bound, matrices, random_dense, random_matrix

from gossamer.sparse import HybridPlan, SparseMatrix

TYPES = (torch.float16, torch.bfloat16, torch.float32)
SPMM_THETAS = range(1, 10)
SDDMM_THETAS = (1, 2, 4, 8, 14, 24, 50, 128, 129)


def brute_vectors(matrix):
    """{(window, column): CSR numbers of its entries}."""
    vectors = {}
    for number, (row, column, _) in enumerate(entries(matrix)):
        vectors.setdefault((row // 8, column), []).append(number)
    return vectors


def brute_kept_by_vector(matrix, theta):
    return {number for numbers in brute_vectors(matrix).values() if len(numbers) >= theta for number in numbers}


def brute_kept_by_block(matrix, theta):
    """Vectors of a window, most entries first and then by column, sixteen at a time; blocks judged whole."""
    kept, blocks, vectors = set(), 0, brute_vectors(matrix)
    for window in sorted({window for window, _ in vectors}):
        mine = sorted(
            ((column, numbers) for (w, column), numbers in vectors.items() if w == window),
            key=lambda vector: (-len(vector[1]), vector[0]),
        )
        for start in range(0, len(mine), 16):
            numbers = [number for _, numbers in mine[start : start + 16] for number in numbers]
            if len(numbers) >= theta:
                kept |= set(numbers)
                blocks += 1
    return kept, blocks


def read_tensor_part(plan):
    """(CSR number, row, column) of every set bit, read as the layout text says."""
    found, part = [], {name: array.tolist() for name, array in plan.tensor.items()}
    halves = 1 if plan.width == 4 else 2
    columns = min(plan.width, 8)
    assert part["row_offset"][0] == 0 and part["row_offset"][-1] == len(part["block"]) - 1
    for group, window in enumerate(part["window"]):
        first, last = part["row_offset"][group : group + 2]
        assert 0 < last - first <= 32
        for block in range(first, last):
            place = part["block"][block]
            for half in range(halves):
                bits = part["bitmap"][block * halves + half] % 2 ** (8 * columns)
                for bit in range(8 * columns):
                    if bits >> bit & 1:
                        column = part["column"][block * plan.width + 8 * half + bit % columns]
                        found.append((part["entry"][place], 8 * window + bit // columns, column))
                        place += 1
            assert place == part["block"][block + 1]
    return found


def read_row_parts(parts):
    arrays = {name: array.tolist() for name, array in parts.items()}
    assert arrays["row_offset"][0] == 0 and arrays["row_offset"][-1] == len(arrays["entry"])
    return [
        (arrays["entry"][place], row, arrays["column"][place])
        for part, row in enumerate(arrays["row"])
        for place in range(*arrays["row_offset"][part : part + 2])
    ]


def assert_partition(plan, matrix, kept):
    """Tensor part and row parts hold every entry once, where it belongs."""
    where = [(number, row, column) for number, (row, column, _) in enumerate(entries(matrix))]
    tensor, long, short = read_tensor_part(plan), read_row_parts(plan.long), read_row_parts(plan.short)
    assert sorted(tensor + long + short) == where
    assert {number for number, _, _ in tensor} == kept
    left = Counter(row for number, row, _ in where if number not in kept)
    long_sizes = Counter((row, size) for row, size in sizes(plan.long))
    short_sizes = dict(sizes(plan.short))
    assert len(short_sizes) == plan.short["row"].numel()
    for row, count in left.items():
        whole, rest = divmod(count, 32)
        assert short_sizes.get(row, 0) == (rest if rest <= 3 else 0)
        assert long_sizes[row, 32] == whole
        assert rest <= 3 or long_sizes[row, rest] == 1
    assert [number for number, _, _ in long] == sorted(number for number, _, _ in long)


def sizes(parts):
    return list(zip(parts["row"].tolist(), parts["row_offset"].diff().tolist(), strict=True))


def assert_flags_exact(plan, rows):
    """A unit is flagged if and only if another one writes one of its rows; a group writes all rows of its window."""
    writers = Counter()
    units = []
    for name, part in (("tensor", plan.tensor), ("long", plan.long), ("short", plan.short)):
        owner = part["window" if name == "tensor" else "row"].tolist()
        for number, place in enumerate(owner):
            mine = range(8 * place, min(8 * place + 8, rows)) if name == "tensor" else [place]
            units.append((part["atomic"][number].item(), mine))
            writers.update(mine)
    for flag, mine in units:
        assert flag == int(any(writers[row] > 1 for row in mine))


@settings(max_examples=25)
@given(matrix=matrices(TYPES, sizes=(0, 1, 8, 17, 40)), theta=st.sampled_from(SPMM_THETAS))
def test_the_spmm_partition_is_that_of_counting(matrix, theta):
    plan = HybridPlan.build(matrix, 64, theta=theta)
    assert plan.width == (4 if matrix.dtype == torch.float32 else 16)
    assert_partition(plan, matrix, brute_kept_by_vector(matrix, theta))
    assert_flags_exact(plan, matrix.shape[0])
    vectors = Counter(w for (w, _), numbers in brute_vectors(matrix).items() if len(numbers) >= theta)
    counts = plan.stats()
    assert counts["vectors"] == sum(vectors.values())
    assert counts["blocks"] == sum(math.ceil(count / plan.width) for count in vectors.values())
    for window, count in vectors.items():
        mine = [
            plan.tensor["column"][block * plan.width : (block + 1) * plan.width].tolist()
            for group, other in enumerate(plan.tensor["window"].tolist())
            if other == window
            for block in range(*plan.tensor["row_offset"][group : group + 2].tolist())
        ]
        flat = [column for block in mine for column in block]
        assert flat[:count] == sorted(flat[:count]) and set(flat[count:]) <= {-1}


@settings(max_examples=25)
@given(matrix=matrices(TYPES, sizes=(1, 8, 17, 40)), theta=st.sampled_from(SDDMM_THETAS))
def test_the_sddmm_partition_is_that_of_counting(matrix, theta):
    plan = HybridPlan.build(matrix, 64, op="sddmm", theta=theta)
    kept, blocks = brute_kept_by_block(matrix, theta)
    assert_partition(plan, matrix, kept)
    assert plan.stats()["blocks"] == blocks and plan.width == 16
    for block in range(blocks):
        columns = [column for column in plan.tensor["column"][16 * block : 16 * block + 16].tolist() if column >= 0]
        assert columns == sorted(columns)
    assert not any(part["atomic"].any() for part in (plan.tensor, plan.long, plan.short))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("theta", SPMM_THETAS)
def test_the_product_is_right_for_every_threshold(theta, dtype):
    """Signed weights, a row of one entry, a full row, an empty window; values are not ones."""
    matrix = random_matrix((43, 70), 0.25, dtype)
    dense = random_dense((70, 9), 1.0, dtype, seed=3)
    product = HybridPlan.build(matrix, 9, theta=theta).spmm(dense)
    sparse, other = matrix.to_dense().double().numpy(), dense.double().numpy()
    bound = error_bound(np.abs(sparse) @ np.abs(other), 70, dtype)
    assert np.all(np.abs(product.double().numpy() - sparse @ other) <= bound)


@pytest.mark.parametrize("theta", SDDMM_THETAS)
def test_sampled_products_come_back_in_csr_order(theta):
    matrix = random_matrix((43, 70), 0.25)
    x, y = random_dense((43, 12), 1.0), random_dense((70, 12), 1.0, seed=1)
    result = HybridPlan.build(matrix, 12, op="sddmm", theta=theta).sddmm(x, y)
    exact = torch.sparse.sampled_addmm(matrix.to_torch(), x, y.T.contiguous(), beta=0).values()
    assert torch.allclose(result, exact, atol=1e-5)


def test_the_extremes_leave_one_engine_empty_and_counts_fall_with_theta():
    matrix = random_matrix((40, 60), 0.4)
    plans = [HybridPlan.build(matrix, 32, theta=theta).stats() for theta in SPMM_THETAS]
    assert plans[0]["nnz_long"] == plans[0]["nnz_short"] == 0 and plans[0]["nnz_tensor"] == matrix.nnz
    assert plans[8]["nnz_tensor"] == plans[8]["blocks"] == 0
    on_tensor = [counts["nnz_tensor"] for counts in plans]
    assert on_tensor == sorted(on_tensor, reverse=True)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 31, 32, 33, 35, 36, 64, 67, 68])
def test_rows_are_cut_at_their_edges(count):
    dense = torch.zeros(3, 80)
    dense[1, :count] = torch.arange(1.0, count + 1)
    matrix = SparseMatrix.from_dense(dense)
    plan = HybridPlan.build(matrix, 8, theta=9)
    assert_partition(plan, matrix, set())
    assert_flags_exact(plan, 3)


def test_only_a_short_part_and_tensor_cores_in_one_row_are_flagged():
    """The flag that is easy to forget: one left-over entry in a window that tensor cores write as well."""
    dense = torch.zeros(16, 4)
    dense[:8, 0] = 1
    dense[5, 3] = 2
    dense[12, 1] = 3
    plan = HybridPlan.build(SparseMatrix.from_dense(dense), 8, theta=2)
    assert plan.tensor["atomic"].tolist() == [1] and plan.short["atomic"].tolist() == [1, 0]


def test_the_last_vector_of_a_window_is_judged_like_the_others():
    dense = torch.zeros(8, 20)
    dense[:, 19] = 1
    assert HybridPlan.build(SparseMatrix.from_dense(dense), 8, theta=8).stats()["nnz_tensor"] == 8


def test_padding_meets_no_infinity():
    matrix = SparseMatrix.from_coo([0, 1, 2], [0, 0, 1], shape=(8, 3))
    dense = torch.full((3, 2), float("inf"))
    for theta in SPMM_THETAS:
        product = HybridPlan.build(matrix, 2, theta=theta).spmm(dense)
        assert torch.isinf(product[:3]).all() and not product[3:].any()


@pytest.mark.parametrize("op", ["spmm", "sddmm"])
def test_saving_and_loading_keeps_everything(op, tmp_path):
    matrix = random_matrix((30, 30), 0.3, torch.float16)
    plan = HybridPlan.build(matrix, 16, op=op, theta=3)
    plan.save(tmp_path / "plan.safetensors")
    again = HybridPlan.load(tmp_path / "plan.safetensors")
    assert again.stats() == plan.stats() and again.explain() == plan.explain() and again.dtype == plan.dtype
    for mine, theirs in zip((plan.tensor, plan.long, plan.short), (again.tensor, again.long, again.short), strict=True):
        assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    matrix.save(tmp_path / "matrix.safetensors")
    with pytest.raises(ValueError, match="holds no hybrid plan"):
        HybridPlan.load(tmp_path / "matrix.safetensors")


def test_new_values_take_their_places():
    matrix = random_matrix((30, 30), 0.4)
    other = matrix.with_values(torch.randn(matrix.nnz))
    dense = torch.randn(30, 5)
    plan = HybridPlan.build(matrix, 5, theta=3).with_values(other.values)
    assert torch.allclose(plan.spmm(dense), other.to_dense() @ dense, atol=1e-4)


def test_the_model_follows_the_matrix_and_says_that_it_is_not_calibrated():
    full = torch.kron(torch.eye(40), torch.ones(8, 8))
    scattered = SparseMatrix.from_coo(np.arange(4000), np.arange(4000) % 997, shape=(4000, 997))
    blocks = HybridPlan.build(SparseMatrix.from_dense(full), 128)
    lone = HybridPlan.build(scattered, 128)
    assert blocks.stats()["nnz_tensor"] == blocks.nnz
    assert lone.stats()["nnz_tensor"] == 0
    assert lone.seconds[lone.theta] == min(lone.seconds.values())
    assert "NOT calibrated" in lone.explain() and lone.stats()["costs_calibrated"] is False


def test_plans_move_between_devices():
    plan = HybridPlan.build(random_matrix((9, 9), 0.4), 8).to("meta")
    assert {array.device.type for part in (plan.tensor, plan.long, plan.short) for array in part.values()} == {"meta"}


def test_bad_input_is_refused():
    matrix = random_matrix((9, 9), 0.4)
    with pytest.raises(ValueError, match="theta must be 'auto' or from 1 to 9 for spmm, got 10"):
        HybridPlan.build(matrix, 8, theta=10)
    with pytest.raises(ValueError, match="op must be spmm or sddmm, got 'gemm'"):
        HybridPlan.build(matrix, 8, op="gemm")
    with pytest.raises(TypeError, match="dtype must be float16, bfloat16 or float32"):
        HybridPlan.build(matrix, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="n must not be negative"):
        HybridPlan.build(matrix, -8)
    plan = HybridPlan.build(matrix, 8)
    with pytest.raises(ValueError, match="for which the plan was built, got sddmm"):
        plan.sddmm(torch.ones(9, 2), torch.ones(9, 2))
    with pytest.raises(ValueError, match="matrix of 9 rows"):
        plan.spmm(torch.ones(8, 2))
    with pytest.raises(TypeError, match="operands must be torch.float32"):
        plan.spmm(torch.ones(9, 2).half())
