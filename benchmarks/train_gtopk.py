"""gTop-k against Top-k by all-gather and the dense ring on an emulated 1 Gb Ethernet: eight ranks, 25 million gradients.

Every rank is a process; messages go through gloo on one machine and are delivered when a link with the published
constants (0.436 ms a message, 9 ns a byte) would have delivered them. Timed is the exchange of what was selected, from
a barrier to the slowest rank: messages, merging, and adding the result into a dense vector that exists already. Selecting
is shown beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from gossamer.core.comm import preset
from gossamer.core.distributed import EmulatedTransport, spawn
from gossamer.core.measure import Bench, Row, claim, median
from gossamer.train import gtopk_all_reduce, select_topk
from gossamer.train._gtopk import add_sparse_, topk_all_gather

RANKS, SIZE, K = 8, 25_000_000, 25_000
SOURCES = ("train/_gtopk.py", "train/_select.py", "core/distributed.py", "core/comm.py")
LINK = "emulated 1 Gb Ethernet, 8 ranks, 25 million float32 gradients, density 0.001"


def rounds(peer: str, count: int) -> list[tuple[float, float, float]]:
    """On one rank: seconds of selecting, of gTop-k and of the peer, in turns."""
    rank = dist.get_rank()
    gradient = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank)) ** 3
    transport = EmulatedTransport(preset("1gbe"))
    begin = time.perf_counter()
    values, indices = select_topk(gradient, K)  # compiles, or reads what is compiled
    begin = time.perf_counter()
    values, indices = select_topk(gradient, K)
    selecting = time.perf_counter() - begin

    def seconds(call: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    total = torch.zeros(SIZE)

    def ours() -> None:
        reduced = gtopk_all_reduce(values, indices, transport)
        add_sparse_(total, [(reduced.values, reduced.indices)])

    def theirs() -> None:
        if peer == "topk":
            add_sparse_(total, topk_all_gather(values, indices, transport))
        else:
            transport.all_reduce_(gradient)

    ours()
    theirs()
    return [(selecting, seconds(ours), seconds(theirs)) for _ in range(count)]


def _row(bench: Bench, peer: str, name: str, count: int) -> Row:
    by_rank = spawn(rounds, RANKS, peer, count, timeout=540)
    slowest = [[max(times) for times in zip(*moment, strict=True)] for moment in zip(*by_rank, strict=True)]
    ratios = [theirs / ours for _, ours, theirs in slowest]
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    link = preset("1gbe")
    model = link.topk_all_gather(K, RANKS) if peer == "topk" else link.all_reduce(4 * SIZE, RANKS)
    return Row(
        case="P=8 d=25M k=25k", unit="s", ours=statistics.median(ours for _, ours, _ in slowest),
        peer=statistics.median(theirs for _, _, theirs in slowest), ratio=statistics.median(ratios),
        spread=(deciles[0], deciles[-1]), peer_name=name, samples=count,
        note=f"wire alone, by the model: {model / link.gtopk_butterfly(K, RANKS):.2f}x; "
        f"selecting took {1e3 * slowest[0][0]:.0f} ms with all ranks on this machine's cores",
    )  # fmt: skip


@claim(
    "gtopk-topk", text=f"gTop-k butterfly against Top-k by all-gather, {LINK}; exchange only", system=["gTop-k"],
    peer="all-gather Top-k on the same link", unit="ratio", bar=1.3, better="higher", summary=median, sources=SOURCES,
)  # fmt: skip
def against_topk(bench: Bench) -> Iterator[Row]:
    yield _row(bench, "topk", "all-gather Top-k", min(bench.samples, 25))


@claim(
    "gtopk-dense", text=f"gTop-k butterfly against dense ring all-reduce, {LINK}; exchange only", system=["gTop-k"],
    peer="dense ring all-reduce on the same link", unit="ratio", bar=20.0, better="higher", summary=median,
    sources=SOURCES,
)  # fmt: skip
def against_dense(bench: Bench) -> Iterator[Row]:
    yield _row(bench, "dense", "dense ring", min(bench.samples, 7))
