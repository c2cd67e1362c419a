"""Deadline tasks on GPUs with least energy: earliest deadline first, with settings stretched and squeezed to fit.

EDL-theta (Wang, Chu and others, TPDS 2022): a task takes the GPU that is free first. If it can run there at its best
setting before its deadline, it does; if it can be squeezed into the time that is left without losing more than a share
of its length, it is; else a GPU is switched on for it. A task whose best setting is too slow for its own deadline runs
at the best setting that is fast enough, wherever it runs: no deadline is ever missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from gossamer.cluster.energy.dvfs import WIDE, DvfsModel, Interval, Setting

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Task:
    """A task that arrives at ``arrival`` and must be done at ``deadline``, both in seconds."""

    model: DvfsModel
    arrival: float
    deadline: float


@dataclass(frozen=True)
class Placed:
    """What was decided for a task: GPU, start, and setting."""

    gpu: int
    start: float
    setting: Setting

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.setting.time


@dataclass(frozen=True)
class Schedule:
    """A schedule, task by task in the given order, and its joules.

    run: of the tasks. idle: of GPUs without a task in nodes that are on. switching: of turning nodes on.
    turn_ons: how often a node was turned on. nodes: how many different nodes were used. bound: joules of all tasks at
    their own best settings, which no schedule goes below. default: joules of all tasks at the default setting.
    """

    placed: list[Placed]
    run: float
    idle: float
    switching: float
    turn_ons: int
    nodes: int
    bound: float
    default: float

    @property
    def total(self) -> float:
        """All joules."""
        return self.run + self.idle + self.switching

    def missed(self, tasks: Sequence[Task]) -> int:
        """How many tasks are late: none, or there is a bug."""
        return sum(
            bool(placed.end > task.deadline + _TOLERANCE * max(1.0, task.deadline))
            for placed, task in zip(self.placed, tasks, strict=True)
        )


@dataclass(frozen=True)
class EDL:
    """The scheduler.

    theta: a task may be squeezed to this share of its best length to fit a GPU that is on; 1 never squeezes.
    gpus_per_node: nodes are turned on and off as a whole. idle_watts: of a GPU that is on without a task.
    turn_on_joules: of a node. sleep_after: a node without tasks for so many seconds is turned off (dynamic resource
    sleep). scale: False keeps all tasks at the default setting.

    Raises:
        ValueError: ``theta`` is outside 0 to 1, or another value is negative.
    """

    theta: float = 1.0
    gpus_per_node: int = 1
    idle_watts: float = 37.0
    turn_on_joules: float = 90.0
    sleep_after: float = 120.0
    interval: Interval = WIDE
    scale: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta must lie between 0 and 1, got {self.theta}")
        if self.gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, got {self.gpus_per_node}")
        for name in ("idle_watts", "turn_on_joules", "sleep_after"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def schedule(self, tasks: Sequence[Task]) -> Schedule:
        """Schedule tasks as they arrive; all of the same arrival are taken by earliest deadline.

        With all arrivals 0 this is the offline form.

        Raises:
            ValueError: a task cannot be done in time by any setting; it is named by its row.
        """
        best = [self._best(row, task) for row, task in enumerate(tasks)]
        order = sorted(range(len(tasks)), key=lambda row: (tasks[row].arrival, tasks[row].deadline))
        farm = _Farm(self)
        placed: dict[int, Placed] = {}
        for row in order:
            placed[row] = self._place(farm, tasks[row], best[row])
        result = [placed[row] for row in range(len(tasks))]
        idle = farm.finish()
        return Schedule(
            placed=result,
            run=sum(item.setting.energy for item in result),
            idle=idle,
            switching=farm.turn_ons * self.turn_on_joules,
            turn_ons=farm.turn_ons,
            nodes=len(farm.nodes),
            bound=sum(task.model.optimal(interval=self.interval).energy for task in tasks),
            default=sum(task.model.default.energy for task in tasks),
        )

    def _best(self, row: int, task: Task) -> Setting:
        """The best setting that is fast enough for the task's own deadline."""
        window = task.deadline - task.arrival
        if not 0 <= task.arrival <= task.deadline < math.inf:
            raise ValueError(f"task {row}: needs 0 <= arrival <= deadline, got {task.arrival}, {task.deadline}")
        if task.model.shortest(self.interval) > window * (1 + _TOLERANCE):
            shortest = task.model.shortest(self.interval)
            raise ValueError(f"task {row}: has {window:g} s, and the fastest setting takes {shortest:g} s")
        if not self.scale and task.model.default.time <= window:
            return task.model.default
        return task.model.optimal(max(window, task.model.shortest(self.interval)), self.interval)

    def _place(self, farm: _Farm, task: Task, best: Setting) -> Placed:
        now = task.arrival
        free = farm.first_free(now)
        if free is not None:
            start = max(now, free)
            window = task.deadline - start
            if best.time <= window:
                return farm.run(start, best)
            shortest = task.model.shortest(self.interval)
            if self.scale and window > max(self.theta * best.time, shortest):
                return farm.run(start, task.model.optimal(window, self.interval))
        farm.open(now)
        return farm.run(now, best)


class _Farm:
    """Nodes that are on, off, or not yet used, and when their GPUs are free."""

    def __init__(self, edl: EDL) -> None:
        self.edl = edl
        self.turn_ons = 0
        self.nodes: list[_Node] = []
        self._free: list[tuple[float, int, int]] = []  # end, gpu, how often its node had been turned on
        self._asleep: list[int] = []
        self._on_seconds = 0.0
        self._busy_seconds = 0.0

    def first_free(self, now: float) -> float | None:
        """When the first GPU is free among nodes that are on; nodes that fell asleep before ``now`` are off."""
        while self._free:
            end, gpu, period = self._free[0]
            node = self.nodes[gpu // self.edl.gpus_per_node]
            if node.period == period and node.last_end + self.edl.sleep_after < now:
                self._sleep(gpu // self.edl.gpus_per_node)
            if node.period == period:
                return end
            heappop(self._free)
        return None

    def run(self, start: float, setting: Setting) -> Placed:
        """Run a task on the GPU that is free first."""
        _, gpu, period = heappop(self._free)
        placed = Placed(gpu, start, setting)
        node = self.nodes[gpu // self.edl.gpus_per_node]
        node.last_end = max(node.last_end, placed.end)
        self._busy_seconds += setting.time
        heappush(self._free, (placed.end, gpu, period))
        return placed

    def open(self, now: float) -> None:
        """Turn a node on, one that is asleep before a new one; its first GPU is then the first that is free."""
        self.turn_ons += 1
        if self._asleep:
            index = self._asleep.pop()
        else:
            index = len(self.nodes)
            self.nodes.append(_Node())
        node = self.nodes[index]
        node.since, node.last_end = now, now
        first = index * self.edl.gpus_per_node
        for gpu in range(first, first + self.edl.gpus_per_node):
            heappush(self._free, (-math.inf if gpu == first else now, gpu, node.period))

    def _sleep(self, index: int) -> None:
        node = self.nodes[index]
        self._on_seconds += node.last_end + self.edl.sleep_after - node.since
        node.period += 1
        self._asleep.append(index)

    def finish(self) -> float:
        """Joules of idling; at the end nodes are turned off with their last task."""
        asleep = set(self._asleep)
        for index, node in enumerate(self.nodes):
            if index not in asleep:
                self._on_seconds += node.last_end - node.since
        return self.edl.idle_watts * (self._on_seconds * self.edl.gpus_per_node - self._busy_seconds)


@dataclass
class _Node:
    since: float = 0.0
    last_end: float = 0.0
    period: int = 0


def synthetic_tasks(
    count: int,
    seed: int,
    utilisation: tuple[float, float] = (0.25, 0.75),
    arrivals: Sequence[float] | NDArray | None = None,
) -> list[Task]:
    """Tasks drawn from the confidence intervals of the published GTX 1080 Ti fit, with a deadline for each.

    A task that takes ``t`` at the default setting is due ``t / u`` after its arrival, with u uniform in
    ``utilisation``. Times are those of the fitted kernels times 10 to 50.

    arrivals: one per task, in seconds; all 0 where not given.

    Raises:
        ValueError: the utilisation does not lie between 0 and 1, or the number of arrivals is wrong.
    """
    low, high = utilisation
    if not 0 < low <= high <= 1:
        raise ValueError(f"utilisation must rise within 0 to 1, got {utilisation}")
    if arrivals is not None and len(arrivals) != count:
        raise ValueError(f"arrivals must have {count} entries, got {len(arrivals)}")
    rng = np.random.default_rng(seed)
    times = rng.integers(10, 51, count)
    scaled, fixed = rng.uniform(1.66, 7.61, count) * times, rng.uniform(0.1, 0.95, count) * times
    delta, power = rng.uniform(0.07, 0.91, count), rng.integers(175, 207, count).astype(float)
    static, memory = power * rng.uniform(0.20, 0.41, count), power * rng.uniform(0.1, 0.2, count)
    share = rng.uniform(low, high, count)
    tasks = []
    for row in range(count):
        model = DvfsModel(
            static[row], memory[row], power[row] - static[row] - memory[row], fixed[row], scaled[row], delta[row]
        )
        arrival = 0.0 if arrivals is None else float(arrivals[row])
        tasks.append(Task(model, arrival, arrival + model.default.time / share[row]))
    return tasks
