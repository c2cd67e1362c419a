"""N:M products of many tokens on tensor cores, in Triton (Ma et al.'s gathered blocking, IPDPS 2025, for 16-bit numbers).

``y = x W^T`` with ``x`` transposed, so that a kept input is one run of memory for all tokens of a block. A block computes
some tokens by the outputs of one group, which share their list of inputs: its step gathers as many kept inputs as the dense
product would take inputs, and multiplies them densely.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class TilePlan:
    """A block of ``tokens`` x the outputs of a group, in steps of ``kept`` inputs; warps and stages as Triton has them."""

    tokens: int
    kept: int
    warps: int
    stages: int


def candidates(vector: int) -> list[TilePlan]:
    """What is worth measuring for groups of ``vector`` outputs, the likeliest first."""
    plans = [TilePlan(128, 64, 4, 5), TilePlan(128, 64, 8, 5), TilePlan(256, 64, 8, 4), TilePlan(256, 32, 8, 6)]
    plans += [TilePlan(128, 64, 4, 4), TilePlan(128, 32, 4, 6), TilePlan(64, 64, 4, 5), TilePlan(256, 64, 8, 5)]
    if vector < 128:
        plans += [TilePlan(256, 64, 4, 5), TilePlan(512, 32, 8, 4), TilePlan(512, 32, 8, 5)]
    return plans


def transposed(x: Tensor, inputs: int, multiple: int) -> Tensor:
    """``x`` (tokens, in) as (inputs, tokens), both filled up with zeros, tokens to a ``multiple``."""
    tokens, in_features = x.shape
    columns = -(-tokens // multiple) * multiple
    out = torch.empty(inputs, columns, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(columns, _SQUARE), triton.cdiv(inputs, _SQUARE))
    _transpose[grid](
        x, out, tokens, in_features, inputs, columns, x.stride(0), x.stride(1), SQUARE=_SQUARE, num_warps=4
    )
    return out


def multiply_tiles(
    x: Tensor, values: Tensor, inputs: Tensor, outputs: int, vector: int, tokens: int, plan: TilePlan
) -> Tensor:
    """``x @ W.T``: ``x`` (in, tokens or more), ``values`` (kept, padded), ``inputs`` int32 (groups, kept)."""
    kept, padded = values.shape
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(tokens, plan.tokens)
    even = kept % plan.kept == 0
    full = x.stride(0) >= blocks * plan.tokens
    _product[(blocks * len(inputs),)](
        x, values, inputs, y, tokens, outputs, padded, kept, x.stride(0), blocks,
        TOKENS=plan.tokens, OUTPUTS=vector, KEPT=plan.kept, EVEN=even, FULL=full,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return y


_SQUARE = 64


@triton.jit
def _transpose(x, out, tokens, in_features, inputs, columns, by_token, by_input, SQUARE: tl.constexpr):
    token = tl.program_id(0) * SQUARE + tl.arange(0, SQUARE)
    feature = tl.program_id(1) * SQUARE + tl.arange(0, SQUARE)
    there = (token[:, None] < tokens) & (feature[None, :] < in_features)
    square = tl.load(x + token[:, None].to(tl.int64) * by_token + feature[None, :] * by_input, mask=there, other=0.0)
    place = out + feature[:, None].to(tl.int64) * columns + token[None, :]
    tl.store(place, tl.trans(square), mask=(feature[:, None] < inputs) & (token[None, :] < columns))


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _product(
    x, values, inputs, y, tokens, outputs, padded, kept, row, blocks,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, KEPT: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) // blocks
    token = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    output = group * OUTPUTS + tl.arange(0, OUTPUTS)
    step = tl.arange(0, KEPT)
    there = token < row  # beyond `tokens` a row of x may hold anything: those sums are dropped
    sums = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
    for first in range(0, kept, KEPT):
        place = first + step
        if EVEN:
            gathered = tl.load(inputs + group * kept + place)
            weight = tl.load(values + place[:, None] * padded + output[None, :])
        else:
            gathered = tl.load(inputs + group * kept + place, mask=place < kept, other=0)
            weight = tl.load(values + place[:, None] * padded + output[None, :], mask=place[:, None] < kept, other=0.0)
        if FULL:
            block = tl.load(x + gathered[None, :] * row + token[:, None])
        else:
            block = tl.load(x + gathered[None, :] * row + token[:, None], mask=there[:, None], other=0.0)
        sums = tl.dot(block, weight, sums)
    target = y + token[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(token[:, None] < tokens) & (output[None, :] < outputs))
