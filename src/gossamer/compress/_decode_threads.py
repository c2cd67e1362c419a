"""All threads or one: what a step of decoding takes while other processes come and go.

A step has hundreds of short products, and after each all threads wait for the last. Where another process keeps a core
busy, that one waits for its turn on the core, milliseconds every time, and two threads become many times slower than one.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_JUDGED = 3
"""Steps whose median tells what a way takes: a single slow step is nothing to act on."""
_FIRST_RETRY, _LAST_RETRY = 8, 128
_GAIN = 0.95


class Team:
    """Chooses, step by step, between all threads and one by what the last steps took.

    All threads run while they are faster than one thread was when it ran last. One thread runs until it is time to try
    all again: after 8 steps, then 16, and so on up to 128.

    alone: seconds of a step by one thread, as known at the start.

    >>> team = Team(alone=0.03)
    >>> team.together
    True
    >>> for _ in range(3):
    ...     team.took(0.2)
    >>> team.together
    False
    """

    def __init__(self, alone: float) -> None:
        self.together = True
        self._alone = alone
        self._last: deque[float] = deque(maxlen=_JUDGED)
        self._retry, self._until_retry = _FIRST_RETRY, 0

    def took(self, seconds: float) -> None:
        """Tell what the step took that has just ended."""
        self._last.append(seconds)
        if not self.together:
            self._until_retry -= 1
            if self._until_retry <= 0:
                self._alone = median(self._last)
                self._turn(True)
        elif len(self._last) == _JUDGED:
            if median(self._last) > self._alone * _GAIN:
                self._until_retry = self._retry
                self._retry = min(2 * self._retry, _LAST_RETRY)
                self._turn(False)
            else:
                self._retry = _FIRST_RETRY

    def _turn(self, together: bool) -> None:
        self.together = together
        self._last.clear()
