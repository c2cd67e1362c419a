"""What a preconditioner costs: seconds by phase, bytes by kind of state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Costs:
    """Time and memory of a preconditioner on this rank, from its construction on.

    seconds: by phase: "capture" (extra backward passes and statistics), "exchange" (between ranks), "curvature",
        "inverse" and "precondition".
    calls: how often each phase ran.
    nbytes: of what is kept between steps, by kind.
    """

    seconds: Mapping[str, float]
    calls: Mapping[str, int]
    nbytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All that is kept between steps."""
        return sum(self.nbytes.values())

    def explain(self) -> str:
        """One line a phase, then one line a kind of state."""
        lines = [
            f"{phase:<13}{1e3 * seconds / max(self.calls[phase], 1):9.2f} ms a call{self.calls[phase]:8d} calls"
            for phase, seconds in self.seconds.items()
        ]
        lines += [f"{kind:<13}{nbytes / 1e6:9.2f} MB" for kind, nbytes in self.nbytes.items()]
        return "\n".join(lines)


@dataclass
class Clock:
    """Adds up the seconds of phases; on a GPU by its own events, so that nothing has to wait."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Count the block as part of ``name``."""
        self.calls[name] = self.calls.get(name, 0) + 1
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            if len(self._events) > 1000:
                self.settle()
            return
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def settle(self) -> None:
        """Wait for the GPU's events and add them."""
        for name, begin, end in self._events:
            end.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + 1e-3 * begin.elapsed_time(end)
        self._events.clear()
