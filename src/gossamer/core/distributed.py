"""Several ranks on one machine: starting them, guarding them, and making their link as slow as a real one.

:func:`spawn` starts processes that find each other through a file, seeds them, and returns what each of them returned;
if one fails, dies or hangs, all are ended and the error says which and why. A :class:`Transport` carries tensors between
ranks and counts what it carries; an :class:`EmulatedTransport` delivers every message only when a link with the given
start-up and bandwidth would have.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

if TYPE_CHECKING:
    from torch import Tensor

    from gossamer.core.comm import CommModel


class RankError(RuntimeError):
    """A rank failed, died or hung. rank: which; the message holds its traceback or how it ended."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank


def spawn(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120.0, seed: int = 0
) -> list[Any]:
    """Run ``function(*arguments)`` in ``ranks`` processes of one gloo group; returns their results by rank.

    Each process has one thread and torch seeded with ``seed`` plus its rank; the function asks torch.distributed for
    its rank. It must be importable (no lambda), its arguments and result picklable.

    Raises:
        RankError: a rank raised, died, or had not ended after ``timeout`` seconds; the others are ended first.
        ValueError: ``ranks`` is less than 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    # A fork server imports torch and numba once; ranks are forked from it, before any of its threads exist.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "numba", "gossamer.core.distributed"])
    with tempfile.TemporaryDirectory(prefix="gossamer-ranks-") as folder:
        processes = [
            context.Process(target=_rank_main, args=(function, arguments, rank, ranks, folder, timeout, seed), daemon=True)
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            for process in processes:
                process.start()
            _watch(processes, folder, time.monotonic() + timeout, timeout)
            return [_load(Path(folder, f"{rank}.result")) for rank in range(ranks)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()


def _watch(processes: list[Any], folder: str, deadline: float, timeout: float) -> None:
    """Return when all have ended well; raise for the first that has not."""
    running = dict(enumerate(processes))
    while running:
        ended = wait([process.sentinel for process in running.values()], timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            late = [rank for rank in running if not Path(folder, f"{rank}.result").exists()] or list(running)
            raise RankError(min(late), f"had not ended after {timeout:g} s")
        bad = [rank for rank, process in running.items() if process.sentinel in ended and _code(process)]
        if bad:
            time.sleep(0.1)  # whoever failed first has often made others fail; let it be the one that is named
            raise _first_failure(folder, bad, running)
        running = {rank: process for rank, process in running.items() if process.sentinel not in ended}


def _code(process: Any) -> int:
    process.join()
    return int(process.exitcode)


def _first_failure(folder: str, bad: list[int], running: dict[int, Any]) -> RankError:
    killed = [rank for rank in bad if not Path(folder, f"{rank}.error").exists()]
    if killed:
        return RankError(killed[0], f"ended with exit code {running[killed[0]].exitcode}")
    errors = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return RankError(int(errors[0].stem), "failed:\n" + errors[0].read_text())


def _load(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _rank_main(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, folder: str, timeout: float, seed: int
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)
    try:
        store = FileStore(os.path.join(folder, "store"), ranks)
        patience = timedelta(seconds=timeout + 60)  # the watchdog's time runs out first
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        result = function(*arguments)
        Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
        store.set(f"done {rank}", "1")  # nobody closes its connections while another still reads
        store.wait([f"done {other}" for other in range(ranks)], patience)
    except BaseException:
        text = Path(folder, f"{rank}.error.part")
        text.write_text(traceback.format_exc())
        text.rename(text.with_suffix(""))
        os._exit(1)
    os._exit(0)  # gloo's threads and the interpreter's end do not always agree


@dataclass
class Traffic:
    """What a rank has sent. payload: bytes of content; headers: bytes of headers; messages: how many."""

    payload: int = 0
    headers: int = 0
    messages: int = 0


_HEADER_WORDS = 4  # three of the caller, one for the time of delivery
Header = tuple[int, int, int]


class Transport:
    """Messages between the ranks of a group, each with a header of three integers, and the two collectives.

    group: a process group of torch.distributed (the default one if None).
    timeout: seconds after which a message that does not arrive is an error.

    Attributes:
        traffic: what this rank has sent in messages; what the library sends in its collectives is not seen.
    """

    def __init__(self, group: Any = None, timeout: float = 60.0) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.timeout = timeout
        self.traffic = Traffic()

    def exchange(
        self, content: Tensor | None, to: int | None, header: Header, into: Tensor | None, source: int | None
    ) -> Header | None:
        """Send ``content`` with ``header`` to rank ``to`` and receive into ``into`` from ``source``, at the same time.

        Either direction may be absent (None). Returns the header that came. A peer whose third header word differs
        (what the caller says about its message's size) is refused before its content is read.

        Raises:
            ValueError: the peer's third word is another.
            TimeoutError: nothing came within ``timeout``.
            ConnectionError: a peer has gone.
        """
        sent, received = [], None
        try:
            if to is not None:
                assert content is not None
                stamped = torch.tensor([*header, self._delivery_time(content.nbytes)], dtype=torch.int64)
                sent += [self._send(stamped, to), self._send(content, to)]
                self._count(content.nbytes)
            if source is not None:
                assert into is not None
                stamp = torch.empty(_HEADER_WORDS, dtype=torch.int64)
                self._wait(self._receive(stamp, source))
                first, second, third, delivery = stamp.tolist()
                received = first, second, third
                if received[2] != header[2]:
                    if sent:
                        self._wait(sent[0])  # a message that is dropped half-way never tells the peer
                    raise ValueError(
                        f"all ranks must exchange messages of one size: rank {self.rank} has {header[2]} entries, "
                        f"rank {source} has {received[2]}; give them the same density and the same parameters"
                    )
                self._wait(self._receive(into, source))
                _sleep_until(delivery)
            for work in sent:
                self._wait(work)
        except RuntimeError as error:
            raise self._explained(error, to, source) from error
        return received

    def all_reduce_(self, tensor: Tensor) -> None:
        """Add ``tensor`` over all ranks, in place."""
        try:
            self._wait(dist.all_reduce(tensor, group=self.group, async_op=True))
        except RuntimeError as error:
            raise self._explained(error, None, None) from error

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, of shape ``(ranks, *tensor.shape)``."""
        out = tensor.new_empty((self.size * tensor.numel(),))
        try:
            self._wait(dist.all_gather_into_tensor(out, tensor.reshape(-1), group=self.group, async_op=True))
        except RuntimeError as error:
            raise self._explained(error, None, None) from error
        return out.view(self.size, *tensor.shape)

    def _delivery_time(self, nbytes: int) -> int:
        """In nanoseconds of the machine's clock; 0: as soon as it is there."""
        return 0

    def _count(self, nbytes: int) -> None:
        self.traffic.payload += nbytes
        self.traffic.headers += 8 * _HEADER_WORDS
        self.traffic.messages += 1

    def _send(self, tensor: Tensor, to: int) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=to)

    def _receive(self, tensor: Tensor, source: int) -> Any:
        return dist.irecv(tensor, group=self.group, group_src=source)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self.timeout))

    def _explained(self, error: RuntimeError, to: int | None, source: int | None) -> Exception:
        peers = sorted({peer for peer in (to, source) if peer is not None})
        whom = f"rank {' and '.join(map(str, peers))}" if peers else "the other ranks"
        if "imed out" in str(error):
            return TimeoutError(
                f"rank {self.rank} waited {self.timeout:g} s for {whom}, in vain: is one of them stuck?"
            )
        return ConnectionError(f"rank {self.rank} lost {whom}: {str(error).splitlines()[0]}")


class EmulatedTransport(Transport):
    """A :class:`Transport` whose messages take as long as on the link of ``model``, collectives included.

    Every rank has one outgoing line, a bucket that fills with ``1 / beta`` tokens of a byte a second: messages queue in
    it, and each is delivered ``alpha`` after its last byte has left. All ranks must share a clock (one machine). The
    collectives are ring all-reduce and recursive-doubling all-gather, a ring where ranks are no power of two.
    """

    def __init__(self, model: CommModel, group: Any = None, timeout: float = 60.0) -> None:
        super().__init__(group, timeout)
        self.model = model
        self._line_free = 0.0

    def _delivery_time(self, nbytes: int) -> int:
        beta = self.model.beta * self.model.congestion_at(self.size)
        self._line_free = max(self._line_free, 1e-9 * time.monotonic_ns()) + beta * nbytes
        return int(1e9 * (self._line_free + self.model.alpha))

    def all_reduce_(self, tensor: Tensor) -> None:
        """Ring all-reduce, in place: ``2(P-1)`` messages of a P-th."""
        p, rank = self.size, self.rank
        if p == 1:
            return
        flat = tensor.view(-1)
        parts = list(flat.tensor_split(p))
        right, left = (rank + 1) % p, (rank - 1) % p
        room = torch.empty(parts[0].numel(), dtype=flat.dtype)
        for step in range(p - 1):
            leaving, coming = parts[(rank - step) % p], parts[(rank - step - 1) % p]
            into = room[: coming.numel()]
            self.exchange(leaving, right, (0, 0, flat.numel()), into, left)
            coming += into
        for step in range(p - 1):
            leaving, coming = parts[(rank + 1 - step) % p], parts[(rank - step) % p]
            self.exchange(leaving, right, (0, 0, flat.numel()), coming, left)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """All-gather: in ``log2 P`` doublings, or around a ring where P is no power of two."""
        p, rank = self.size, self.rank
        out = tensor.new_empty((p, *tensor.shape))
        out[rank] = tensor
        if p & (p - 1):
            for step in range(p - 1):
                leaving, coming = out[(rank - step) % p], out[(rank - step - 1) % p]
                self.exchange(leaving, (rank + 1) % p, (0, 0, tensor.numel()), coming, (rank - 1) % p)
            return out
        width = 1
        while width < p:
            mine, theirs = rank // width * width, (rank ^ width) // width * width
            block = out[mine : mine + width]
            self.exchange(block, rank ^ width, (0, 0, tensor.numel()), out[theirs : theirs + width], rank ^ width)
            width *= 2
        return out


def _sleep_until(nanoseconds: int) -> None:
    """Sleep, not spin: on a machine with fewer cores than ranks another rank needs the core."""
    remaining = nanoseconds - time.monotonic_ns()
    if remaining > 0:
        time.sleep(1e-9 * remaining)
