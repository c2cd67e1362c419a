"""Runs calls in threads and gives their results in order, with few of them in memory at a time."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_order(calls: Iterable[Callable[[], Result]], threads: int | None = None) -> Iterator[Result]:
    """Results of ``calls`` in order; one more call than ``threads`` (processors by default) is under way or waiting.

    >>> list(in_order([lambda: 1, lambda: 2, lambda: 3], threads=2))
    [1, 2, 3]
    """
    workers = threads or os.cpu_count() or 1
    under_way: deque[Future[Result]] = deque()
    waiting = iter(calls)
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(under_way) <= workers and (call := next(waiting, None)) is not None:
                    under_way.append(pool.submit(call))
                if not under_way:
                    return
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
