"""Walk through a model block by block and show what reaches every linear layer.

The walk keeps the hidden states in front of one block. The caller looks at the statistics of that block, replaces its
weights if it likes, and asks for the next step: with ``propagate="sequential"`` the hidden states then pass through
the weights as they are now, so that later blocks are calibrated on what they will really see; with
``propagate="dense"`` they have already passed through the weights as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.compress._blocks import Block, dense_weight, iter_blocks, linears
from gossamer.compress._settings import PROPAGATIONS
from gossamer.compress._statistics import LinearStatistics


@dataclass(frozen=True)
class Step:
    """The walk stands in front of ``block``, number ``index`` of ``total``."""

    index: int
    total: int
    block: Block
    _collect: Callable[[], dict[str, LinearStatistics]]

    @cached_property
    def statistics(self) -> dict[str, LinearStatistics]:
        """Per linear layer of the block; layers that read the same tensor share one object.

        In a sequential walk this costs a pass through the block, so a block that is not asked is not paid for. Ask
        before replacing the block's weights, and before the walk goes on (``RuntimeError`` after that).
        """
        return self._collect()


def calibrate(
    model: nn.Module, windows: Tensor, propagate: str = "sequential", hessian: bool = False, batch_size: int = 4
) -> Iterator[Step]:
    """Yield one :class:`Step` per block of ``model``, in order; deterministic for given weights and thread count.

    A walk in which some blocks get their final weights without their statistics being asked for gives the others the
    same statistics, bit for bit: that is how an interrupted run resumes.

    Args:
        model: a causal language model (float32 for float32 statistics). It is put into eval mode.
        windows: ``(samples, seqlen)`` int64 token ids.
        propagate: "sequential" or "dense".
        hessian: also accumulate the Hessian of every layer.
        batch_size: windows per pass; memory grows with it.

    Raises:
        ValueError: unknown ``propagate``, ``windows`` not 2-D or empty, or a model that does not run its blocks once
            each and in order.
    """
    if propagate not in PROPAGATIONS:
        raise ValueError(f"propagate must be one of {', '.join(PROPAGATIONS)}, got {propagate!r}")
    if windows.ndim != 2 or windows.numel() == 0:
        raise ValueError(f"windows must have shape (samples, seqlen) and not be empty, got {tuple(windows.shape)}")
    model.eval()
    blocks = iter_blocks(model)
    return _walk(_catch(model, blocks, windows, batch_size), blocks, propagate == "sequential", hessian)


def _walk(batches: list[_Batch], blocks: list[Block], sequential: bool, hessian: bool) -> Iterator[Step]:
    for index, block in enumerate(blocks):
        last = index + 1 == len(blocks)
        if sequential:
            yield Step(index, len(blocks), block, partial(_statistics, batches, block, index, hessian))
            if not last:
                _advance(batches, [_run(batch, block) for batch in batches])
        else:
            statistics, outputs = _observe(batches, block, hessian)
            yield Step(index, len(blocks), block, partial(dict, statistics))
            _advance(batches, outputs)


@dataclass
class _Batch:
    """Hidden states ``(batch, seqlen, hidden)`` in front of block ``position``, and how the model calls each block."""

    hidden: Tensor
    calls: list[_Call]
    position: int = 0


@dataclass(frozen=True)
class _Call:
    """Everything that the model passes to a block besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _statistics(batches: list[_Batch], block: Block, index: int, hessian: bool) -> dict[str, LinearStatistics]:
    if batches[0].position != index:
        raise RuntimeError(f"the walk has left {block.name}: ask for its statistics before the next step")
    return _observe(batches, block, hessian)[0]


def _observe(batches: list[_Batch], block: Block, hessian: bool) -> tuple[dict[str, LinearStatistics], list[Tensor]]:
    """Pass all batches through ``block``; return the statistics of its linear layers, and its outputs."""
    layers = linears(block)
    statistics: dict[str, LinearStatistics] = {}
    latest: list[tuple[Tensor, LinearStatistics]] = []

    def look(name: str, x: Tensor) -> None:
        if latest and latest[-1][0] is x:
            statistics.setdefault(name, latest[-1][1])
            return
        own = statistics.setdefault(name, LinearStatistics(x.shape[-1], hessian))
        own.update(x)
        latest[:] = [(x, own)]

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
        for name, layer in layers.items()
    ]
    try:
        outputs = []
        for batch in batches:
            outputs.append(_run(batch, block))
            latest.clear()
    finally:
        for handle in handles:
            handle.remove()
    for name in layers.keys() - statistics:  # a layer that no token reached
        statistics[name] = LinearStatistics(dense_weight(layers[name]).shape[1], hessian)
    return {name: statistics[name] for name in layers}, outputs


@torch.no_grad()
def _run(batch: _Batch, block: Block) -> Tensor:
    call = batch.calls[batch.position]
    return _hidden_of(block.module(batch.hidden, *call.args, **call.kwargs))


def _advance(batches: list[_Batch], outputs: list[Tensor]) -> None:
    for batch, output in zip(batches, outputs, strict=True):
        batch.hidden = output
        batch.position += 1


def _hidden_of(output: Any) -> Tensor:
    """The hidden states of a block's return value: a tensor, or the first of a tuple."""
    hidden = output[0] if isinstance(output, tuple) else output
    assert isinstance(hidden, Tensor)
    return hidden


class _EnoughSeen(Exception):
    """Ends a forward pass once the last block has been called."""


@torch.no_grad()
def _catch(model: nn.Module, blocks: list[Block], windows: Tensor, batch_size: int) -> list[_Batch]:
    """Record what ``model`` passes to each block (masks and positions may differ between them), without running any."""
    shapes = _return_shapes(model, blocks, windows[:1, :4])
    batches: list[_Batch] = []
    for ids in windows.split(batch_size):
        hidden: list[Tensor] = []
        calls: list[_Call] = []

        def stand_in(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != len(calls):  # noqa: B023
                raise ValueError(f"{type(model).__name__} does not run its blocks once each and in order")
            state, call = _split_call(args, kwargs)
            hidden.append(state)  # noqa: B023
            calls.append(_share(call, batches, calls))  # noqa: B023
            if index + 1 == len(blocks):
                raise _EnoughSeen
            rest = shapes[index]
            return state if rest is None else (state, *rest)

        with _replaced_forwards(blocks, stand_in), suppress(_EnoughSeen):
            model(input_ids=ids, use_cache=False)
        if len(calls) != len(blocks):
            raise ValueError(f"{type(model).__name__} does not run its blocks once each and in order")
        batches.append(_Batch(hidden[0], calls))
    return batches


def _return_shapes(model: nn.Module, blocks: list[Block], ids: Tensor) -> list[tuple[Any, ...] | None]:
    """What each block returns after its hidden states if it returns a tuple, else None; seen on a few tokens."""
    shapes: list[tuple[Any, ...] | None] = []

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shapes.append(tuple(output[1:]) if isinstance(output, tuple) else None)

    handles = [block.module.register_forward_hook(look) for block in blocks]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


@contextmanager
def _replaced_forwards(
    blocks: list[Block], stand_in: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Let ``stand_in(index, args, kwargs)`` answer for every block."""
    try:
        for index, block in enumerate(blocks):
            block.module.forward = lambda *args, index=index, **kwargs: stand_in(index, args, kwargs)
        yield
    finally:
        for block in blocks:
            block.module.__dict__.pop("forward", None)


def _split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, _Call]:
    if args:
        return args[0], _Call(args[1:], kwargs)
    return kwargs["hidden_states"], _Call((), {key: value for key, value in kwargs.items() if key != "hidden_states"})


def _share(call: _Call, batches: list[_Batch], calls: list[_Call]) -> _Call:
    """``call``, made of the tensors of an earlier equal one, so that equal masks are kept once and not per batch."""
    earlier = calls[-1:] + ([batches[-1].calls[len(calls)]] if batches else [])
    for other in earlier:
        if _equal(call.args, other.args) and _equal(call.kwargs, other.kwargs):
            return other
    return call


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left is right or (left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right))
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left is right or left == right)
