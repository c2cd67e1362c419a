"""Gradients equal those of dense autograd, in every type, eagerly and under torch.compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import matrices, random_matrix

from gossamer.sparse import SparseMatrix, edge_softmax, sddmm, spmm


def leaf(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def dense_of(pattern, values):
    """The dense matrix as a differentiable function of the values."""
    places = pattern.rows.long() * pattern.shape[1] + pattern.indices.long()
    return values.new_zeros(pattern.shape[0] * pattern.shape[1]).index_put((places,), values).view(pattern.shape)


def test_gradcheck_of_all_three_and_their_second_derivatives():
    pattern = random_matrix((5, 7), 0.4, torch.float64)
    values, dense, x, y = leaf(pattern.nnz), leaf(7, 3), leaf(5, 4, seed=1), leaf(7, 4, seed=2)
    product = lambda values, dense: spmm(pattern.with_values(values), dense)  # noqa: E731
    scores = lambda x, y: sddmm(pattern, x, y).values  # noqa: E731
    assert torch.autograd.gradcheck(product, (values, dense))
    assert torch.autograd.gradcheck(scores, (x, y))
    assert torch.autograd.gradcheck(lambda values: edge_softmax(pattern.with_values(values)).values, (values,))
    assert torch.autograd.gradgradcheck(product, (values, dense))
    assert torch.autograd.gradgradcheck(scores, (x, y))


@settings(max_examples=25)
@given(pattern=matrices(sizes=(1, 2, 8, 17)), n=st.sampled_from([1, 8, 20]))
def test_gradients_equal_dense_autograd(pattern, n):
    values, dense = leaf(pattern.nnz, dtype=torch.float32), leaf(pattern.shape[1], n, dtype=torch.float32, seed=1)
    weights = torch.randn(pattern.shape[0], n)
    ours = torch.autograd.grad((spmm(pattern.with_values(values), dense) * weights).sum(), (values, dense))
    theirs = torch.autograd.grad((dense_of(pattern, values) @ dense * weights).sum(), (values, dense))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


def attention(pattern, x, y, features):
    return spmm(edge_softmax(sddmm(pattern, x, y)), features)


def dense_attention(pattern, x, y, features):
    places = pattern.rows.long(), pattern.indices.long()
    scores = torch.full(pattern.shape, float("-inf"), dtype=x.dtype).index_put(places, (x @ y.T)[places])
    return torch.softmax(scores, 1).nan_to_num(0) @ features


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_graph_attention_backward_works_in_half_types(dtype):
    """What torch.sparse cannot: sampled products in half types have no backward there."""
    pattern = random_matrix((12, 12), 0.4, dtype)
    inputs = [leaf(12, 8, dtype=dtype, seed=seed) for seed in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    attention(pattern, *inputs).sum().backward()
    wide = pattern.to(dtype=torch.float64)
    kept = torch.zeros(12, dtype=torch.bool).index_fill(0, wide.rows.long(), True)
    dense_attention(wide, *exact)[kept].sum().backward()
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}[dtype]
    for mine, other in zip(inputs, exact, strict=True):
        assert mine.grad.dtype == dtype
        assert torch.allclose(mine.grad.double(), other.grad.nan_to_num(0), atol=tolerance)


def test_only_the_gradients_that_are_asked_for_are_computed():
    matrix = random_matrix((6, 5), 0.5)
    values = matrix.values.clone().requires_grad_()
    spmm(matrix.with_values(values), torch.ones(5, 2)).sum().backward()
    assert "transposed" not in matrix._memo
    assert torch.equal(values.grad, torch.full((matrix.nnz,), 2.0))
    with torch.no_grad():
        assert not spmm(matrix.with_values(values), torch.ones(5, 2)).requires_grad


@pytest.mark.parametrize("prepared", [False, True])
def test_torch_compile_traces_the_products_without_a_break(prepared):
    pattern = random_matrix((12, 12), 0.4)
    if prepared:
        pattern.transposed()
    inputs = [leaf(12, 8, dtype=torch.float32, seed=seed) for seed in range(3)]
    compiled = torch.compile(lambda x, y, z: attention(pattern, x, y, z), backend="aot_eager", fullgraph=True)
    eager = attention(pattern, *inputs)
    result = compiled(*inputs)
    assert torch.allclose(result, eager, atol=1e-5)
    gradients = torch.autograd.grad(result.sum(), inputs), torch.autograd.grad(eager.sum(), inputs)
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_operators_pass_torchs_own_checks():
    from gossamer.sparse import _ops

    matrix = random_matrix((6, 5), 0.5)
    transposed = matrix.transposed()
    _, _, order = _ops.transposed_pattern(matrix)
    pattern = matrix.indptr, matrix.indices
    back = transposed.indptr, transposed.indices, order
    values, dense = matrix.values.clone().requires_grad_(), torch.randn(5, 3, requires_grad=True)
    x, y = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(_ops.spmm_op, (*pattern, values, *back, dense))
    torch.library.opcheck(_ops.sddmm_op, (*pattern, *back, x, y))
    torch.library.opcheck(_ops.edge_softmax_op, (matrix.indptr, values))
    torch.library.opcheck(_ops.transpose_op, (*pattern, 5))


def test_a_graph_layer_learns():
    """Two steps of descent on attention over a ring reduce the loss."""
    ring = SparseMatrix.from_coo(range(8), [(i + 1) % 8 for i in range(8)])
    x, goal = leaf(8, 4, dtype=torch.float32), torch.randn(8, 4)
    optimiser = torch.optim.SGD([x], lr=0.1)
    losses = []
    for _ in range(3):
        loss = (spmm(ring, x) - goal).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
