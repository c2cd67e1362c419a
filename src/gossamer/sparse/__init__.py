"""Sparse matrices times dense ones, on patterns that no hardware likes: graphs, pruned networks, meshes.

In: a :class:`SparseMatrix` (from coordinates, SciPy, torch, PyG or a file). Out: products, and plans that say why.

- :class:`SparseMatrix`: checked, sorted compressed rows; :func:`read_matrix`, :func:`read_edges` read files.
- :func:`spmm`, :func:`sddmm`, :func:`edge_softmax`: the products, with gradients and under ``torch.compile``.
- :func:`spmm_plan`: which way a product goes and why; it steps aside where another library is faster.
- :func:`statistics`: degrees, and how well the pattern fills tensor-core vectors.
"""

from gossamer.sparse._io import read_edges, read_matrix
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._planner import SpmmPlan, spmm_plan
from gossamer.sparse._products import edge_softmax, sddmm, spmm
from gossamer.sparse._statistics import Statistics, statistics

__all__ = [
    "SparseMatrix",
    "SpmmPlan",
    "Statistics",
    "edge_softmax",
    "read_edges",
    "read_matrix",
    "sddmm",
    "spmm",
    "spmm_plan",
    "statistics",
]
