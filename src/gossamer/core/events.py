"""Discrete events: a clock, a heap of things to come, and processes written as generators.

Every simulator of the library runs on this engine. A callback costs one heap entry; a process is a generator that
yields what it waits for: a number of seconds, a :class:`Signal`, or another :class:`Process`.

>>> simulation = Simulation()
>>> def machine(name, period):
...     while True:
...         yield period
...         print(f"{simulation.now:g} {name}")
>>> a, b = simulation.process(machine("a", 2)), simulation.process(machine("b", 3))
>>> simulation.run(until=6)
2 a
3 b
4 a
6 b
6 a

Things of the same time happen by priority (lower first), then in the order in which they were planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any

Callback = Callable[[], object]


class Event(list[Any]):
    """One planned callback: ``[time, priority, number, callback]``, where None as the callback means cancelled.

    It is a list because the heap then compares events in C, which is most of what a simulator spends.
    """

    __slots__ = ()

    @property
    def time(self) -> float:
        """When it is due, in the simulation's seconds."""
        return self[0]

    @property
    def pending(self) -> bool:
        """Whether it is still to come: neither done nor cancelled."""
        return self[3] is not None

    def cancel(self) -> None:
        """Take it off the plan; harmless where it is done or cancelled already."""
        self[3] = None


class Interrupt(Exception):
    """Raised inside a process that another one interrupts; ``cause`` says why."""

    def __init__(self, cause: object = None) -> None:
        super().__init__(cause)
        self.cause = cause


class Signal:
    """Something that happens at most once, and that callbacks and processes wait for."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: list[Callable[[Any], object]] = []
        self.fired = False
        self.value: Any = None

    def fire(self, value: Any = None) -> None:
        """Wake everything that waits, at the present time, with ``value``; a second call is an error."""
        if self.fired:
            raise ValueError("a signal fires once; make a new one for the next time")
        self.fired, self.value = True, value
        for wake in self._waiting:
            self._simulation.after(0.0, lambda wake=wake: wake(value))  # type: ignore[misc]
        self._waiting.clear()

    def wait(self, wake: Callable[[Any], object]) -> None:
        """Call ``wake(value)`` once this has fired (at once, by way of the heap, if it has already)."""
        if self.fired:
            self._simulation.after(0.0, lambda: wake(self.value))
        else:
            self._waiting.append(wake)


class Process(Signal):
    """A running generator; as a signal it fires with the generator's return value when that ends."""

    def __init__(self, simulation: Simulation, generator: Generator[Any, Any, Any]) -> None:
        super().__init__(simulation)
        self._generator = generator
        self._turn = 0  # a wake-up that belongs to an earlier turn comes too late and is dropped
        self._plan(0.0)

    def interrupt(self, cause: object = None) -> None:
        """Raise :class:`Interrupt` where the process waits, at the present time.

        Raises:
            ValueError: the process has ended.
        """
        if self.fired:
            raise ValueError("the process has ended and cannot be interrupted")
        self._turn += 1
        turn = self._turn
        self._simulation.after(0.0, lambda: self._resume(turn, Interrupt(cause), failed=True))

    def _plan(self, seconds: float) -> None:
        turn = self._turn
        self._simulation.after(seconds, lambda: self._resume(turn, None))

    def _resume(self, turn: int, value: Any, failed: bool = False) -> None:
        if turn != self._turn or self.fired:
            return
        self._turn += 1
        try:
            awaited = self._generator.throw(value) if failed else self._generator.send(value)
        except StopIteration as end:
            self.fire(end.value)
            return
        if isinstance(awaited, Signal):
            expected = self._turn
            awaited.wait(lambda got: self._resume(expected, got))
        elif isinstance(awaited, int | float):
            self._plan(awaited)
        else:
            raise TypeError(f"a process yields seconds, a Signal or a Process, got {type(awaited).__name__}")


class Simulation:
    """A clock and the events to come.

    now: the present time in seconds. done: how many events have happened.

    >>> simulation = Simulation()
    >>> alarm = simulation.after(5.0, lambda: print("rings"))
    >>> _ = simulation.at(2.0, alarm.cancel)
    >>> simulation.run()
    >>> simulation.now, simulation.done
    (2.0, 1)
    """

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self.done = 0
        self._heap: list[Event] = []
        self._number = 0

    def at(self, time: float, callback: Callback, priority: int = 0) -> Event:
        """Plan ``callback()`` for ``time``.

        Raises:
            ValueError: ``time`` is past or not a number.
        """
        if not time >= self.now:
            raise ValueError(f"time must be at least the present {self.now:g}, got {time}")
        self._number += 1
        event = Event((time, priority, self._number, callback))
        heappush(self._heap, event)
        return event

    def after(self, seconds: float, callback: Callback, priority: int = 0) -> Event:
        """Plan ``callback()`` for ``seconds`` from now; ``ValueError`` where they are negative or not a number."""
        return self.at(self.now + seconds, callback, priority)

    def signal(self) -> Signal:
        """A new signal."""
        return Signal(self)

    def process(self, generator: Generator[Any, Any, Any]) -> Process:
        """Start ``generator`` as a process, at the present time."""
        return Process(self, generator)

    def peek(self) -> float:
        """When the next event is due; infinity where there is none."""
        heap = self._heap
        while heap and heap[0][3] is None:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def step(self) -> bool:
        """Let the next event happen; False where there is none."""
        heap = self._heap
        while heap:
            event = heappop(heap)
            callback = event[3]
            if callback is not None:
                self.now = event[0]
                self.done += 1
                event[3] = None
                callback()
                return True
        return False

    def run(self, until: float = math.inf) -> None:
        """Let events happen until none is left, or up to and including ``until``, where the clock then stands."""
        while self.peek() <= until and self.step():
            pass
        if until < math.inf:
            self.now = max(self.now, until)
