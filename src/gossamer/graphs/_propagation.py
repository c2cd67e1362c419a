"""What graph layers propagate over: a square sparse matrix whose row i lists the neighbours that node i hears."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.sparse import SparseMatrix

Graph = SparseMatrix | Tensor
"""A square matrix (row = target), or PyTorch Geometric's ``edge_index`` ``(2, edges)``: sources, then targets."""


def as_graph(graph: Graph, nodes: int, edge_weight: Tensor | None = None) -> SparseMatrix:
    """``graph`` as a matrix of ``nodes`` rows; an ``edge_index`` is converted, parallel edges are summed.

    Raises:
        TypeError: ``graph`` is neither a matrix nor a tensor.
        ValueError: it does not have ``nodes`` nodes, or weights come with a matrix, which has its own.

    >>> as_graph(torch.tensor([[0, 2], [1, 1]]), 3).to_dense().tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    if isinstance(graph, Tensor):
        return SparseMatrix.from_edge_index(graph, edge_weight, nodes)
    if not isinstance(graph, SparseMatrix):
        raise TypeError(f"graph must be a SparseMatrix or an edge_index tensor, got {type(graph).__name__}")
    if edge_weight is not None:
        raise ValueError("edge_weight goes with an edge_index; a SparseMatrix carries its own values")
    if graph.shape != (nodes, nodes):
        raise ValueError(f"graph must be of shape {(nodes, nodes)} for {nodes} rows of features, got {graph.shape}")
    return graph


def with_self_loops(graph: SparseMatrix, weight: float = 1.0) -> SparseMatrix:
    """``graph`` with ``weight`` on the diagonal wherever there is no entry yet.

    >>> with_self_loops(SparseMatrix.from_coo([0, 1], [1, 1], [2.0, 5.0], (2, 2))).to_dense().tolist()
    [[1.0, 2.0], [0.0, 5.0]]
    """
    rows, columns = graph.rows.long(), graph.indices.long()
    has = torch.zeros(graph.shape[0], dtype=torch.bool, device=graph.device)
    has[rows[rows == columns]] = True
    missing = (~has).nonzero().flatten()
    loops = torch.full((len(missing),), weight, dtype=graph.dtype, device=graph.device)
    return SparseMatrix.from_coo(
        torch.cat([rows, missing]), torch.cat([columns, missing]), torch.cat([graph.values, loops]), graph.shape
    )


def gcn_normalised(graph: SparseMatrix) -> SparseMatrix:
    """``D^-1/2 (A + I) D^-1/2`` with the row sums D of ``A + I`` (Kipf & Welling, ICLR 2017); isolated rows stay zero.

    >>> gcn_normalised(SparseMatrix.from_coo([0, 1], [1, 0], [1.0, 1.0], (2, 2))).to_dense().round(decimals=4).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    looped = with_self_loops(graph)
    rows, columns = looped.rows.long(), looped.indices.long()
    degree = torch.zeros(graph.shape[0], dtype=looped.dtype, device=looped.device).index_add_(0, rows, looped.values)
    scale = torch.where(degree > 0, degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt(), 0)
    return looped.with_values(looped.values * scale[rows] * scale[columns])
