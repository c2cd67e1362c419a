"""Training a graph network to tell the classes of nodes, full graph at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.graphs._layers import AGNNConv, GATConv, GCNConv
from gossamer.graphs._planetoid import NodeTask
from gossamer.graphs._propagation import gcn_normalised, with_self_loops
from gossamer.sparse import SparseMatrix

KINDS = ("gcn", "agnn", "gat")


class NodeClassifier(nn.Module):
    """A graph network as its paper has it for citation graphs.

    kind: "gcn" (``layers`` convolutions with ReLU between), "agnn" (a linear layer, ``layers`` attentions, a linear layer)
    or "gat" (8 heads of ``hidden / 8`` features, then one head). dropout: of features (and of attention, for "gat").

    Raises:
        ValueError: ``kind`` is unknown, ``layers`` is less than 1, or "gat" cannot share ``hidden`` among 8 heads.
    """

    def __init__(
        self, kind: str, in_features: int, classes: int, hidden: int = 16, layers: int = 2, dropout: float = 0.5
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if layers < 1:
            raise ValueError(f"layers must be at least 1, got {layers}")
        if kind == "gat" and hidden % 8:
            raise ValueError(f"hidden must be a multiple of gat's 8 heads, got {hidden}")
        self.kind, self.dropout = kind, dropout
        self.inner: nn.Module = nn.Identity()
        self.outer: nn.Module = nn.Identity()
        widths = [in_features, *[hidden] * (layers - 1), classes]
        if kind == "gcn":
            self.layers = nn.ModuleList(GCNConv(*pair, normalise=False) for pair in pairwise(widths))
        elif kind == "agnn":
            self.inner, self.outer = nn.Linear(in_features, hidden), nn.Linear(hidden, classes)
            made = (AGNNConv(trained=i > 0, add_self_loops=False) for i in range(layers))
            self.layers = nn.ModuleList(made)
        else:
            options = {"dropout": dropout, "add_self_loops": False}
            inner = [GATConv(width, hidden // 8, heads=8, **options) for width in widths[:-2]]  # type: ignore[arg-type]
            last = GATConv(widths[-2], classes, heads=1, concat=False, **options)  # type: ignore[arg-type]
            self.layers = nn.ModuleList([*inner, last])

    def propagation(self, graph: SparseMatrix) -> SparseMatrix:
        """What the layers propagate over, made once from the plain graph."""
        return gcn_normalised(graph) if self.kind == "gcn" else with_self_loops(graph)

    def forward(self, features: Tensor, propagation: SparseMatrix) -> Tensor:
        """Scores ``(nodes, classes)``."""
        x = F.dropout(features, self.dropout, self.training)
        if self.kind == "agnn":
            x = F.relu(self.inner(x))
        for i, layer in enumerate(self.layers):
            if i and self.kind != "agnn":
                x = F.dropout(F.relu(x) if self.kind == "gcn" else F.elu(x), self.dropout, self.training)
            x = layer(x, propagation)
        return self.outer(F.dropout(x, self.dropout, self.training)) if self.kind == "agnn" else x


@dataclass(frozen=True)
class NodeTraining:
    """What :func:`train_nodes` gives back: accuracies from 0 to 1 at the best epoch on the validation nodes.

    losses: of the training nodes, one an epoch.
    """

    test: float
    validation: float
    epoch: int
    losses: list[float] = field(repr=False)


def train_nodes(
    model: NodeClassifier, task: NodeTask, epochs: int = 200, rate: float = 0.01, decay: float = 5e-4,
    seed: int = 0, on_epoch: Callable[[int, float, float], None] | None = None,
) -> NodeTraining:  # fmt: skip
    """Train by Adam with weight ``decay`` on the first layer, as Kipf & Welling (ICLR 2017); the best epoch's weights stay.

    on_epoch: is told the epoch, the loss and the accuracy on the validation nodes.

    Raises:
        ValueError: ``epochs`` is less than 1.
        FloatingPointError: the loss is no longer finite.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    torch.manual_seed(seed)
    model.to(task.features.device)
    propagation = model.propagation(task.graph)
    first = {id(parameter) for parameter in (*model.inner.parameters(), *model.layers[0].parameters())}
    groups = [[p for p in model.parameters() if (id(p) in first) == chosen] for chosen in (True, False)]
    optimiser = torch.optim.Adam(
        [{"params": groups[0], "weight_decay": decay}, {"params": groups[1], "weight_decay": 0.0}], lr=rate
    )
    losses: list[float] = []
    best, kept = (-1.0, 0, 0.0), copy.deepcopy(model.state_dict())
    for epoch in range(epochs):
        model.train()
        scores = model(task.features, propagation)
        loss = F.cross_entropy(scores[task.train], task.labels[task.train])
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} in epoch {epoch}; try a smaller rate than {rate}")
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        validation, test = _accuracies(model, task, propagation)
        if validation > best[0]:
            best, kept = (validation, epoch, test), copy.deepcopy(model.state_dict())
        if on_epoch is not None:
            on_epoch(epoch, losses[-1], validation)
    model.load_state_dict(kept)
    return NodeTraining(best[2], best[0], best[1], losses)


def _accuracies(model: NodeClassifier, task: NodeTask, propagation: SparseMatrix) -> tuple[float, float]:
    model.eval()
    with torch.no_grad():
        right = model(task.features, propagation).argmax(1) == task.labels
    return float(right[task.validation].float().mean()), float(right[task.test].float().mean())
