"""The packed form of N:M weights, and the model that decides about it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.weights import A100, NMPattern, NMWeight, nm_pack, nm_spmm_model
from gossamer.weights._nm_packed import expected_listed


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_lists(weight, block, windows):
    """For every block and step, the sorted distinct inputs that its groups keep."""
    pattern, across = weight.pattern, block // weight.pattern.vector
    index = weight.index_matrix.numpy()
    lists = {}
    for row in range(weight.kept):
        window = row // pattern.n
        for group in range(weight.groups):
            lists.setdefault((group // across, window // windows), set()).add(
                window * pattern.m + int(index[row, group])
            )
    return {key: sorted(found) for key, found in lists.items()}


def product(weight, x, inputs_of):
    """``x @ W.T``, kept row after kept row, in float32: the order of both GPU strategies."""
    padded = np.zeros((len(x), weight.pattern.windows(weight.shape[1]) * weight.pattern.m), np.float32)
    padded[:, : weight.shape[1]] = x
    values, vector = weight.value_matrix.numpy(), weight.pattern.vector
    sums = np.zeros((len(x), values.shape[1]), np.float32)
    for row in range(weight.kept):
        for group in range(weight.groups):
            part = slice(group * vector, (group + 1) * vector)
            sums[:, part] += padded[:, inputs_of(row, group), None] * values[row, part]
    return sums[:, : weight.shape[0]]


CASES = [
    ((64, 64), "1:4", 64, 2),
    ((130, 100), "3:8", 128, 4),
    ((96, 70), "2:32", 32, 1),
    ((300, 65), "16:32:64", 128, 8),
]


@pytest.mark.parametrize(("shape", "pattern", "block", "windows"), CASES)
def test_lists_hold_the_distinct_inputs_of_a_block_and_step(shape, pattern, block, windows):
    weight = NMWeight.from_dense(normal(shape), pattern)
    packed = nm_pack(weight, block, windows)
    lists = slow_lists(weight, block, windows)
    assert packed.columns.shape[:2] == packed.count.shape == packed.index.shape[:2]
    for (number, step), inputs in lists.items():
        count = int(packed.count[number, step])
        assert packed.columns[number, step, :count].tolist() == inputs
        assert (packed.columns[number, step, count:] == -1).all()
    assert packed.listed == sum(map(len, lists.values())) / packed.columns.numel()


@pytest.mark.parametrize(("shape", "pattern", "block", "windows"), CASES)
def test_packed_and_plain_products_are_bit_equal(shape, pattern, block, windows):
    weight = NMWeight.from_dense(normal(shape), pattern)
    packed = nm_pack(weight, block, windows)
    x = normal((3, shape[1]), seed=1).numpy()
    kept, across = windows * weight.pattern.n, block // weight.pattern.vector

    def from_lists(row, group):
        place = int(packed.index[group // across, row // kept, row % kept, group % across])
        return int(packed.columns[group // across, row // kept, place])

    plain = product(weight, x, lambda row, group: int(weight.inputs[row, group]))
    assert np.array_equal(product(weight, x, from_lists), plain)
    np.testing.assert_allclose(plain, x @ weight.to_dense().numpy().T, rtol=1e-4, atol=1e-4)


@settings(max_examples=25)
@given(rows=st.integers(1, 200), columns=st.integers(1, 90), n=st.integers(1, 12), extra=st.integers(0, 20))
def test_every_kept_input_is_found_through_its_list(rows, columns, n, extra):
    weight = NMWeight.from_dense(normal((rows, columns)), NMPattern(n, n + extra))
    packed = nm_pack(weight, 64, windows=2)
    blocks, steps = packed.count.shape
    found = packed.columns.gather(2, packed.index.long().reshape(blocks, steps, -1)).view(blocks, steps, 2 * n, 2)
    found = found.permute(1, 2, 0, 3).reshape(steps * 2 * n, -1)[: weight.kept, : weight.groups]
    assert torch.equal(found.long(), weight.inputs)


def test_the_expected_share_is_what_random_masks_list():
    weight = NMWeight.from_dense(normal((1024, 1024)), "8:32")
    assert nm_pack(weight, 128, 2).listed == pytest.approx(expected_listed(weight.pattern, 128), abs=0.02)


def test_bad_blocks_and_steps_are_named():
    weight = NMWeight.from_dense(normal((64, 64)), "2:32:64")
    with pytest.raises(ValueError, match="multiple of the vector"):
        nm_pack(weight, 32)
    with pytest.raises(ValueError, match="1 to 8 windows"):
        nm_pack(weight, 64, 9)


def test_the_plan_lists_all_candidates_best_first_and_explains_them():
    plan = nm_spmm_model((4096, 4096), 1024, NMPattern(4, 32))
    times = [candidate.seconds for candidate in plan.candidates]
    assert times == sorted(times) and plan.chosen is plan.candidates[0]
    lines = plan.explain().splitlines()
    assert len(lines) == 2 + len(plan.candidates)
    assert lines[2].startswith(plan.chosen.tile.name)
    assert plan.ideal_speedup == 8


def test_packing_is_considered_only_where_lists_are_short():
    assert any(each.packed for each in nm_spmm_model((4096, 4096), 1024, NMPattern(4, 32)).candidates)
    wide = [
        each for each in nm_spmm_model((4096, 4096), 1024, NMPattern(16, 32)).candidates if each.tile.outputs == 128
    ]
    assert not any(each.packed for each in wide)


def test_predicted_times_follow_the_device_and_the_density():
    def seconds(n, device=A100, tokens=2048):
        return nm_spmm_model((8192, 8192), tokens, NMPattern(n, 32), device).chosen.seconds

    assert seconds(4) < seconds(8) < seconds(16)
    assert seconds(16) > 2 * 8192 * 8192 * 0.5 * 2048 / A100.flops
    assert 1.5 < seconds(32) / seconds(16) < 2.2
    few = nm_spmm_model((8192, 8192), 1, NMPattern(16, 32), A100).chosen
    assert few.seconds >= few.dram > 8192 * 8192 * 0.5 * 4 / A100.dram


def test_vectors_longer_than_a_tile_exclude_it():
    tiles = {each.tile.name for each in nm_spmm_model((4096, 4096), 512, NMPattern(8, 32, 128)).candidates}
    assert tiles == {"huge", "wide", "tall"}
    assert math.isfinite(nm_spmm_model((1, 1), 1, NMPattern(1, 1)).chosen.seconds)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="positive"):
        nm_spmm_model((0, 4), 1, NMPattern(1, 2))
