"""Graphs: networks on them, and the paths through them.

In: a graph (:class:`~gossamer.sparse.SparseMatrix`, PyTorch Geometric's ``edge_index``, a file of roads) and features of
its nodes or weights of its edges. Out: features, classes, trained models; distances, predecessors, plans to solve again.

Networks, on the sparse products of :mod:`gossamer.sparse`:

- :class:`GCNConv`, :class:`AGNNConv`, :class:`GATConv`: layers, on CPUs and GPUs, differentiable;
- :func:`as_graph`, :func:`with_self_loops`, :func:`gcn_normalised`: what layers propagate over;
- :class:`NodeTask`, :func:`read_planetoid`: a graph with features, classes and splits; Cora and its like;
- :class:`NodeClassifier`, :func:`train_nodes`: two or more layers trained to tell the classes of nodes.

Paths, by elimination in a reordered graph (ROME; SuperFW, PPoPP 2020):

- :func:`apsp`, :func:`apsp_plan`: exact distances between all vertices; also widest paths and reachability; CPUs and GPUs.
- :class:`WeightedGraph`, :func:`read_graph`: stored entries are edges, zeros included; road files, edge lists.
- :func:`path`: the vertices of one path; :class:`NegativeCycleError`.
"""

from gossamer.graphs._apsp import METHODS, ApspPlan, apsp, apsp_plan
from gossamer.graphs._graph_files import read_graph
from gossamer.graphs._layers import AGNNConv, GATConv, GCNConv
from gossamer.graphs._node_classes import NodeClassifier, NodeTraining, train_nodes
from gossamer.graphs._paths import path
from gossamer.graphs._planetoid import NodeTask, read_planetoid
from gossamer.graphs._propagation import as_graph, gcn_normalised, with_self_loops
from gossamer.graphs._weighted import NegativeCycleError, WeightedGraph

__all__ = [
    "METHODS",
    "AGNNConv",
    "ApspPlan",
    "GATConv",
    "GCNConv",
    "NegativeCycleError",
    "NodeClassifier",
    "NodeTask",
    "NodeTraining",
    "WeightedGraph",
    "apsp",
    "apsp_plan",
    "as_graph",
    "gcn_normalised",
    "path",
    "read_graph",
    "read_planetoid",
    "train_nodes",
    "with_self_loops",
]
