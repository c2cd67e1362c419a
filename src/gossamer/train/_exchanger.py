"""Gradients averaged over ranks with less traffic: selection, residuals, and the way that is fastest.

Each rank adds its gradient to its residual, sends the k largest entries, and keeps the rest for later. Three ways of
sending are known: gTop-k, Top-k by all-gather, and dense; ``method="auto"`` takes the one that the cost model of the link
says is fastest for a group's size and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gossamer.core.comm import CommModel, preset
from gossamer.core.distributed import Transport
from gossamer.train._gtopk import NonFiniteGradients, Topology, gtopk_all_reduce, topk_all_reduce
from gossamer.train._residuals import Residuals
from gossamer.train._select import select_topk

Method = Literal["auto", "gtopk", "topk", "dense"]
ErrorFeedback = Literal["exact", "paper"]
_METHODS = ("auto", "gtopk", "topk", "dense")


class GradientExchanger:
    """Averages flat gradients over ranks, keeping on each rank what it has not sent.

    density: the share of entries that a rank sends, or a function of the step that gives it (:func:`warm_up`).
    method: ``"gtopk"``, ``"topk"``, ``"dense"``, or ``"auto"``: the fastest on ``link``.
    link: the network's cost model, for ``"auto"``; 1 Gb Ethernet if not given.
    error_feedback: ``"exact"``: sums that merging drops stay with exactly one rank, nothing is lost. ``"paper"``: a rank
        takes back what it sent if its position is not in the result; a share that another rank's entry outlived is lost.
    dense_below: groups with fewer entries are sent densely: biases and norms cost no more than their start-up.
    on_nonfinite: ``"raise"``, or ``"propagate"``: every rank gets NaN, so that ``torch.amp.GradScaler`` skips the step
        on all of them.
    loss_scale: what losses are multiplied with, like ``scaler.get_scale``; residuals are kept unscaled.
    transport: carries the messages; one over the default process group if not given.

    Gradients are those of the parameters, in any floating type; residuals are float32 and in the gradients' own unit,
    so that a change of the learning rate needs no correction.

    Raises:
        ValueError: ``method``, ``error_feedback``, ``topology`` or ``density`` is not one of those accepted.
    """

    def __init__(
        self,
        density: float | Callable[[int], float] = 1e-3,
        method: Method = "auto",
        *,
        link: CommModel | None = None,
        error_feedback: ErrorFeedback = "exact",
        topology: Topology = "butterfly",
        dense_below: int = 1024,
        on_nonfinite: Literal["raise", "propagate"] = "raise",
        loss_scale: Callable[[], float] = lambda: 1.0,
        transport: Transport | None = None,
    ) -> None:
        if method not in _METHODS:
            raise ValueError(f"method must be one of {', '.join(_METHODS)}, got {method!r}")
        if error_feedback not in ("exact", "paper"):
            raise ValueError(f"error_feedback must be 'exact' or 'paper', got {error_feedback!r}")
        if topology not in ("butterfly", "tree"):
            raise ValueError(f"topology must be 'butterfly' or 'tree', got {topology!r}")
        if on_nonfinite not in ("raise", "propagate"):
            raise ValueError(f"on_nonfinite must be 'raise' or 'propagate', got {on_nonfinite!r}")
        self._density = density
        self.method = method
        self.link = link or preset("1gbe")
        self.error_feedback = error_feedback
        self.topology: Topology = topology
        self.dense_below = dense_below
        self.on_nonfinite = on_nonfinite
        self.loss_scale = loss_scale
        self.transport = transport or Transport()
        self.residuals = Residuals()
        self.step = 0
        self.density_at(0)

    def density_at(self, step: int) -> float:
        """The density of a step, checked."""
        density = self._density(step) if callable(self._density) else self._density
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, got {density} at step {step}")
        return density

    def chosen_method(self, size: int, k: int) -> str:
        """How a group of ``size`` entries is sent when ``k`` of them are selected."""
        if size < self.dense_below or k >= size:
            return "dense"
        if self.method != "auto":
            return self.method
        link, ranks = self.link, self.transport.size
        tree = self.topology == "tree"
        seconds = {
            "gtopk": link.gtopk_tree(k, ranks) if tree else link.gtopk_butterfly(k, ranks),
            "topk": link.topk_all_gather(k, ranks),
            "dense": link.all_reduce(4 * size, ranks),
        }
        return min(seconds, key=seconds.__getitem__)

    def exchange(self, gradient: Tensor, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
        """The average over ranks of what they sent of ``gradient`` and earlier gradients, dense, of its shape and dtype.

        gradient: the gradients of the parameters ``names``, of ``sizes`` entries, one after another. It is not changed.

        Raises:
            NonFiniteGradients: some rank's gradients hold NaN or Inf. All ranks raise it, and their residuals are, to
                rounding, what they were before.
            ValueError: ``sizes`` do not add up, or ranks disagree on the number of entries.
        """
        if sum(sizes) != gradient.numel() or len(sizes) != len(names):
            raise ValueError(f"sizes must hold one number a name and add up to {gradient.numel()}, got {list(sizes)}")
        k = max(1, int(self.density_at(self.step) * gradient.numel()))
        method = self.chosen_method(gradient.numel(), k)
        scale = self.loss_scale()
        pending = self.residuals.flat(names, sizes, gradient.device)
        mine = gradient.detach().reshape(-1).float() / scale
        finite = bool(torch.isfinite(mine.abs().amax())) if mine.numel() else True
        if finite:
            pending += mine
        try:
            total = self._dense(pending, finite) if method == "dense" else self._sparse(method, pending, k, finite)
        except NonFiniteGradients:
            if finite:
                pending -= mine
            if self.on_nonfinite == "raise":
                raise
            return torch.full_like(gradient, torch.nan)
        return (total * (scale / self.transport.size)).to(gradient.dtype).view(gradient.shape)

    def _dense(self, pending: Tensor, finite: bool) -> Tensor:
        total = pending.clone() if finite else torch.full_like(pending, torch.nan)
        self.transport.all_reduce_(total)
        if not torch.isfinite(total).all():
            raise NonFiniteGradients(
                "the gradients of some rank hold NaN or Inf: lower the learning rate or loss scale"
            )
        pending.zero_()
        return total

    def _sparse(self, method: str, pending: Tensor, k: int, finite: bool) -> Tensor:
        """Take the k largest out of ``pending``, exchange them, put back what stays; all as before if that fails."""
        values, indices = select_topk(pending, k)
        sent = values if finite else torch.full_like(values, torch.nan)  # the way to tell all ranks
        pending[indices] = 0
        try:
            if method == "topk":
                return topk_all_reduce(sent, indices, pending.numel(), self.transport).to(pending.device)
            return self._gtopk(pending, sent, indices)
        except BaseException:
            pending[indices] = values
            raise

    def _gtopk(self, pending: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        reduced = gtopk_all_reduce(values, indices, self.transport, self.topology)
        device = pending.device
        if self.error_feedback == "exact":
            pending.index_add_(0, reduced.lost_indices.to(device), reduced.lost_values.to(device))
        else:
            back = ~torch.isin(indices, reduced.indices.to(device), assume_unique=True)
            pending[indices[back]] = values[back]
        total = torch.zeros_like(pending)
        total[reduced.indices.to(device)] = reduced.values.to(device)
        return total

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, the step, and the number of ranks; save it on every rank."""
        return {"residuals": self.residuals.state(), "step": self.step, "ranks": self.transport.size}

    def load_state_dict(
        self,
        states: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        on_other_ranks: Literal["raise", "sum", "drop"] = "raise",
    ) -> None:
        """Continue from this rank's :meth:`state_dict`, or, if the number of ranks has changed, from those of all.

        on_other_ranks: what happens if there were as many ranks as ``states`` and now there are not: ``"sum"``: every
            rank takes an equal share of the sum of all residuals, so that nothing is lost; ``"drop"``: residuals start
            at zero; ``"raise"``: an error.

        Raises:
            ValueError: the number of ranks is another and ``on_other_ranks`` is ``"raise"``, or ``"sum"`` lacks states.
        """
        given = [states] if isinstance(states, Mapping) else list(states)
        before, now = int(given[0]["ranks"]), self.transport.size
        self.step = int(given[0]["step"])
        if before == now:
            self.residuals.load(given[self.transport.rank if len(given) == now else 0]["residuals"])
            return
        if on_other_ranks == "raise":
            raise ValueError(
                f"the state is one of {before} ranks, now there are {now}: pass the states of all ranks with "
                "on_other_ranks='sum', or 'drop' to start with empty residuals"
            )
        if on_other_ranks == "drop":
            self.residuals.load({})
            return
        if len(given) != before:
            raise ValueError(f"states must hold those of all {before} ranks to be summed, got {len(given)}")
        total = {name: sum(state["residuals"][name] for state in given) / now for name in given[0]["residuals"]}
        self.residuals.load(total)


def warm_up(
    density: float, steps_per_stage: int, stages: Sequence[float] = (0.25, 0.0725, 0.015, 0.004)
) -> Callable[[int], float]:
    """A density that falls in ``stages``, each ``steps_per_stage`` steps long, to ``density`` (Shi et al., ICDCS 2019).

    >>> schedule = warm_up(0.001, 100)
    >>> [schedule(step) for step in (0, 99, 100, 399, 400)]
    [0.25, 0.25, 0.0725, 0.004, 0.001]
    """
    if steps_per_stage < 1:
        raise ValueError(f"steps_per_stage must be at least 1, got {steps_per_stage}")

    def at(step: int) -> float:
        stage = step // steps_per_stage
        return stages[stage] if stage < len(stages) else density

    return at
