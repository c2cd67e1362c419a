"""Ranks that share a preconditioner's work: sums over all, and inverses made once and sent to the others.

Only the lower triangle of a symmetric matrix is kept and sent, as a staircase of row blocks, in buckets of a few MiB.
Who inverts what is decided by the longest-processing-time rule on the cubes of the sizes (Graham, 1969).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_ENTRIES = 4 << 20
_BLOCK = 256


class NonFiniteCurvature(RuntimeError):
    """Some rank's gradients or curvature hold NaN or Inf; every rank raises this in the same step."""


class Ranks:
    """The ranks of a process group, or this process alone where torch.distributed is not in use."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add every tensor over all ranks, in place; of square matrices the lower triangle only."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([piece.reshape(-1) for piece in bucket])
            dist.all_reduce(flat, group=self.group)
            _unpack(flat, bucket)

    def share_(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Give every rank the owner's version of each tensor, in place."""
        if self.size == 1:
            return
        for owner in sorted(set(owners)):
            mine = [tensor for tensor, who in zip(tensors, owners, strict=True) if who == owner]
            for bucket in _buckets(mine, whole=True):
                flat = torch.cat([piece.reshape(-1) for piece in bucket])
                dist.broadcast(flat, group=self.group, group_src=owner)
                _unpack(flat, bucket)

    def agree(self, problems: Sequence[str]) -> list[str]:
        """The problems of all ranks, the same list everywhere; cheap where there are none."""
        if self.size == 1:
            return list(problems)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        count = torch.tensor([len(problems)], device=device)
        dist.all_reduce(count, group=self.group)
        if not count.item():
            return []
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, list(problems), group=self.group)
        return [f"rank {rank}: {problem}" for rank, found in enumerate(gathered) for problem in found]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, whose first dimensions may differ."""
        if self.size == 1:
            return [tensor]
        rows = torch.zeros(self.size, dtype=torch.int64, device=tensor.device)
        rows[self.rank] = len(tensor)
        dist.all_reduce(rows, group=self.group)
        most = int(rows.max())
        padded = tensor.new_zeros((most, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        out = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(out, padded, group=self.group)
        return [part[:count] for part, count in zip(out, rows.tolist(), strict=True)]


def assign_by_cost(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each job: the longest first, each to whoever has least to do.

    >>> assign_by_cost([8, 1, 27, 8, 8], 2)
    [1, 1, 0, 1, 1]
    """
    load = [0.0] * ranks
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        owner = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[job] = owner
        load[owner] += costs[job]
    return owners


def _pieces(tensor: Tensor, whole: bool) -> Iterator[Tensor]:
    """Views that cover what has to be sent."""
    if whole or tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1]:
        yield tensor
        return
    for start in range(0, len(tensor), _BLOCK):
        end = min(start + _BLOCK, len(tensor))
        yield tensor[start:end, :end]


def _buckets(tensors: Sequence[Tensor], whole: bool = False) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    entries = 0
    for tensor in tensors:
        for piece in _pieces(tensor, whole):
            if bucket and (entries + piece.numel() > _BUCKET_ENTRIES or piece.dtype != bucket[0].dtype):
                yield bucket
                bucket, entries = [], 0
            bucket.append(piece)
            entries += piece.numel()
    if bucket:
        yield bucket


def _unpack(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    start = 0
    for piece in bucket:
        piece.copy_(flat[start : start + piece.numel()].view(piece.shape))
        start += piece.numel()
