"""Layers against dense formulas from the papers, in float64, with gradients; PyTorch Geometric where it is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.graphs import AGNNConv, GATConv, GCNConv, as_graph, gcn_normalised, with_self_loops
from gossamer.sparse import SparseMatrix

NODES, FEATURES = 30, 7


def edges(nodes: int = NODES, count: int = 90) -> Tensor:
    """Distinct directed edges, a few of them loops; the last node has none."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(nodes - 1, (2, count), generator=generator)
    return torch.unique(torch.cat([pairs, torch.tensor([[3, 5], [3, 5]])], 1), dim=1)


def adjacency(edge_index: Tensor, nodes: int = NODES) -> Tensor:
    dense = torch.zeros(nodes, nodes, dtype=torch.float64)
    dense[edge_index[1], edge_index[0]] = 1.0
    return dense


def looped(dense: Tensor) -> Tensor:
    return dense.clone().fill_diagonal_(1.0)


def check(layer: torch.nn.Module, expected: object, *parameters: Tensor) -> None:
    """Values and gradients, in the features and the parameters."""
    assert callable(expected)
    x = torch.randn(NODES, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    ours, theirs = layer(x, edges()), expected(x)
    torch.testing.assert_close(ours, theirs)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view_as(ours)
    leaves = [x, *parameters]
    grads = (torch.autograd.grad((y * weights).sum(), leaves) for y in (ours, theirs))
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("out", [3, 12])
def test_gcn_is_the_normalised_product(out: int) -> None:
    layer = GCNConv(FEATURES, out).double()
    assert layer.bias is not None
    layer.bias.data.uniform_()
    a = looped(adjacency(edges()))
    scale = a.sum(1).rsqrt()
    propagation = scale[:, None] * a * scale
    check(layer, lambda x: propagation @ x @ layer.weight + layer.bias, layer.weight, layer.bias)


def test_agnn_weighs_neighbours_by_their_cosine() -> None:
    layer = AGNNConv().double()
    layer.beta.data.fill_(1.7)
    mask = looped(adjacency(edges())) > 0

    def dense(x: Tensor) -> Tensor:
        unit = x / x.norm(dim=1, keepdim=True)
        scores = (layer.beta * (unit @ unit.T)).masked_fill(~mask, -torch.inf)
        return scores.softmax(1) @ x

    check(layer, dense, layer.beta)


@pytest.mark.parametrize("concat", [True, False])
def test_gat_attends_by_the_papers_formula(concat: bool) -> None:
    layer = GATConv(FEATURES, 4, heads=3, concat=concat).double()
    mask = looped(adjacency(edges())) > 0

    def dense(x: Tensor) -> Tensor:
        heads = []
        for head in range(3):
            h = (x @ layer.weight).view(NODES, 3, 4)[:, head]
            scores = (h @ layer.target[0, head])[:, None] + (h @ layer.source[0, head])
            scores = torch.nn.functional.leaky_relu(scores, 0.2).masked_fill(~mask, -torch.inf)
            heads.append(scores.softmax(1) @ h)
        return (torch.cat(heads, 1) if concat else sum(heads) / 3) + layer.bias

    check(layer, dense, layer.weight, layer.source, layer.target)


def test_layers_give_what_pytorch_geometric_gives() -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="PyTorch Geometric is not installed")
    x = torch.randn(NODES, FEATURES, dtype=torch.float64)
    gcn, theirs = GCNConv(FEATURES, 5).double(), pyg.GCNConv(FEATURES, 5).double()
    theirs.lin.weight.data = gcn.weight.data.T
    torch.testing.assert_close(gcn(x, edges()), theirs(x, edges()))
    torch.testing.assert_close(AGNNConv().double()(x, edges()), pyg.AGNNConv().double()(x, edges()))
    gat, theirs = GATConv(FEATURES, 4, heads=2).double(), pyg.GATConv(FEATURES, 4, heads=2).double()
    theirs.lin.weight.data = gat.weight.data.T
    theirs.att_src.data, theirs.att_dst.data = gat.source.data, gat.target.data
    torch.testing.assert_close(gat(x, edges()), theirs(x, edges()))


def test_a_matrix_and_an_edge_index_are_the_same_graph() -> None:
    x = torch.randn(NODES, FEATURES)
    layer = GCNConv(FEATURES, 3)
    expected = layer(x, edges())
    torch.testing.assert_close(layer(x, as_graph(edges(), NODES)), expected)
    layer.normalise = False
    torch.testing.assert_close(layer(x, gcn_normalised(as_graph(edges(), NODES))), expected)


def test_loops_that_are_there_keep_their_weight() -> None:
    graph = SparseMatrix.from_coo([0, 0, 2], [0, 1, 2], [4.0, 1.0, 2.0], (3, 3))
    assert with_self_loops(graph).to_dense().diag().tolist() == [4.0, 1.0, 2.0]
    assert with_self_loops(graph, 0.5).to_dense().diag().tolist() == [4.0, 0.5, 2.0]


def test_graphs_that_do_not_fit_are_refused() -> None:
    layer = GCNConv(FEATURES, 3)
    with pytest.raises(ValueError, match=r"\(4, 4\).*got \(3, 3\)"):
        layer(torch.ones(4, FEATURES), as_graph(torch.tensor([[0], [1]]), 3))
    with pytest.raises(TypeError, match="list"):
        layer(torch.ones(4, FEATURES), [[0], [1]])
    with pytest.raises(ValueError, match="edge_weight goes with an edge_index"):
        layer(torch.ones(3, FEATURES), as_graph(torch.tensor([[0], [1]]), 3), torch.ones(1))
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        GATConv(3, 3, heads=0)
