"""Path problems on sparse graphs: exact distances between all vertices.

In: a sparse matrix of weights, or a file of roads. Out: distances, predecessors, plans that can be solved again.

- :func:`apsp`, :func:`apsp_plan`: all-pairs shortest paths by elimination in a reordered graph (ROME; SuperFW, PPoPP 2020);
  also widest paths and reachability; on CPUs and GPUs.
- :class:`WeightedGraph`, :func:`read_graph`: stored entries are edges, zeros included; road files, edge lists.
- :func:`path`: the vertices of one path; :class:`NegativeCycleError`.
"""

from gossamer.graphs._apsp import METHODS, ApspPlan, apsp, apsp_plan
from gossamer.graphs._graph_files import read_graph
from gossamer.graphs._paths import path
from gossamer.graphs._weighted import NegativeCycleError, WeightedGraph

__all__ = ["METHODS", "ApspPlan", "NegativeCycleError", "WeightedGraph", "apsp", "apsp_plan", "path", "read_graph"]
