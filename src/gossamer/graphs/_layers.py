"""Layers of graph networks: each is one or two sparse products.

They follow their papers and are called as PyTorch Geometric's: ``layer(features, graph)``, with a matrix or an
``edge_index``. An ``edge_index`` is converted in every call; convert it once (:func:`~gossamer.graphs.as_graph`) where it
stays the same. Parallel edges count as one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.graphs._propagation import Graph, as_graph, gcn_normalised, with_self_loops
from gossamer.sparse import SparseMatrix, edge_softmax, sddmm, spmm


class GCNConv(nn.Module):
    """``P X W + b`` with ``P = D^-1/2 (A + I) D^-1/2`` (Kipf & Welling, ICLR 2017).

    normalise: the graph is ``A``; False: it is ``P`` already, as :func:`gcn_normalised` makes it once for all layers.

    >>> layer = GCNConv(4, 2)
    >>> layer(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 2])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, normalise: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.normalise = normalise
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, graph: Graph, edge_weight: Tensor | None = None) -> Tensor:
        """``x``: ``(nodes, in)``; the result ``(nodes, out)``."""
        matrix = as_graph(graph, len(x), edge_weight)
        if self.normalise:
            matrix = gcn_normalised(matrix)
        if self.weight.shape[0] < self.weight.shape[1]:  # the sparse product costs as many columns as it sees
            y = spmm(_of_type(matrix, x), x) @ self.weight
        else:
            y = spmm(_of_type(matrix, x), x @ self.weight)
        return y if self.bias is None else y + self.bias


class AGNNConv(nn.Module):
    """Neighbours weighed by a softmax of ``beta * cos(x_i, x_j)`` (Thekumparampil et al., 2018, arXiv 1803.03735).

    >>> AGNNConv()(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])).tolist()[2]
    [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, trained: bool = True, add_self_loops: bool = True) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1), requires_grad=trained)
        self.add_self_loops = add_self_loops

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """``x``: ``(nodes, features)``, and so is the result. The values of the graph play no part."""
        matrix = _looped(graph, len(x), self.add_self_loops)
        unit = F.normalize(x, dim=1)
        scores = sddmm(matrix, unit, unit)
        return spmm(edge_softmax(scores.with_values(scores.values * self.beta.to(x.dtype))), x)


class GATConv(nn.Module):
    """Attention with ``heads`` heads: neighbours weighed by a softmax of ``LeakyReLU(a . [W x_j, W x_i])``.

    (Veličković et al., ICLR 2018.) concat: heads stand side by side, else their mean is taken. dropout: of attention.

    >>> GATConv(4, 2, heads=3)(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])).shape
    torch.Size([3, 6])
    """

    def __init__(
        self, in_features: int, out_features: int, heads: int = 1, concat: bool = True, slope: float = 0.2,
        dropout: float = 0.0, bias: bool = True, add_self_loops: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}")
        self.heads, self.out_features, self.concat = heads, out_features, concat
        self.slope, self.dropout, self.add_self_loops = slope, dropout, add_self_loops
        self.weight = nn.Parameter(torch.empty(in_features, heads * out_features))
        self.source, self.target = (nn.Parameter(torch.empty(1, heads, out_features)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(heads * out_features if concat else out_features)) if bias else None
        for parameter in (self.weight, self.source, self.target):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """``x``: ``(nodes, in)``; the result ``(nodes, heads * out)`` or, without ``concat``, ``(nodes, out)``."""
        matrix = _looped(graph, len(x), self.add_self_loops)
        projected = (x @ self.weight).view(len(x), self.heads, self.out_features)
        from_source = (projected * self.source).sum(-1)  # (nodes, heads)
        at_target = (projected * self.target).sum(-1)
        rows, columns = matrix.rows.long(), matrix.indices.long()
        scores = F.leaky_relu(from_source[columns] + at_target[rows], self.slope)
        outputs = [self._head(matrix, scores[:, head], projected[:, head]) for head in range(self.heads)]
        y = torch.cat(outputs, 1) if self.concat else torch.stack(outputs).mean(0)
        return y if self.bias is None else y + self.bias

    def _head(self, matrix: SparseMatrix, scores: Tensor, projected: Tensor) -> Tensor:
        weights = edge_softmax(matrix.with_values(scores.contiguous()))
        dropped = F.dropout(weights.values, self.dropout, self.training)
        return spmm(weights.with_values(dropped), projected.contiguous())


def _looped(graph: Graph, nodes: int, add_self_loops: bool) -> SparseMatrix:
    matrix = as_graph(graph, nodes)
    return with_self_loops(matrix) if add_self_loops else matrix


def _of_type(matrix: SparseMatrix, x: Tensor) -> SparseMatrix:
    return matrix if matrix.dtype == x.dtype else matrix.with_values(matrix.values.to(x.dtype))
