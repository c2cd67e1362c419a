"""Exchanges between real processes against a replay in one process, sums, and dense training."""

from __future__ import annotations

import gzip

import exchange_ranks as ranks_do
import numpy as np
import pytest
import torch

from gossamer.core.comm import preset
from gossamer.core.distributed import spawn
from gossamer.train import GradientExchanger, NativeHooks, warm_up

pytestmark = pytest.mark.ranks

CASES = [
    (topology, d, k) for topology in ("butterfly", "tree") for d, k in ((50, 1), (300, 7), (100_000, 1000), (40, 40))
]


def largest(x, k):
    return np.sort(np.lexsort((np.arange(len(x)), -np.abs(x)))[:k])


def top(vector, k):
    """A sparse vector as a dictionary, cut to k entries of the largest magnitude."""
    indices = np.array(sorted(vector))
    kept = indices[largest(np.array([vector[i] for i in indices], np.float32), k)]
    return {i: vector[i] for i in kept}


def added(first, second):
    total = dict(first)
    for index, value in second.items():
        total[index] = np.float32(total[index] + value) if index in total else value
    return total


def replay(lists, k, topology):
    """The published merge in one process, with dictionaries."""
    size = len(lists)
    if topology == "butterfly":
        core = 1 << (size.bit_length() - 1)
        for extra in range(core, size):
            lists[extra - core] = top(added(lists[extra - core], lists[extra]), k)
        lists = lists[:core]
        width = 1
        while width < core:
            lists = [top(added(lists[min(r, r ^ width)], lists[max(r, r ^ width)]), k) for r in range(core)]
            width *= 2
        return lists[0]
    width = 1
    while width < size:
        for rank in range(0, size - width, 2 * width):
            lists[rank] = top(added(lists[rank], lists[rank + width]), k)
        width *= 2
    return lists[0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_gtopk_equals_the_replay_bit_for_bit_on_all_ranks_and_conserves_mass(ranks):
    results = spawn(ranks_do.merge_many, ranks, CASES)
    for number, (topology, d, k) in enumerate(CASES):
        gradients = [ranks_do.gradient(rank, d).numpy() for rank in range(ranks)]
        lists = [{int(i): g[i] for i in largest(g, k)} for g in gradients]
        expected = replay([dict(entries) for entries in lists], k, topology)
        kept = np.zeros(d)
        for result in results:
            values, indices, (lost_values, lost_indices), payload = result[number]
            assert indices.tolist() == sorted(expected)
            assert values.tobytes() == np.array([expected[i] for i in sorted(expected)], np.float32).tobytes()
            np.add.at(kept, lost_indices, lost_values.astype(np.float64))
            if topology == "butterfly" and ranks & (ranks - 1) == 0:
                assert payload == 8 * k * (ranks.bit_length() - 1)
        kept[indices] += values
        sent = np.zeros(d)
        for entries in lists:
            for index, value in entries.items():
                sent[index] += value
        assert np.abs(kept - sent).max() <= 1e-5 * np.abs(sent).max()


@pytest.mark.parametrize("method", ["gtopk", "topk"])
def test_exact_error_feedback_conserves_all_gradients_over_steps(method):
    results = spawn(ranks_do.average, 3, 2000, 4, {"density": 0.01, "method": method})
    before = np.zeros(2000)
    for step in range(4):
        arrived = sum(ranks_do.gradient(rank, 2000, step).double().numpy() for rank in range(3)) + before
        update, _ = results[0][0][step]
        before = sum(found[step][1].astype(np.float64) for found, _ in results)
        assert all(np.array_equal(found[step][0], update) for found, _ in results)
        assert np.abs(arrived - before - 3.0 * update).max() <= 1e-5 * np.abs(arrived).max()
        assert np.linalg.norm(arrived - 3.0 * update) ** 2 <= (1 - 20 / 2000) * np.linalg.norm(arrived) ** 2


def test_paper_error_feedback_follows_its_rule():
    """Positions that a rank sent and the result holds are cleared, the others are taken back."""
    results = spawn(ranks_do.average, 4, 500, 1, {"density": 0.02, "method": "gtopk", "error_feedback": "paper"})
    for rank, (found, _) in enumerate(results):
        update, residual = found[0]
        expected = ranks_do.gradient(rank, 500).numpy().copy()
        chosen = np.intersect1d(largest(expected, 10), np.flatnonzero(update))
        expected[chosen] = 0
        assert np.array_equal(residual, expected)


@pytest.mark.parametrize("method", ["gtopk", "topk", "dense"])
def test_at_full_density_every_method_is_the_dense_average(method):
    results = spawn(ranks_do.average, 3, 64, 1, {"density": 1.0, "method": method})
    expected = sum(ranks_do.gradient(rank, 64).double().numpy() for rank in range(3)) / 3
    for found, _ in results:
        assert found[0][0] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("method", ["gtopk", "topk", "dense"])
def test_nan_on_one_rank_stops_all_and_leaves_residuals_whole(method):
    for (kind, text), spread, change, good in spawn(ranks_do.bad_gradients, 3, method):
        assert kind == "NonFiniteGradients" and "NaN or Inf" in text
        assert spread and good and change < 1e-4


def test_loss_scales_do_not_reach_the_residuals():
    """Scales are powers of two, so that nothing but the scale can make a difference."""
    plain = spawn(ranks_do.average, 2, 100, 3, {"density": 0.1, "method": "gtopk"})
    for (steps, residual), (found, _) in zip(spawn(ranks_do.scaled_losses, 2), plain, strict=True):
        assert all(np.array_equal(mine, theirs) for mine, (theirs, _) in zip(steps, found, strict=True))
        assert np.array_equal(residual, found[-1][1])


def test_ranks_with_different_densities_are_told():
    for kind, text in spawn(ranks_do.different_densities, 2):
        assert kind == "ValueError" and "messages of one size" in text


def test_unused_parameters_count_as_zero_and_accumulated_passes_are_sent_once():
    model = ranks_do.TwoHeads()
    results = spawn(ranks_do.unused_and_accumulated, 2)
    for accumulate in (False, True):
        expected = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for rank in range(2):
            x = torch.full((3, 6), float(rank + 1))
            for second in [False, rank == 0] if accumulate else [rank == 0]:
                model.zero_grad()
                model(x, second).backward()
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        expected[name] += parameter.grad / 2
        for result in results:
            assert result[accumulate].keys() == expected.keys()
            for name, value in expected.items():
                assert result[accumulate][name] == pytest.approx(value.numpy(), rel=1e-5, abs=1e-6)


def test_residuals_survive_a_change_of_the_number_of_ranks():
    states = spawn(ranks_do.save_state, 3, 200)
    total = sum(state["residuals"]["w"] for state in states).numpy()
    refused, summed = zip(*spawn(ranks_do.load_state, 2, states, "sum"), strict=True)
    assert all("3 ranks, now there are 2" in text for _, text in refused)
    assert sum(residuals["w"] for residuals in summed) == pytest.approx(total, rel=1e-5, abs=1e-5)
    assert all(residuals == {} for _, residuals in spawn(ranks_do.load_state, 2, states, "drop"))


def assert_as_good_as_dense(results):
    for way in zip(*results, strict=True):
        assert all(np.array_equal(way[0][1], parameters) for _, parameters in way)  # equal on all ranks
    dense, with_ddp, native, forgetful = (accuracy for accuracy, _ in results[0])
    assert min(with_ddp, native) >= dense - 0.01
    assert forgetful < native - 0.02


def test_sparse_training_is_as_good_as_dense_and_worse_without_residuals():
    assert_as_good_as_dense(spawn(ranks_do.train_all_ways, 4))


@pytest.mark.data
@pytest.mark.slow
def test_sparse_training_on_handwritten_digits_is_within_a_point_of_dense(data_file):
    def idx(name, header):
        path = data_file(name)
        with gzip.open(path) as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8, offset=header)

    images = idx("vectors/mnist_test/t10k-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28).float() / 255
    pooled = torch.nn.functional.adaptive_avg_pool2d(images, 8).view(-1, 64)
    labels = idx("vectors/mnist_test/t10k-labels-idx1-ubyte.gz", 8).long()
    data = (pooled[:8000], labels[:8000], pooled[8000:], labels[8000:])
    assert_as_good_as_dense(spawn(ranks_do.train_all_ways, 4, data, 20, timeout=600))


def choice(method_of, size, k):
    exchanger = object.__new__(GradientExchanger)
    exchanger.link, exchanger.topology, exchanger.dense_below, exchanger.method = (
        preset("1gbe"),
        method_of,
        1024,
        "auto",
    )
    exchanger.transport = type("Of8", (), {"size": 8})
    return exchanger.chosen_method(size, k)


def test_the_method_follows_the_cost_model():
    assert choice("butterfly", 25_000_000, 25_000) == "gtopk"
    assert choice("tree", 25_000_000, 10_000) == "topk"  # below the crossover at k = 18,167
    assert choice("tree", 25_000_000, 20_000) == "gtopk"
    assert choice("butterfly", 25_000_000, 12_000_000) == "dense"
    assert choice("butterfly", 1000, 1) == "dense"


def build_wrong():
    from torch import nn

    model, messages = nn.Linear(2, 2), []
    exchanger = GradientExchanger()
    for groups in ([["weight"]], [["weight", "bias"], ["bias"]], [["weight", "bias", "other"]]):
        messages.append(ranks_do.catch(lambda groups=groups: NativeHooks(model, exchanger, groups=groups)))
    for options in (
        {"method": "x"},
        {"error_feedback": "x"},
        {"topology": "x"},
        {"density": 0.0},
        {"on_nonfinite": "x"},
    ):
        messages.append(ranks_do.catch(lambda options=options: GradientExchanger(**options)))
    return messages


def test_bad_arguments_are_refused_by_name():
    groups = ["groups"] * 3
    for (kind, text), name in zip(
        spawn(build_wrong, 1)[0],
        [*groups, "method", "error_feedback", "topology", "density", "on_nonfinite"],
        strict=True,
    ):
        assert kind == "ValueError" and text.startswith(name)


def test_warm_up_needs_a_positive_number_of_steps():
    with pytest.raises(ValueError, match="steps_per_stage must be at least 1, got 0"):
        warm_up(0.001, 0)
