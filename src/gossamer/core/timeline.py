"""A static task graph on resources that each do one thing at a time: when everything starts, ends, and why.

Tasks have a duration, a resource (or none: they only wait) and predecessors. A resource takes its tasks in the order in
which they were added, or, with ``order="ready"``, whichever became ready first. The schedule knows its makespan, what
every resource was idle, the critical path and every task's slack, and draws itself.

>>> line = Timeline()
>>> first = line.add("backward 2", "compute", 2.0)
>>> line.add("send 2", "network", 3.0, after=[first])
1
>>> line.add("backward 1", "compute", 1.0)
2
>>> line.add("send 1", "network", 1.0, after=[2])
3
>>> schedule = line.schedule()
>>> schedule.makespan, schedule.idle("network"), [line.tasks[task].name for task in schedule.critical_path()]
(6.0, 2.0, ['backward 2', 'send 2', 'send 1'])
"""

from __future__ import annotations

import heapq
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from gossamer.core.files import write_json

Order = Literal["given", "ready"]


@dataclass(frozen=True)
class Task:
    """A piece of work. resource: what does it; None for a wait that occupies nothing. seconds: how long."""

    name: str
    resource: str | None
    seconds: float


class Timeline:
    """A task graph under construction. Tasks are known by the number that :meth:`add` returns."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._before: list[list[int]] = []

    def add(self, name: str, resource: str | None, seconds: float, after: Iterable[int] = ()) -> int:
        """Add a task that starts when all of ``after`` have ended and its resource is free; returns its number.

        Raises:
            ValueError: ``seconds`` is negative or not finite, or a predecessor is unknown.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of task {name!r} must be finite and at least 0, got {seconds}")
        before = list(after)
        for task in before:
            self._check(task)
        self.tasks.append(Task(name, resource, float(seconds)))
        self._before.append(before)
        return len(self.tasks) - 1

    def add_edge(self, first: int, then: int) -> None:
        """Let ``then`` wait for ``first``: for graphs that are read from elsewhere, in any order."""
        self._check(first)
        self._check(then)
        self._before[then].append(first)

    def predecessors(self, task: int) -> tuple[int, ...]:
        """What ``task`` waits for, its resource aside."""
        return tuple(self._before[task])

    def schedule(self, order: Order = "given") -> Schedule:
        """Start every task as early as possible.

        order: ``"given"``: a resource takes its tasks as they were added; ``"ready"``: as they become ready, those
            added earlier first.

        Raises:
            ValueError: the graph (with the order of the resources, if given) has a cycle; the message names it.
        """
        if order not in ("given", "ready"):
            raise ValueError(f"order must be 'given' or 'ready', got {order!r}")
        before = [list(tasks) for tasks in self._before]
        if order == "given":
            for queue in self._queues().values():
                for first, then in pairwise(queue):
                    before[then].append(first)
            start = self._earliest(before)
        else:
            start = self._as_ready(before)
        return Schedule(tuple(self.tasks), tuple(start), tuple(map(tuple, before)))

    def _check(self, task: int) -> None:
        if not 0 <= task < len(self.tasks):
            raise ValueError(f"tasks are numbered 0 to {len(self.tasks) - 1}, got {task}")

    def _queues(self) -> dict[str, list[int]]:
        queues: dict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(self.tasks):
            if task.resource is not None:
                queues[task.resource].append(number)
        return queues

    def _earliest(self, before: Sequence[Sequence[int]]) -> list[float]:
        order = _topological(before)
        if len(order) < len(self.tasks):
            raise ValueError(f"the tasks wait for each other: {self._cycle(before, set(order))}")
        start = [0.0] * len(self.tasks)
        for task in order:
            start[task] = max((start[first] + self.tasks[first].seconds for first in before[task]), default=0.0)
        return start

    def _as_ready(self, before: list[list[int]]) -> list[float]:
        """Start times; to ``before`` it adds what each task waited for on its resource."""
        self._earliest(before)  # refuses cycles
        after, waiting = _reversed(before)
        ready_at = [0.0] * len(self.tasks)
        start = [0.0] * len(ready_at)
        free_at: dict[str, float] = defaultdict(float)
        latest: dict[str, int] = {}
        queues: dict[str, list[tuple[float, int]]] = defaultdict(list)
        events: list[tuple[float, int, int]] = []  # time, 0 = an end and 1 = a look at the resource, task

        def admit(task: int) -> None:
            resource = self.tasks[task].resource
            if resource is None:
                begin(task, ready_at[task])
            else:
                heapq.heappush(queues[resource], (ready_at[task], task))
                heapq.heappush(events, (max(ready_at[task], free_at[resource]), 1, task))

        def begin(task: int, time: float) -> None:
            start[task] = time
            heapq.heappush(events, (time + self.tasks[task].seconds, 0, task))

        for task, count in enumerate(waiting):
            if not count:
                admit(task)
        while events:
            time, kind, task = heapq.heappop(events)
            resource = self.tasks[task].resource
            if kind == 0:
                for follower in after[task]:
                    ready_at[follower] = max(ready_at[follower], time)
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        admit(follower)
            elif resource is not None and queues[resource]:
                if free_at[resource] > time:
                    heapq.heappush(events, (free_at[resource], 1, task))
                else:
                    _, chosen = heapq.heappop(queues[resource])
                    free_at[resource] = time + self.tasks[chosen].seconds
                    if resource in latest:
                        before[chosen].append(latest[resource])
                    latest[resource] = chosen
                    begin(chosen, time)
        return start

    def _cycle(self, before: Sequence[Sequence[int]], free: set[int]) -> str:
        task = next(number for number in range(len(self.tasks)) if number not in free)
        seen: dict[int, int] = {}
        path: list[int] = []
        while task not in seen:
            seen[task] = len(path)
            path.append(task)
            task = next(first for first in before[task] if first not in free)
        names = [self.tasks[number].name for number in reversed(path[seen[task] :])]
        return " -> ".join([*names, names[0]])


@dataclass(frozen=True)
class Schedule:
    """When every task of a :class:`Timeline` runs.

    start: seconds, by number of the task. before: what each waited for, the task before it on its resource included.
    """

    tasks: tuple[Task, ...]
    start: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]

    def finish(self, task: int) -> float:
        """When ``task`` ends, in seconds."""
        return self.start[task] + self.tasks[task].seconds

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return max(map(self.finish, range(len(self.tasks))), default=0.0)

    def busy(self, resource: str) -> float:
        """Seconds of work of ``resource``.

        Raises:
            ValueError: no task uses it.
        """
        mine = [task.seconds for task in self.tasks if task.resource == resource]
        if not mine:
            raise ValueError(f"resource must be one of {', '.join(self.resources)}, got {resource!r}")
        return math.fsum(mine)

    def idle(self, resource: str) -> float:
        """Seconds of the makespan in which ``resource`` does nothing."""
        return self.makespan - self.busy(resource)

    @property
    def resources(self) -> tuple[str, ...]:
        """All resources, in the order of their first tasks."""
        return tuple(dict.fromkeys(task.resource for task in self.tasks if task.resource is not None))

    def critical_path(self) -> list[int]:
        """Tasks, first to last, each of which the next had to wait for: shorten none of them and nothing is gained."""
        if not self.tasks:
            return []
        task = max(range(len(self.tasks)), key=lambda number: (self.finish(number), -number))
        path = [task]
        while self.before[task]:
            blocker = max(self.before[task], key=self.finish)
            if self.finish(blocker) < self.start[task] or self.start[task] == 0.0:
                break
            path.append(blocker)
            task = blocker
        return path[::-1]

    def slack(self) -> list[float]:
        """By how many seconds each task may be late without a later end of all, the resources' order kept."""
        latest = [self.makespan] * len(self.tasks)
        for task in reversed(_topological(self.before)):
            for blocker in self.before[task]:
                latest[blocker] = min(latest[blocker], latest[task] - self.tasks[task].seconds)
        return [latest[task] - self.finish(task) for task in range(len(self.tasks))]

    def chrome_trace(self) -> dict[str, Any]:
        """The schedule in the trace-event format that ``chrome://tracing`` and Perfetto read; a row a resource."""
        rows = {resource: row for row, resource in enumerate(self.resources)}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": resource}}
            for resource, row in rows.items()
        ]
        events += [
            {"name": task.name, "ph": "X", "pid": 0, "tid": rows[task.resource], "ts": 1e6 * start,
             "dur": 1e6 * task.seconds}
            for task, start in zip(self.tasks, self.start, strict=True)
            if task.resource is not None
        ]  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`chrome_trace` as JSON, atomically; returns the absolute path."""
        path = Path(path).resolve()
        write_json(path, self.chrome_trace())
        return path

    def figure(self) -> Any:
        """A Gantt chart as a ``plotly.graph_objects.Figure``; needs the extra ``gossamer[report]``."""
        from plotly import graph_objects

        critical = set(self.critical_path())
        shown = [number for number, task in enumerate(self.tasks) if task.resource is not None]
        figure = graph_objects.Figure()
        for label, members in (
            ("critical", [number for number in shown if number in critical]),
            ("other", [number for number in shown if number not in critical]),
        ):
            figure.add_bar(
                name=label, orientation="h", base=[1e3 * self.start[number] for number in members],
                x=[1e3 * self.tasks[number].seconds for number in members],
                y=[self.tasks[number].resource for number in members],
                hovertext=[self.tasks[number].name for number in members],
            )  # fmt: skip
        figure.update_layout(barmode="overlay", xaxis_title="ms", yaxis={"autorange": "reversed"})
        return figure


def _reversed(before: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Followers of every task, and how many it waits for."""
    after: list[list[int]] = [[] for _ in before]
    for task, blockers in enumerate(before):
        for blocker in blockers:
            after[blocker].append(task)
    return after, [len(blockers) for blockers in before]


def _topological(before: Sequence[Sequence[int]]) -> list[int]:
    """Tasks after all that they wait for; those in or behind a cycle are left out."""
    after, waiting = _reversed(before)
    order = [task for task, count in enumerate(waiting) if not count]
    for task in order:  # grows while it is read
        for follower in after[task]:
            waiting[follower] -= 1
            if not waiting[follower]:
                order.append(follower)
    return order
