"""Several ranks give what one process with the whole batch gives, and stop together."""

from __future__ import annotations

import numpy as np
import precondition_ranks as ranks_do
import pytest

from gossamer.core.distributed import spawn
from gossamer.train.precondition._ranks import assign_by_cost

pytestmark = pytest.mark.ranks

CASES = [(method, "dense") for method in ranks_do.METHODS] + [
    ("kfac", "sequence"), ("smw", "sequence"), ("unit-wise", "sequence"), ("kfac-eigen", "conv"),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process_with_the_whole_batch(ranks):
    results = spawn(ranks_do.train_all, ranks, CASES if ranks == 2 else CASES[:3])
    for number, (method, net_name) in enumerate(CASES[: len(results[0])]):
        alone = ranks_do.train(method, net_name, 1, 0, False)
        for result in results:
            error = np.linalg.norm(result[number] - alone) / np.linalg.norm(alone)
            assert error < 1e-6, (method, net_name, error)
            # Not bit for bit: a BLAS may round by where in memory its operands lie.
            assert np.allclose(result[number], results[0][number], rtol=1e-10, atol=1e-12)


def test_a_bad_batch_or_a_missing_one_on_one_rank_stops_all():
    for seen in spawn(ranks_do.one_bad_rank, 2):
        assert all("rank 1" in message and "NaN or Inf" in message for message in seen[:3])
        assert "rank 1: the curvature is due and nothing was observed" in seen[3]


def test_work_is_shared_within_four_thirds_of_the_best():
    costs = [27.0, 8, 8, 8, 1, 64, 27, 8, 1, 1]
    owners = assign_by_cost(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert max(loads) <= 4 / 3 * max(64, sum(costs) / 3)
