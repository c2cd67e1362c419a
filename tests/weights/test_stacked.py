"""Weights in fragment order are joined and parted by rows without a change to what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.weights import (
    FragmentBitmapWeight,
    FragmentLosslessWeight,
    describe,
    fragment_rows,
    from_description,
    stack_fragments,
)

KINDS = [FragmentBitmapWeight, FragmentLosslessWeight]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_rows_of_a_stack_are_the_matrices_it_was_made_of(kind: Any, scale: float) -> None:
    weights = [torch.randn(rows, 300).bfloat16() for rows in (32, 48, 19)]
    weights[0][:, ::50] = 0
    weights[1] *= scale  # other exponents: lossless weights have another base
    whole = stack_fragments([kind.from_dense(weight) for weight in weights])
    assert torch.equal(whole.to_dense(), torch.cat(weights))
    from_description(describe(whole), whole.arrays())  # refuses what contradicts itself
    start = 0
    for weight in weights:
        part = fragment_rows(whole, start, start + len(weight))
        assert torch.equal(part.to_dense(), weight)
        from_description(describe(part), part.arrays())
        start += len(weight)


def test_what_does_not_fit_is_not_stacked() -> None:
    one, narrow, ragged = (
        FragmentBitmapWeight.from_dense(torch.ones(*shape).half()) for shape in ((16, 8), (16, 4), (5, 8))
    )
    assert stack_fragments([one, narrow]) is None
    assert stack_fragments([ragged, one]) is None
    assert stack_fragments([one, FragmentBitmapWeight.from_dense(torch.ones(16, 8).bfloat16())]) is None
    wide = [FragmentLosslessWeight.from_dense((scale * torch.randn(32, 512)).bfloat16()) for scale in (1e-20, 1e20)]
    assert stack_fragments(wide) is None
    with pytest.raises(ValueError, match="rows must be whole strips of 16 below 16, got 0 to 5"):
        fragment_rows(one, 0, 5)
