"""Which neighbouring layers to merge before their gradients are exchanged.

Merging saves message start-ups, and delays: a merged message waits for its last layer, and selecting from more entries
takes more than proportionally longer. Layers are in the order of back-propagation, last layer first. Two plans: the
greedy rule as published (OMGS-SGD, INFOCOM 2020, for sparse messages; MG-WFBP, INFOCOM 2019, for dense ones), and the
optimum over all partitions into neighbours, by dynamic programming over the finishing times of computing and sending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gossamer.core.timeline import Schedule, Timeline

Seconds = Callable[[float], float]
Method = Literal["exact", "greedy", "layers", "single"]


@dataclass(frozen=True)
class Layers:
    """What a plan is made from, in the order of back-propagation.

    sizes: entries of every layer's gradient. backward: seconds of its backward pass. send: seconds of exchanging a message
    of so many entries (of which a sparse exchange sends a share). select: seconds of selecting from so many entries, in
    the stream of the backward pass; nothing for dense exchange.
    """

    sizes: tuple[int, ...]
    backward: tuple[float, ...]
    send: Seconds
    select: Seconds = lambda entries: 0.0

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.backward) or not self.sizes:
            raise ValueError(f"sizes and backward must be equally long, got {len(self.sizes)} and {len(self.backward)}")
        if min(self.sizes) < 1 or not all(math.isfinite(t) and t >= 0 for t in self.backward):
            raise ValueError("sizes must be at least 1, and backward finite seconds of at least 0")


@dataclass(frozen=True)
class MergePlan:
    """Groups of neighbouring layers, ``(first, behind the last)``, and when the last message of a step arrives.

    seconds: from the start of back-propagation.
    """

    groups: tuple[tuple[int, int], ...]
    seconds: float


def plan_merge(layers: Layers, method: Method = "exact") -> MergePlan:
    """Groups for ``layers``.

    ``exact``: no partition into neighbours ends earlier. ``greedy``: the published rule. ``layers``: every layer alone.
    ``single``: all in one message.

    Raises:
        ValueError: ``method`` is unknown.

    >>> layers = Layers((100, 100, 100), (1.0, 1.0, 1.0), send=lambda entries: 2.0 + entries / 1000)
    >>> plan_merge(layers).groups, round(plan_merge(layers).seconds, 1), round(plan_merge(layers, "layers").seconds, 1)
    (((0, 3),), 5.3, 7.3)
    """
    count = len(layers.sizes)
    if method == "exact":
        return _exact(layers)
    if method == "greedy":
        groups = _greedy(layers)
    elif method == "layers":
        groups = tuple((layer, layer + 1) for layer in range(count))
    elif method == "single":
        groups = ((0, count),)
    else:
        raise ValueError(f"method must be 'exact', 'greedy', 'layers' or 'single', got {method!r}")
    return MergePlan(groups, merge_schedule(layers, groups).makespan)


def plan_buckets(layers: Layers, entries: int = 25 * (1 << 20) // 4) -> MergePlan:
    """Fixed buckets, closed when they hold ``entries``: what DDP does, for comparison."""
    groups, first, held = [], 0, 0
    for layer, size in enumerate(layers.sizes):
        held += size
        if held >= entries:
            groups.append((first, layer + 1))
            first, held = layer + 1, 0
    if held:
        groups.append((first, len(layers.sizes)))
    return MergePlan(tuple(groups), merge_schedule(layers, groups).makespan)


def merge_schedule(layers: Layers, groups: Sequence[tuple[int, int]]) -> Schedule:
    """The step as a timeline: backward passes and selections on ``compute``, messages on ``network``."""
    line = Timeline()
    for first, behind in groups:
        entries = sum(layers.sizes[first:behind])
        for layer in range(first, behind):
            line.add(f"backward {layer}", "compute", layers.backward[layer])
        ready = line.add(f"select {first}-{behind - 1}", "compute", layers.select(entries))
        line.add(f"send {first}-{behind - 1}", "network", layers.send(entries), [ready])
    return line.schedule()


def _exact(layers: Layers) -> MergePlan:
    """Extend partitions of the first layers by one group, keeping those which no other beats in both finishing times.

    A state is (computing ends, sending ends, its last group's first layer, the state before).
    """
    count = len(layers.sizes)
    bound = min(plan_merge(layers, method).seconds for method in ("greedy", "layers", "single"))
    entries = [sum(layers.sizes[:layer]) for layer in range(count + 1)]
    computing = [math.fsum(layers.backward[:layer]) for layer in range(count + 1)]
    fronts: list[list[tuple]] = [[(0.0, 0.0, 0, None)]]
    for end in range(1, count + 1):
        found = []
        for first in range(end):
            merged = entries[end] - entries[first]
            work = computing[end] - computing[first] + layers.select(merged)
            send = layers.send(merged)
            for state in fronts[first]:
                ready = state[0] + work
                sent = max(state[1], ready) + send
                if sent <= bound * (1 + 1e-12):
                    found.append((ready, sent, first, state))
        found.sort(key=lambda state: state[:2])
        front: list[tuple] = []
        for state in found:
            if not front or state[1] < front[-1][1]:
                front.append(state)
        fronts.append(front)
    state, end, groups = min(fronts[count], key=lambda state: state[1]), count, []
    while state[3] is not None:
        groups.append((state[2], end))
        state, end = state[3], state[2]
    groups.reverse()
    return MergePlan(tuple(groups), merge_schedule(layers, groups).makespan)


def _greedy(layers: Layers) -> tuple[tuple[int, int], ...]:
    """Merge a group into the next layer if what the start-up saves exceeds the wait that it causes.

    Wait: the next layer's backward pass and the longer selection, less the time for which the message would have queued
    behind the one before anyway.
    """
    groups: list[tuple[int, int]] = []
    computing = line_free = 0.0  # when all before the open group is computed and sent
    first, work, entries = 0, layers.backward[0], layers.sizes[0]
    for layer in range(1, len(layers.sizes)):
        size, merged = layers.sizes[layer], entries + layers.sizes[layer]
        ready = computing + work + layers.select(entries)
        queued = max(0.0, line_free - ready)
        longer = layers.select(merged) - layers.select(entries) - layers.select(size)
        wait = layers.backward[layer] + longer - queued
        saved = layers.send(entries) + layers.send(size) - layers.send(merged)
        if wait < saved:
            work, entries = work + layers.backward[layer], merged
            continue
        groups.append((first, layer))
        computing, line_free = ready, max(line_free, ready) + layers.send(entries)
        first, work, entries = layer, layers.backward[layer], size
    return (*groups, (first, len(layers.sizes)))
