"""Schedules against closed forms, longest paths by dynamic programming, and an exhaustive event replay."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import pytest

from gossamer.core.timeline import Timeline


def random_line(seed, size=30):
    rng = random.Random(seed)
    line = Timeline()
    for number in range(size):
        after = rng.sample(range(number), min(number, rng.randint(0, 3)))
        line.add(f"t{number}", rng.choice(["a", "b", None]), rng.choice([0.0, rng.random()]), after)
    return line


def longest_paths(line):
    """Start times by relaxing every edge until nothing changes; edges of the resources' orders included."""
    edges = [(first, then) for then in range(len(line.tasks)) for first in line.predecessors(then)]
    for resource in ("a", "b"):
        queue = [number for number, task in enumerate(line.tasks) if task.resource == resource]
        edges += pairwise(queue)
    start = [0.0] * len(line.tasks)
    for _ in line.tasks:
        for first, then in edges:
            start[then] = max(start[then], start[first] + line.tasks[first].seconds)
    return start, edges


@pytest.mark.parametrize("seed", range(40))
def test_tasks_start_at_the_longest_path_to_them(seed):
    line = random_line(seed)
    start, edges = longest_paths(line)
    schedule = line.schedule()
    assert list(schedule.start) == pytest.approx(start)
    # slack by brute force: the longest path from the end of a task to the end of all
    tail = [0.0] * len(start)
    for _ in start:
        for first, then in edges:
            tail[first] = max(tail[first], tail[then] + line.tasks[then].seconds)
    expected = [schedule.makespan - schedule.finish(task) - tail[task] for task in range(len(start))]
    assert schedule.slack() == pytest.approx(expected, abs=1e-12)
    path = schedule.critical_path()
    assert sum(line.tasks[task].seconds for task in path) == pytest.approx(schedule.makespan)
    assert all(schedule.slack()[task] == pytest.approx(0, abs=1e-12) for task in path)


@pytest.mark.parametrize("seed", range(40))
def test_in_ready_order_no_resource_waits_while_a_task_is_ready(seed):
    line = random_line(seed)
    schedule = line.schedule("ready")
    ready = [max((schedule.finish(first) for first in line.predecessors(task)), default=0.0) for task in range(30)]
    for task, (work, start) in enumerate(zip(line.tasks, schedule.start, strict=True)):
        assert start >= ready[task]
        if work.resource is None:
            assert start == ready[task]
            continue
        same = [other for other in range(30) if line.tasks[other].resource == work.resource and other != task]
        for other in same:  # one at a time
            assert schedule.finish(other) <= start + 1e-12 or schedule.finish(task) <= schedule.start[other] + 1e-12
        waited = [(schedule.start[o], schedule.finish(o)) for o in same if schedule.start[o] < start]
        covered = ready[task]
        for begin, end in sorted(waited):
            if begin <= covered + 1e-12:
                covered = max(covered, end)
        assert start <= covered + 1e-12
        for other in same:  # those that began while this one was ready had been ready no later
            if ready[task] < schedule.start[other] < start:
                assert ready[other] <= ready[task] + 1e-12


def test_two_pipelined_resources_follow_the_closed_form():
    """Equal layers: compute L t_b, then the last message: max(L t_b + t_c, t_b + L t_c)."""
    for t_b, t_c in ((1.0, 0.5), (1.0, 2.0), (1.0, 1.0)):
        line = Timeline()
        for layer in range(12):
            line.add(f"send {layer}", "net", t_c, [line.add(f"back {layer}", "gpu", t_b)])
        assert line.schedule().makespan == pytest.approx(max(12 * t_b + t_c, t_b + 12 * t_c), rel=1e-12)


def test_a_cycle_is_named():
    line = Timeline()
    a, b, c = (line.add(name, None, 1.0) for name in "abc")
    line.add_edge(a, b)
    line.add_edge(b, c)
    line.add_edge(c, b)
    with pytest.raises(ValueError, match="b -> c -> b|c -> b -> c"):
        line.schedule()
    with pytest.raises(ValueError, match="wait for each other"):
        line.schedule("ready")


def test_an_order_that_contradicts_the_edges_is_a_cycle():
    line = Timeline()
    first, then = line.add("first", "gpu", 1.0), line.add("then", "gpu", 1.0)
    line.add_edge(then, first)
    with pytest.raises(ValueError, match="wait for each other"):
        line.schedule()
    assert line.schedule("ready").start == (1.0, 0.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(seconds):
    with pytest.raises(ValueError, match="seconds of task 'x'"):
        Timeline().add("x", None, seconds)


def test_ten_thousand_tasks_take_well_under_a_second():
    line = Timeline()
    for number in range(10_000):
        line.add(str(number), ("gpu", "net")[number % 2], 1e-3, [number - 1] if number else [])
    begin = time.process_time()
    assert line.schedule().makespan == pytest.approx(10.0)
    assert time.process_time() - begin < 0.5


def test_the_chrome_trace_holds_every_task(tmp_path):
    line = random_line(1)
    schedule = line.schedule()
    events = json.loads(schedule.write_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    for task, start in zip(line.tasks, schedule.start, strict=True):
        if task.resource is not None:
            assert drawn[task.name] == pytest.approx((1e6 * start, 1e6 * task.seconds))
    assert schedule.busy("a") + schedule.idle("a") == pytest.approx(schedule.makespan)
    with pytest.raises(ValueError, match="resource must be one of"):
        schedule.idle("disk")


def test_the_gantt_chart_draws_every_task_on_a_resource():
    pytest.importorskip("plotly")
    line = random_line(2)
    figure = line.schedule().figure()
    drawn = [name for trace in figure.data for name in trace.hovertext]
    assert sorted(drawn) == sorted(task.name for task in line.tasks if task.resource is not None)
