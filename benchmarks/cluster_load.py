"""The load generator: does it send every request when it is due?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from gossamer.cluster.load import replay
from gossamer.cluster.traces import GammaGaps, RequestTrace
from gossamer.core.measure import Bench, Row, claim, largest

NULL_SERVER = """
import asyncio
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


@claim(
    "load-lateness",
    text="99th percentile of how late a request leaves, 500 requests per second to a null server on two cores",
    system=["BurstGPT"],
    peer="none (seconds)",
    unit="s",
    bar=0.005,
    better="lower",
    summary=largest,
    sources=("cluster/load.py", "core/http.py"),
)
def lateness(bench: Bench) -> Iterator[Row]:
    """Poisson and bursty arrivals, ten seconds each."""
    server = subprocess.Popen([sys.executable, "-c", NULL_SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        for burstiness in (1.0, 0.5):
            arrival = GammaGaps(burstiness, 500.0).sample(5_000, seed=1)
            ones = np.ones(len(arrival), dtype=int)
            summary = replay(RequestTrace(arrival - arrival[0], 8 * ones, ones), address).summary()
            note = f"median {1e3 * summary['lateness']['p50']:.2f} ms, {summary['achieved_per_s']:.0f} answers/s"
            yield bench.value(f"burstiness {burstiness}", summary["lateness"]["p99"], "s", note=note)
    finally:
        server.kill()
        server.wait()
