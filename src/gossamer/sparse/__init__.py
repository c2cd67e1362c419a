"""Sparse matrices times dense ones, on patterns that no hardware likes: graphs, pruned networks, meshes.

In: a :class:`SparseMatrix` (from coordinates, SciPy, torch, PyG or a file). Out: products, and plans that say why.

- :class:`SparseMatrix`: checked, sorted compressed rows; :func:`read_matrix`, :func:`read_edges` read files.
- :func:`spmm`, :func:`sddmm`, :func:`edge_softmax`: the products, with gradients and under ``torch.compile``.
- :func:`spmm_plan`: which way a product goes and why; it steps aside where another library is faster.
- :class:`MEBCRS`, :class:`HybridPlan`, :class:`GCOO`: what GPU kernels read: 8x1 vectors (FlashSparse, PPoPP 2025), the
  split between tensor and CUDA cores (Libra, arXiv 2506.22714), grouped coordinates (arXiv 2005.14469).
- :func:`gcoo_spmm`, :func:`spdm`: products of matrices that change every call.
- :func:`reorder`: rows that look alike next to each other; products come back exactly.
- :func:`examine`, :func:`write_report`: one matrix looked at as a whole, as a page with its picture.
- :func:`statistics`: degrees, and how well the pattern fills tensor-core vectors.
"""

from gossamer.sparse._gcoo import GCOO, gcoo_spmm, spdm
from gossamer.sparse._hybrid import HybridPlan
from gossamer.sparse._io import read_edges, read_matrix
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._mebcrs import MEBCRS
from gossamer.sparse._planner import SpmmPlan, spmm_plan
from gossamer.sparse._products import edge_softmax, sddmm, spmm
from gossamer.sparse._reorder import Ordering, reorder
from gossamer.sparse._report import examine, write_report
from gossamer.sparse._statistics import Statistics, statistics

__all__ = [
    "GCOO",
    "MEBCRS",
    "HybridPlan",
    "Ordering",
    "SparseMatrix",
    "SpmmPlan",
    "Statistics",
    "edge_softmax",
    "examine",
    "gcoo_spmm",
    "read_edges",
    "read_matrix",
    "reorder",
    "sddmm",
    "spdm",
    "spmm",
    "spmm_plan",
    "statistics",
    "write_report",
]
