"""An open-loop load generator for services that speak OpenAI's completions.

Open loop: every request leaves at its time, whatever became of those before, so a service that stalls is seen to
stall. Latency counts from the time at which a request was *due*; that it was sent later is the generator's own fault
and is reported as lateness.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossamer.cluster.traces.requests import RequestTrace
from gossamer.core.http import Client, HttpError

_LEAD = 0.05


@dataclass
class Call:
    """One request: when it was due, sent, answered and done, in seconds from the start; tokens; what went wrong.

    tokens: when each piece of output came.
    """

    due: float
    prompt: int
    wanted: int
    sent: float = float("nan")
    done: float = float("nan")
    tokens: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first token, from sending."""
        return self.tokens[0] - self.sent if self.tokens else float("nan")

    @property
    def per_token(self) -> float:
        """Time per output token after the first."""
        return (self.done - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else float("nan")


@dataclass(frozen=True)
class LoadResult:
    """What a run of requests met. All times in seconds."""

    calls: list[Call]

    def column(self, which: Callable[[Call], float]) -> np.ndarray:
        """A figure of every request that was answered."""
        return np.array([which(call) for call in self.calls if not call.error])

    def summary(self) -> dict[str, Any]:
        """Percentiles of lateness, of the latencies as vLLM defines them, and of the latency since due.

        ttft: to the first token, from sending. tpot: per output token after the first. itl: between tokens. e2e: to
        the end, from sending. since_due: to the end, from the time at which the request was due.
        """
        answered = [call for call in self.calls if not call.error]
        span = max((call.done for call in answered), default=0.0)
        offered = max((call.due for call in self.calls), default=0.0)
        gaps = [gap for call in answered for gap in np.diff(call.tokens)]
        return {
            "requests": len(self.calls),
            "failed": len(self.calls) - len(answered),
            "offered_per_s": (len(self.calls) - 1) / offered if offered else 0.0,
            "achieved_per_s": len(answered) / span if span else 0.0,
            "tokens_per_s": sum(len(call.tokens) for call in answered) / span if span else 0.0,
            "lateness": _percentiles([call.sent - call.due for call in self.calls if call.sent == call.sent]),
            "ttft": _percentiles([call.first for call in answered if call.tokens]),
            "tpot": _percentiles([call.per_token for call in answered if len(call.tokens) > 1]),
            "itl": _percentiles(gaps),
            "e2e": _percentiles([call.done - call.sent for call in answered]),
            "since_due": _percentiles([call.done - call.due for call in answered]),
        }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    found = {f"p{level}": float(np.percentile(values, level)) for level in (50, 90, 99)}
    return {"mean": float(np.mean(values)), **found, "max": float(np.max(values))}


def replay(
    trace: RequestTrace,
    address: str,
    model: str = "default",
    most: int | None = None,
    word: str = " hello",
    progress: Callable[[int, int], None] | None = None,
) -> LoadResult:
    """Send a trace's requests to ``POST /v1/completions`` of a service, each at its time, and wait for the answers.

    trace: arrivals, prompt and output tokens; requests that failed there ask for one token.
    address: like ``http://127.0.0.1:8000``. most: send only the first so many. word: a prompt is so many of these.
    progress: called as ``progress(answered, all)``.

    Raises:
        ValueError: the address is wrong, or there is nothing to send.
    """
    calls = [
        Call(float(due), int(prompt), max(1, int(output)))
        for due, prompt, output in zip(trace.arrival[:most], trace.prompt, trace.output, strict=False)
    ]
    if not calls:
        raise ValueError("trace must hold at least one request")
    asyncio.run(_replay(calls, Client(address), model, word, progress))
    return LoadResult(calls)


async def _replay(
    calls: list[Call], client: Client, model: str, word: str, progress: Callable[[int, int], None] | None
) -> None:
    loop, answered = asyncio.get_running_loop(), 0
    bodies = [_body(call, model, word) for call in calls]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would hold up what is due
    start = loop.time() + _LEAD
    tasks = []

    def one_more(_: asyncio.Task[None]) -> None:
        nonlocal answered
        answered += 1
        if progress is not None:
            progress(answered, len(calls))

    try:
        for call, body in zip(calls, bodies, strict=True):
            ahead = start + call.due - loop.time()
            if ahead > 0:
                await asyncio.sleep(ahead)
            tasks.append(asyncio.create_task(_send(call, body, client, start)))
            tasks[-1].add_done_callback(one_more)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        client.close()
        if collecting:
            gc.enable()


def _body(call: Call, model: str, word: str) -> Mapping[str, Any]:
    prompt = word * max(1, call.prompt)
    return {"model": model, "prompt": prompt, "max_tokens": call.wanted, "stream": True, "ignore_eos": True}


async def _send(call: Call, body: Mapping[str, Any], client: Client, start: float) -> None:
    clock = asyncio.get_running_loop().time
    call.sent = clock() - start

    def on_event(event: Any) -> None:
        if any(choice.get("text") for choice in event.get("choices", ())):
            call.tokens.append(clock() - start)

    try:
        await client.post("/v1/completions", body, on_event)
    except (OSError, HttpError, asyncio.IncompleteReadError, json.JSONDecodeError) as error:
        call.error = f"{type(error).__name__}: {error}"
    call.done = clock() - start
