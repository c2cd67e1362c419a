"""Timing GPU work by replaying a CUDA graph: what :meth:`gossamer.core.measure.Bench.cuda_graphs` measures with.

A graph holds a whole round through a contender's callables, several times over, so that neither Python nor the launch
queue shows in the figure; events of the GPU's own clock stand around a replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_CALLS = 20


class GraphRacer:
    """One contender: its callables captured in rotation, at least 20 calls a replay.

    calls: callables without arguments that launch work on torch's current stream, without synchronising.
    """

    def __init__(self, calls: Callable[[], object] | Sequence[Callable[[], object]]) -> None:
        self._turns = [calls] if callable(calls) else list(calls)
        if not self._turns:
            raise ValueError("a contender must be a callable or a non-empty sequence of callables, got an empty one")
        self._replays = 1
        self.expected = 0.0

    def warm_up(self, sample_seconds: float) -> None:
        """Call everything once (compiling, allocating), capture it, then settle how many replays make a sample."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in self._turns:
                call()
        stream.synchronize()
        rounds = math.ceil(_CALLS / len(self._turns))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in self._turns * rounds:
                call()
        self._calls = rounds * len(self._turns)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        single = min(self.sample() for _ in range(2))
        self._replays = max(1, math.ceil(sample_seconds / max(single * self._calls, 1e-9)))
        self.expected = single * self._calls * self._replays

    def sample(self) -> float:
        """Seconds per call, over one sample."""
        self._start.record()
        for _ in range(self._replays):
            self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3 / (self._calls * self._replays)
