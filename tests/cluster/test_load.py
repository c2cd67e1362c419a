"""The load generator against servers whose behaviour is scripted; the model server against the library."""

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

from gossamer.cluster.load import replay
from gossamer.cluster.traces import GammaGaps, RequestTrace
from gossamer.core.http import Client, HttpError, serve

NULL_SERVER = """
import asyncio, sys
from gossamer.core.http import serve
async def handle(request):
    async def pieces():
        yield {"choices": [{"text": "x"}]}
    return pieces()
async def main():
    server = await serve(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def served(handler):
    """A server on a thread of its own; gives its address."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def start():
        server = await serve(handler, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()

    def run():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        waiting = asyncio.all_tasks(loop)
        for task in waiting:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


def requests(arrival, output=3):
    return RequestTrace(np.asarray(arrival, dtype=float), np.full(len(arrival), 4), np.full(len(arrival), output))


def test_latencies_are_those_of_the_script():
    async def handle(request):
        async def pieces():
            await asyncio.sleep(0.15)
            for index in range(request.body["max_tokens"]):
                if index:
                    await asyncio.sleep(0.06)
                yield {"choices": [{"text": f" {index}"}]}
            yield {"choices": [{"text": ""}]}

        return pieces()

    with served(handle) as address:
        result = replay(requests([0.0, 0.05, 0.1], output=4), address)
    summary = result.summary()
    assert summary["failed"] == 0
    assert summary["ttft"]["p50"] == pytest.approx(0.15, abs=0.03)
    assert summary["itl"]["mean"] == pytest.approx(0.06, abs=0.015)
    assert summary["tpot"]["p50"] == pytest.approx(0.06, abs=0.015)
    assert summary["e2e"]["p50"] == pytest.approx(0.15 + 3 * 0.06, abs=0.05)
    assert [len(call.tokens) for call in result.calls] == [4, 4, 4]


def test_a_stall_of_the_server_is_seen_by_all_who_were_due_meanwhile():
    stalled = asyncio.Lock()
    first = []

    async def handle(request):
        async with stalled:
            if not first:
                first.append(True)
                await asyncio.sleep(1.0)
        return {"choices": [{"text": "x"}]}

    with served(handle) as address:
        result = replay(requests(np.arange(0, 1.0, 0.05)), address)
    waits = result.column(lambda call: call.done - call.due)
    expected = np.maximum(0.0, 1.0 - np.arange(0, 1.0, 0.05))
    assert np.abs(waits - expected).max() < 0.15
    assert result.summary()["lateness"]["p99"] < 0.05


def test_failures_are_counted_and_named():
    async def handle(request):
        if len(request.body["prompt"]) > 100:
            raise HttpError(503, "too busy")
        return {"choices": [{"text": "x"}]}

    trace = RequestTrace(np.array([0.0, 0.01]), np.array([1, 1000]), np.array([1, 1]))
    with served(handle) as address:
        result = replay(trace, address)
    assert result.summary()["failed"] == 1
    assert "too busy" in result.calls[1].error
    assert replay(requests([0.0]), "http://127.0.0.1:9").calls[0].error.startswith("ConnectionRefusedError")
    with pytest.raises(ValueError, match="an address like"):
        replay(requests([0.0]), "ftp://x")
    with pytest.raises(ValueError, match="at least one request"):
        replay(requests([]), "http://127.0.0.1:9")


def test_bad_requests_get_an_answer():
    async def handle(request):
        raise ValueError("prompt must be a text")

    async def ask(address):
        client = Client(address)
        with pytest.raises(HttpError, match="prompt must be a text"):
            await client.post("/v1/completions", {})
        host, port = address[7:].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n{x}")
        assert b"400 Bad Request" in await reader.readline()
        writer.close()

    with served(handle) as address:
        asyncio.run(ask(address))


@contextmanager
def null_server():
    process = subprocess.Popen([sys.executable, "-c", NULL_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.ranks
def test_the_schedule_is_kept_at_two_hundred_requests_a_second():
    """A shared machine is granted some lateness here; the claim is measured on a quiet one."""
    arrival = GammaGaps(0.5, 200.0).sample(400, seed=1)
    with null_server() as address:
        summary = replay(requests(arrival - arrival[0], output=1), address).summary()
    assert summary["failed"] == 0
    assert summary["lateness"]["p50"] < 0.02
    assert summary["achieved_per_s"] > 0.8 * summary["offered_per_s"]


def test_the_command_shows_latencies():
    from gossamer.cluster.cli import app

    async def handle(request):
        return {"choices": [{"text": "x"}]}

    with served(handle) as address:
        arguments = ["cluster", "load", address, "--rate", "200", "--requests", "20"]
        found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        assert (found["requests"], found["failed"]) == (20, 0)
        assert "lateness" in CliRunner().invoke(app, arguments).stdout
