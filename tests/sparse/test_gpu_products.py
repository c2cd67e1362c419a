"""The GPU kernels against float64 on the stored values, with the bounds of float32 sums; gradients; graphs; repeats."""

import numpy as np
import pytest
import torch
from matrices import error_bound, random_dense, random_matrix

from gossamer.sparse import MEBCRS, SparseMatrix, edge_softmax, sddmm, spmm, spmm_plan
from gossamer.sparse._entries_gpu import EntriesVariant, entries_sddmm
from gossamer.sparse._generators import finite_elements, rmat
from gossamer.sparse._mebcrs import _merged_vectors
from gossamer.sparse._planner import possible_ways
from gossamer.sparse._rows_gpu import RowsVariant, rows_spmm
from gossamer.sparse._vectors_gpu import VectorsVariant, vectors_sddmm, vectors_spmm

pytestmark = pytest.mark.gpu
HALF, FULL = torch.float16, torch.float32
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WIDTHS = [1, 2, 3, 8, 20, 31, 32, 33, 64, 100, 128, 136, 257]
VARIANTS = [
    RowsVariant(),
    RowsVariant(lanes=8, rounds=3, longest=5, segment=40, window=32),
    RowsVariant(lanes=16, unroll=4, longest=0, segment=7),
    RowsVariant(lanes=32, threads=128, unroll=4, rounds=2, longest=20, segment=64),
    RowsVariant(lanes=8, threads=1024, unroll=8, longest=30),
]
SHAPES = [((1, 1), 1.0), ((9, 17), 0.3), ((100, 60), 0.05), ((300, 500), 0.3), ((1000, 40), 0.02), ((3, 3000), 0.9)]


def assert_close(product, exact, absolute, terms, storage, factor=2.0):
    """``factor`` 2 for sums of float32 in any order, 4 for tensor cores, which truncate when they align addends."""
    bound = factor / 2 * error_bound(absolute, terms, storage)
    assert np.all(np.abs(product.double().cpu().numpy() - exact) <= bound)


def assert_product(matrix, dense, product, factor=2.0):
    sparse, other = matrix.to_dense().double().cpu().numpy(), dense.double().cpu().numpy()
    terms = np.diff(matrix.indptr.cpu().numpy())[:, None]
    assert product.dtype == matrix.dtype and product.shape == (matrix.shape[0], dense.shape[1])
    assert_close(product, sparse @ other, np.abs(sparse) @ np.abs(other), terms, matrix.dtype, factor)


def rounded_to_tf32(tensor):
    """float32 with 10 bits behind the point, to nearest, halves away from zero."""
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_products_by_rows_are_within_rounding_of_float64(variant, dtype):
    if dtype in (torch.bfloat16, torch.float64) and variant not in VARIANTS[:2]:
        pytest.skip("other types differ only in how they are loaded")
    for (shape, density), n in zip(SHAPES * 2, [*WIDTHS[:5], 64, *WIDTHS[5:]], strict=False):
        matrix = random_matrix(shape, density, dtype).to("cuda")
        dense = random_dense((shape[1], n), 1.0, dtype).cuda()
        product = rows_spmm(matrix.indptr, matrix.indices, matrix.values, dense, variant)
        assert_product(matrix, dense, product)


@pytest.mark.parametrize("n", WIDTHS)
def test_any_width_and_any_start_in_memory(n):
    for dtype in TYPES:
        matrix = random_matrix((77, 90), 0.2, dtype, index=torch.int64).to("cuda")
        stored = random_dense((90 * n + 1, 1), 1.0, dtype).cuda().view(-1)
        for dense in (stored[:-1].view(90, n), stored[1:].view(90, n)):
            assert_product(matrix, dense, spmm(matrix, dense, backend="rows"))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FULL], ids=str)
@pytest.mark.parametrize(
    "variant", [VectorsVariant(), VectorsVariant(256, 2, 1, 2), VectorsVariant(64, 1, 4, 1)], ids=str
)
def test_products_by_vectors_are_within_rounding_of_float64(variant, dtype):
    for (shape, density), n in zip(SHAPES * 2, [*WIDTHS[:5], 64, *WIDTHS[5:]], strict=False):
        matrix = random_matrix(shape, density, dtype).to("cuda")
        dense = random_dense((shape[1], n), 1.0, dtype).cuda()
        product = vectors_spmm(MEBCRS.from_matrix(matrix), dense, variant)
        if dtype == FULL:
            matrix, dense = matrix.with_values(rounded_to_tf32(matrix.values)), rounded_to_tf32(dense)
        assert_product(matrix, dense, product, factor=4.0)


@pytest.mark.parametrize("count", [8 * 8 - 1, 8 * 8, 8 * 8 + 1, 2 * 8 * 8])
def test_no_part_is_lost_where_a_window_just_fills_it(count):
    matrix = random_matrix((8, count), 1.0, HALF).to("cuda")
    dense = random_dense((count, 64), 1.0, HALF).cuda()
    assert_product(matrix, dense, vectors_spmm(MEBCRS.from_matrix(matrix), dense, VectorsVariant(blocks=8)), 4.0)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FULL], ids=str)
def test_the_format_is_made_on_the_gpu_as_on_the_cpu(dtype):
    matrix = rmat(1003, 9000, 1).to(dtype=dtype)
    ours, theirs = MEBCRS.from_matrix(matrix.to("cuda")), MEBCRS.from_matrix(matrix)
    for name in ("row_pointers", "column_index", "values", "slot"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name))
    assert len(_merged_vectors(matrix, 8, ours.width)[1]) == len(ours.column_index)


@pytest.mark.parametrize("d", [1, 3, 8, 31, 32, 64, 100, 128, 200])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sampled_products_are_within_rounding_of_float64(d, dtype):
    for shape, density in SHAPES[1:]:
        pattern = random_matrix(shape, density, dtype).to("cuda")
        x, y = (random_dense((size, d), 1.0, dtype, seed).cuda() for seed, size in enumerate(shape))
        place = pattern.rows.long().cpu(), pattern.indices.long().cpu()
        wide = [operand.double().cpu().numpy() for operand in (x, y)]
        exact, absolute = ((a[place[0]] * b[place[1]]).sum(1) for a, b in (wide, [np.abs(operand) for operand in wide]))
        for variant in (EntriesVariant(), EntriesVariant(64, 3), EntriesVariant(128, 4, True)):
            found = entries_sddmm(pattern.indptr, pattern.indices, x, y, variant)
            assert_close(found, exact, absolute, d, dtype)
        if dtype in (HALF, torch.bfloat16):
            found = vectors_sddmm(MEBCRS.from_matrix(pattern), x, y)
            assert_close(found.entry_values(), exact, absolute, d, dtype, 4.0)
            assert torch.equal(found.values != 0, found.with_values(found.entry_values()).values != 0)
        if dtype == FULL:
            found = vectors_sddmm(MEBCRS.from_matrix(pattern), x, y).entry_values()
            error = np.abs(found.double().cpu().numpy() - exact)
            assert np.all(error <= 1.1 * 2.0**-10 * absolute + 1e-30)


def test_sums_are_kept_in_float32():
    ones = SparseMatrix.from_dense(torch.ones(2, 4096, dtype=HALF)).to("cuda")
    dense = torch.ones(4096, 64, dtype=HALF, device="cuda")
    big = SparseMatrix.from_dense(torch.full((1, 1 << 17), 0.25, dtype=HALF)).to("cuda")
    halves = torch.ones(1 << 17, 8, dtype=HALF, device="cuda")
    for product in (
        lambda matrix, b: vectors_spmm(MEBCRS.from_matrix(matrix), b),
        lambda matrix, b: rows_spmm(matrix.indptr, matrix.indices, matrix.values, b),
    ):
        assert (product(ones, dense) == 4096).all()
        assert (product(big, halves) == 32768).all()
        assert torch.isinf(product(big, 2 * halves)).all()  # 65,536 does not fit into float16, but its float32 sum does


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, FULL], ids=str)
@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_infinities_reach_only_rows_that_have_an_entry_there(dtype, special):
    matrix = random_matrix((64, 40), 0.1, dtype).to("cuda")
    dense = random_dense((40, 100), 1.0, dtype).cuda()
    dense[::5] = special
    exact = np.zeros((64, 100))
    for row, column, value in zip(matrix.rows.tolist(), matrix.indices.tolist(), matrix.values.tolist(), strict=True):
        exact[row] += value * dense[column].double().cpu().numpy()
    for blocks in (1, 32):
        product = vectors_spmm(MEBCRS.from_matrix(matrix), dense, VectorsVariant(blocks=blocks))
        assert np.array_equal(np.isfinite(exact), product.isfinite().cpu().numpy())
        assert np.array_equal(np.isnan(exact), product.isnan().cpu().numpy())
    product = spmm(matrix, dense)
    assert np.array_equal(np.isnan(exact), product.isnan().cpu().numpy())


def test_a_hundred_launches_give_the_same_bits():
    matrix = rmat(20_000, 600_000, 3, "cuda")
    dense = torch.randn(20_000, 96, device="cuda")
    form = MEBCRS.from_matrix(matrix)
    small = RowsVariant(longest=50, segment=200)
    products = [
        lambda: rows_spmm(matrix.indptr, matrix.indices, matrix.values, dense, small),
        lambda: vectors_spmm(form, dense, VectorsVariant(blocks=4)),
        lambda: entries_sddmm(matrix.indptr, matrix.indices, dense, dense),
    ]
    for product in products:
        first = product()
        assert all(torch.equal(product(), first) for _ in range(100))
    assert (products[0]() - products[1]()).norm() < 1e-3 * products[0]().norm()


def test_meshes_agree_between_both_ways():
    matrix = finite_elements(3000, 5, device="cuda")
    dense = torch.randn(matrix.shape[1], 128, device="cuda")
    by_rows, by_vectors = spmm(matrix, dense), vectors_spmm(MEBCRS.from_matrix(matrix), dense)
    assert (by_rows - by_vectors).norm() < 1e-3 * by_rows.norm()


def test_gradients_equal_those_of_the_cpu():
    for dtype in (torch.float64, FULL, HALF):
        pattern = random_matrix((50, 40), 0.2, dtype)
        inputs = [random_dense((size, 24), 1.0, dtype, seed) for seed, size in enumerate((50, 40, 40))]
        found = []
        for device in ("cpu", "cuda"):
            leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
            there = pattern.to(device)
            out = spmm(edge_softmax(sddmm(there, *leaves[:2])), leaves[2])
            weights = torch.linspace(-1, 1, out.numel(), device=device).view_as(out).to(dtype)
            found.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
        tolerance = {torch.float64: 1e-6, FULL: 1e-4, HALF: 2e-2}[dtype]
        for mine, theirs in zip(*found, strict=True):
            assert torch.allclose(mine.float(), theirs.cpu().float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_way_of_a_plan_gives_the_product(dtype):
    matrix = random_matrix((300, 200), 0.1, dtype).to("cuda")
    dense = random_dense((200, 64), 1.0, dtype).cuda()
    plan = spmm_plan(matrix, 64)
    assert plan.measured and plan.backend in plan.seconds
    assert spmm_plan(matrix, 64) is plan
    for way in ("auto", *possible_ways(matrix)):
        product = spmm(matrix, dense, backend=way)
        if way not in ("torch", "dense"):
            assert_product(matrix, dense, product, 4.0)
    changed = matrix.with_values(2 * matrix.values)
    for way in possible_ways(matrix):
        assert torch.allclose(spmm(changed, dense, backend=way), 2 * spmm(matrix, dense, backend=way), rtol=2e-2)
    with pytest.raises(ValueError, match="rows-wide.*got 'scipy'"):
        spmm(matrix, dense, backend="scipy")


def test_tensor_cores_take_float32_only_where_torch_may_round_it():
    matrix = random_matrix((64, 64), 0.3).to("cuda")
    assert "vectors" not in possible_ways(matrix)
    torch.set_float32_matmul_precision("high")
    try:
        assert "vectors" in possible_ways(matrix)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_run_compiled_and_in_graphs():
    matrix = random_matrix((200, 150), 0.1).to("cuda")
    dense = torch.randn(150, 64, device="cuda", requires_grad=True)
    eager = spmm(matrix, dense)
    compiled = torch.compile(lambda values, b: spmm(matrix.with_values(values), b), fullgraph=True)
    assert torch.equal(compiled(matrix.values, dense), eager)
    features = dense.detach()
    graph = torch.cuda.CUDAGraph()
    spmm(edge_softmax(sddmm(matrix, spmm(matrix, features), features)), features)
    with torch.cuda.graph(graph):
        out = spmm(edge_softmax(sddmm(matrix, spmm(matrix, features), features)), features)
    out.zero_()
    graph.replay()
    assert torch.equal(out, spmm(edge_softmax(sddmm(matrix, spmm(matrix, features), features)), features))


def test_empty_things_give_zeros():
    for shape in ((0, 5), (5, 0), (5, 7)):
        matrix = SparseMatrix.from_coo([], [], torch.empty(0), shape).to("cuda")
        assert torch.equal(
            spmm(matrix, torch.ones(shape[1], 9, device="cuda")), torch.zeros(shape[0], 9, device="cuda")
        )
        assert not len(
            sddmm(matrix, torch.ones(shape[0], 4, device="cuda"), torch.ones(shape[1], 4, device="cuda")).values
        )
        product = vectors_spmm(MEBCRS.from_matrix(matrix), torch.ones(shape[1], 9, device="cuda"))
        assert torch.equal(product, torch.zeros(shape[0], 9, device="cuda"))
