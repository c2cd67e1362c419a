"""Sparse all-reduce: the k largest entries of the sum of sparse vectors (gTop-k), or their whole sum (Top-k).

gTop-k merges pairwise and keeps k entries at every merge (Shi et al., ICDCS 2019), so that a rank sends O(k log P)
instead of O(k P). Both forms work for any number of ranks. Indices travel as int32 beside float32 values: positions
beyond 2^24 arrive unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer.core.distributed import Transport
from gossamer.train._select import all_finite, merge_topk

Topology = Literal["butterfly", "tree"]
Sparse = tuple[Tensor, Tensor]


class NonFiniteGradients(RuntimeError):
    """Some rank's gradients hold NaN or Inf; every rank raises this in the same exchange."""


@dataclass(frozen=True)
class Reduced:
    """What a sparse all-reduce gave on this rank.

    values, indices: the result, equal on all ranks; float32 sums and ascending int32 positions.
    lost_values, lost_indices: partial sums that merging dropped and that this rank has to keep, so that over all ranks
        nothing is lost or kept twice. A position may occur several times.
    """

    values: Tensor
    indices: Tensor
    lost_values: Tensor
    lost_indices: Tensor


def gtopk_all_reduce(
    values: Tensor, indices: Tensor, transport: Transport, topology: Topology = "butterfly"
) -> Reduced:
    """The largest ``k`` entries of the sum over ranks, found by pairwise merging, where ``k`` is what each rank gives.

    values: ``(k,)`` float32. indices: ``(k,)`` int32, strictly ascending. ``butterfly``: in every round both partners
    merge, ``log2 P`` rounds (two more where P is no power of two). ``tree``: one rank merges and broadcasts.

    Greedy merging is not exactly the top k of the sum: an entry may be dropped before its other half arrives.

    Raises:
        ValueError: ranks give different numbers of entries, or ``topology`` is unknown.
        NonFiniteGradients: a value on some rank is NaN or Inf; raised on all ranks.
    """
    _check(values, indices)
    state = _Merging(values.cpu(), indices.cpu(), transport)
    if topology == "butterfly":
        _butterfly(state)
    elif topology == "tree":
        _tree(state)
    else:
        raise ValueError(f"topology must be 'butterfly' or 'tree', got {topology!r}")
    return state.reduced()


def topk_all_reduce(values: Tensor, indices: Tensor, size: int, transport: Transport) -> Tensor:
    """The dense sum, of shape ``(size,)``, of all ranks' sparse vectors, by all-gather and adding in rank order.

    Raises:
        NonFiniteGradients: a value on some rank is NaN or Inf; raised on all ranks.
    """
    return add_sparse_(torch.zeros(size, dtype=torch.float32), topk_all_gather(values, indices, transport))


def topk_all_gather(values: Tensor, indices: Tensor, transport: Transport) -> list[Sparse]:
    """The values and indices of every rank, by rank; errors as :func:`topk_all_reduce`."""
    _check(values, indices)
    k = values.numel()
    gathered = transport.all_gather(torch.cat([indices.cpu(), values.cpu().view(torch.int32)]))
    lists = [(row[k:].view(torch.float32), row[:k]) for row in gathered]
    if not all(all_finite(theirs) for theirs, _ in lists):
        raise _non_finite()
    return lists


def add_sparse_(total: Tensor, lists: list[Sparse]) -> Tensor:
    """Add sparse vectors to a dense one, in their order; returns it."""
    for values, indices in lists:
        total.index_add_(0, indices, values)
    return total


class _Merging:
    """The running merge of one rank: its list, what it has to keep, and whether all values so far are finite."""

    def __init__(self, values: Tensor, indices: Tensor, transport: Transport) -> None:
        self.transport = transport
        self.k = values.numel()
        self.finite = all_finite(values)
        self._pairs = torch.cat([indices, values.view(torch.int32)])  # also the message
        self._lost: list[Sparse] = []

    def send(self, to: int) -> None:
        self.transport.exchange(self._pairs, to, self._header(), None, None)

    def receive_all(self, source: int) -> None:
        """Take over the finished list of ``source``."""
        self._pairs, self.finite = self._received(None, source)

    def merge(self, source: int, answer: bool, keeps_lost: bool) -> None:
        """Merge in the list of ``source``, sending it ours at the same time if ``answer``.

        keeps_lost: whether what is dropped becomes this rank's to keep.
        """
        theirs, finite = self._received(source if answer else None, source)
        self.finite = self.finite and finite
        if not self.finite:
            return
        lists = [self._split(self._pairs), self._split(theirs)]
        if source < self.transport.rank:
            lists.reverse()
        values, indices, lost_values, lost_indices = merge_topk(lists[0], lists[1], self.k)
        self._pairs = torch.cat([indices, values.view(torch.int32)])
        if keeps_lost and lost_values.numel():
            self._lost.append((lost_values, lost_indices))

    def reduced(self) -> Reduced:
        if not self.finite:
            raise _non_finite()
        values, indices = self._split(self._pairs)
        empty = (values[:0], indices[:0])
        lost_values, lost_indices = zip(*(self._lost or [empty]), strict=True)
        return Reduced(values, indices, torch.cat(lost_values), torch.cat(lost_indices))

    def _received(self, to: int | None, source: int) -> tuple[Tensor, bool]:
        into = torch.empty_like(self._pairs)
        header = self.transport.exchange(self._pairs, to, self._header(), into, source)
        assert header is not None
        return into, bool(header[0])

    def _header(self) -> tuple[int, int, int]:
        return int(self.finite), 0, self.k

    def _split(self, pairs: Tensor) -> Sparse:
        return pairs[self.k :].view(torch.float32), pairs[: self.k]


def _butterfly(state: _Merging) -> None:
    rank, size = state.transport.rank, state.transport.size
    core = 1 << (size.bit_length() - 1)
    if rank >= core:  # the ranks beyond the power of two hand over their lists and wait for the result
        state.send(rank - core)
        state.receive_all(rank - core)
        return
    if rank + core < size:
        state.merge(rank + core, answer=False, keeps_lost=True)
    width = 1
    while width < core:
        # All ranks of a block of 2 * width have the same list now and drop the same; its lowest rank keeps what is dropped.
        state.merge(rank ^ width, answer=True, keeps_lost=rank % (2 * width) == 0)
        width *= 2
    if rank + core < size:
        state.send(rank + core)


def _tree(state: _Merging) -> None:
    rank, size = state.transport.rank, state.transport.size
    width = 1
    while width < size and rank % (2 * width) == 0:
        if rank + width < size:
            state.merge(rank + width, answer=False, keeps_lost=True)
        width *= 2
    if rank:
        state.send(rank - width)
        state.receive_all(rank - width)
    while width > 1:
        width //= 2
        if rank + width < size:
            state.send(rank + width)


def _check(values: Tensor, indices: Tensor) -> None:
    if values.dtype != torch.float32 or indices.dtype != torch.int32:
        raise TypeError(f"values must be float32 and indices int32, got {values.dtype} and {indices.dtype}")
    if values.shape != indices.shape or values.dim() != 1 or not values.numel():
        shapes = f"{tuple(values.shape)} and {tuple(indices.shape)}"
        raise ValueError(f"values and indices must be vectors of one length, at least 1, got {shapes}")


def _non_finite() -> NonFiniteGradients:
    return NonFiniteGradients("the gradients of some rank hold NaN or Inf: lower the learning rate or the loss scale")
