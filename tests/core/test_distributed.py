"""Ranks are started, guarded and slowed down as promised."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from gossamer.core.comm import CommModel
from gossamer.core.distributed import EmulatedTransport, RankError, Transport, spawn

pytestmark = pytest.mark.ranks

LINK = CommModel(alpha=10e-3, beta=1e-7)


def who(text):
    return dist.get_rank(), dist.get_world_size(), text, torch.initial_seed(), torch.get_num_threads()


def test_results_come_back_by_rank():
    assert spawn(who, 3, "x", seed=7) == [(rank, 3, "x", 7 + rank, 1) for rank in range(3)]


def fail_on_one():
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def kill_one():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Transport(timeout=30).all_reduce_(torch.ones(4))


def hang_one():
    time.sleep(60 if dist.get_rank() == 1 else 0)


def test_a_rank_that_raises_is_named_with_its_reason():
    with pytest.raises(RankError, match="rank 1 failed:(.|\n)*the reason"):
        spawn(fail_on_one, 2)


def test_a_killed_rank_does_not_hang_the_others():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        spawn(kill_one, 2)
    assert time.monotonic() - begin < 20


def test_a_rank_that_hangs_is_ended_by_the_watchdog():
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 had not ended after 4 s"):
        spawn(hang_one, 2, timeout=4)
    assert time.monotonic() - begin < 15


def wait_in_vain():
    if dist.get_rank() == 1:
        time.sleep(2)
        return "late"
    try:
        Transport(timeout=0.5).exchange(None, None, (0, 0, 4), torch.empty(4), 1)
    except TimeoutError as error:
        return str(error)


def test_a_message_that_does_not_come_is_a_timeout_that_names_the_rank():
    assert spawn(wait_in_vain, 2) == ["rank 0 waited 0.5 s for rank 1, in vain: is one of them stuck?", "late"]


def collectives(emulated):
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = EmulatedTransport(CommModel(0, 0)) if emulated else Transport()
    tensor = torch.arange(23.0) * (rank + 1)
    gathered = transport.all_gather(tensor)
    transport.all_reduce_(tensor)
    expected = torch.arange(23.0) * (size * (size + 1) // 2)
    rows = torch.stack([torch.arange(23.0) * (other + 1) for other in range(size)])
    return torch.equal(tensor, expected) and torch.equal(gathered, rows), transport.traffic.payload


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_emulated_collectives_compute_and_send_what_they_should(ranks):
    right, sent = zip(*spawn(collectives, ranks, True), strict=True)
    assert all(right)
    # every rank gathers P-1 foreign rows; reduce-scatter and all-gather each send all parts but one
    assert sum(sent) == ranks * (ranks - 1) * 23 * 4 + 2 * (ranks - 1) * 23 * 4
    assert all(right for right, _ in spawn(collectives, ranks, False))


def timed():
    transport = EmulatedTransport(LINK)
    dist.barrier()
    begin = time.monotonic()
    transport.all_reduce_(torch.zeros(1 << 18))
    all_reduce = time.monotonic() - begin
    dist.barrier()
    begin = time.monotonic()
    transport.all_gather(torch.zeros(1 << 16))
    return all_reduce, time.monotonic() - begin


def test_emulated_collectives_take_what_the_model_says():
    all_reduce, all_gather = (max(seconds) for seconds in zip(*spawn(timed, 4), strict=True))
    assert 0.95 <= all_reduce / LINK.all_reduce(1 << 20, 4) <= 1.5
    assert 0.95 <= all_gather / LINK.all_gather(1 << 18, 4) <= 1.5


def differ():
    rank = dist.get_rank()
    size = 10 + rank
    try:
        Transport().exchange(torch.zeros(size), 1 - rank, (0, 0, size), torch.empty(size), 1 - rank)
    except ValueError as error:
        return str(error)


def test_messages_of_different_sizes_are_refused_by_both():
    first, second = spawn(differ, 2)
    assert "rank 0 has 10 entries, rank 1 has 11" in first
    assert "rank 1 has 11 entries, rank 0 has 10" in second
