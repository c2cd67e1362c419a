"""The event engine against a plain sorted list, and its processes against hand-made timelines."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.events import Interrupt, Simulation

PLANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.booleans()), max_size=40)


@given(PLANS)
def test_events_happen_in_the_order_of_a_stable_sort_and_cancelled_ones_do_not(plans):
    simulation, seen = Simulation(), []
    events = [
        simulation.at(time, lambda index=index: seen.append((simulation.now, index)), priority)
        for index, (time, priority, _) in enumerate(plans)
    ]
    for event, (_, _, cancelled) in zip(events, plans, strict=True):
        if cancelled:
            event.cancel()
    simulation.run()
    kept = [(time, priority, index) for index, (time, priority, cancelled) in enumerate(plans) if not cancelled]
    assert seen == [(time, index) for time, _, index in sorted(kept)]
    assert simulation.done == len(kept)
    assert not any(event.pending for event in events)


def test_run_stops_at_until_and_goes_on_from_there():
    simulation, seen = Simulation(), []
    for time in (1.0, 2.0, 3.0):
        simulation.at(time, lambda time=time: seen.append(time))
    simulation.run(until=2.0)
    assert (seen, simulation.now, simulation.peek()) == ([1.0, 2.0], 2.0, 3.0)
    simulation.run(until=10.0)
    assert (seen, simulation.now, simulation.peek()) == ([1.0, 2.0, 3.0], 10.0, math.inf)
    assert simulation.step() is False


@pytest.mark.parametrize("time", [0.5, math.nan])
def test_the_past_cannot_be_planned(time):
    simulation = Simulation(start=1.0)
    with pytest.raises(ValueError, match="at least the present 1"):
        simulation.at(time, print)


def test_processes_wait_for_each_other_and_for_signals():
    simulation, log = Simulation(), []
    go = simulation.signal()

    def child():
        value = yield go
        yield 2.0
        return value + 1

    def parent():
        result = yield simulation.process(child())
        log.append((simulation.now, result))
        result = yield go  # has fired long ago
        log.append((simulation.now, result))

    simulation.process(parent())
    simulation.at(3.0, lambda: go.fire(41))
    simulation.run()
    assert log == [(5.0, 42), (5.0, 41)]
    with pytest.raises(ValueError, match="fires once"):
        go.fire()


def test_an_interrupted_process_hears_why_and_its_old_alarm_is_void():
    simulation, log = Simulation(), []

    def worker():
        try:
            yield 10.0
        except Interrupt as interrupt:
            log.append((simulation.now, interrupt.cause))
        yield 20.0
        log.append((simulation.now, "done"))

    process = simulation.process(worker())
    simulation.at(4.0, lambda: process.interrupt("crash"))
    simulation.run()
    assert log == [(4.0, "crash"), (24.0, "done")]
    with pytest.raises(ValueError, match="has ended"):
        process.interrupt()


def test_a_process_may_not_yield_a_word():
    simulation = Simulation()

    def wrong():
        yield "soon"

    simulation.process(wrong())
    with pytest.raises(TypeError, match="got str"):
        simulation.run()


def test_a_queue_with_one_server_agrees_with_lindleys_recursion():
    rng = random.Random(3)
    arrivals = [rng.expovariate(1.0) for _ in range(500)]
    services = [rng.expovariate(1.2) for _ in range(500)]
    simulation, waits, free = Simulation(), [], [0.0]

    def customer(service):
        start = max(simulation.now, free[0])
        waits.append(start - simulation.now)
        free[0] = start + service
        yield free[0] - simulation.now

    def source():
        for gap, service in zip(arrivals, services, strict=True):
            yield gap
            simulation.process(customer(service))

    simulation.process(source())
    simulation.run()
    expected, wait = [], 0.0
    for index in range(500):
        expected.append(wait)
        if index + 1 < 500:
            wait = max(0.0, wait + services[index] - arrivals[index + 1])
    assert waits == pytest.approx(expected, abs=1e-9)
