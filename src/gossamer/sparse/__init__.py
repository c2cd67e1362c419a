"""Sparse matrices times dense ones, on patterns that no hardware likes: graphs, pruned networks, meshes.

In: a :class:`SparseMatrix` (from coordinates, SciPy, torch, PyG or a file). Out: products, and plans that say why.

- :class:`SparseMatrix`: checked, sorted compressed rows; :func:`read_matrix`, :func:`read_edges` read files.
- :func:`statistics`: degrees, and how well the pattern fills tensor-core vectors.
"""

from gossamer.sparse._io import read_edges, read_matrix
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._statistics import Statistics, statistics

__all__ = [
    "SparseMatrix",
    "Statistics",
    "read_edges",
    "read_matrix",
    "statistics",
]
