"""Graphs: layers of graph networks on the sparse products of :mod:`gossamer.sparse`, and their training.

In: a graph (:class:`~gossamer.sparse.SparseMatrix`, row = target, or PyTorch Geometric's ``edge_index``) and features of
its nodes. Out: features, classes, trained models.

- :class:`GCNConv`, :class:`AGNNConv`, :class:`GATConv`: layers, on CPUs and GPUs, differentiable;
- :func:`as_graph`, :func:`with_self_loops`, :func:`gcn_normalised`: what layers propagate over;
- :class:`NodeTask`, :func:`read_planetoid`: a graph with features, classes and splits; Cora and its like;
- :class:`NodeClassifier`, :func:`train_nodes`: two or more layers trained to tell the classes of nodes.
"""

from gossamer.graphs._layers import AGNNConv, GATConv, GCNConv
from gossamer.graphs._node_classes import NodeClassifier, NodeTraining, train_nodes
from gossamer.graphs._planetoid import NodeTask, read_planetoid
from gossamer.graphs._propagation import as_graph, gcn_normalised, with_self_loops

__all__ = [
    "AGNNConv",
    "GATConv",
    "GCNConv",
    "NodeClassifier",
    "NodeTask",
    "NodeTraining",
    "as_graph",
    "gcn_normalised",
    "read_planetoid",
    "train_nodes",
    "with_self_loops",
]
