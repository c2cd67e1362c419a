"""N:M products on a GPU: three kernels, and which of their variants to take.

* ``few``: 16-bit weights and up to 32 rows of activations, bound by the weight's bytes (``kernels/nm_few.cu``);
* ``tiles``: 16-bit weights and more rows, on tensor cores in Triton (:mod:`gossamer.weights._nm_tiles`);
* ``floats``: float32 weights, on the ordinary units (``kernels/nm_floats.cu``).

Candidates come from what a multiprocessor holds and, for ``floats``, from :func:`nm_spmm_model`; the clock decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.weights._gpu_source import aligned, kernel
from gossamer.weights._measured import fastest_plan
from gossamer.weights._nm_model import H200, nm_spmm_model
from gossamer.weights._nm_packed import expected_listed, nm_pack
from gossamer.weights._nm_pattern import MOST_INPUTS

if TYPE_CHECKING:
    from gossamer.weights._nm import NMWeight

FEW = 32
"""Up to so many rows of activations, kernel ``few`` serves 16-bit weights."""
COMPUTE_CAPABILITY = (8, 0)

_SHARED_BYTES, _WARPS, _REGISTERS = 227 << 10, 64, 1 << 16  # of a multiprocessor
_STAGE_ROWS, _ADD_THREADS, _MEASURED = 32, 256, 12
_L2_FACTOR = 3
_ROOM_STEP = 8
"""Rooms are rounded to this, so that weights share compiled kernels."""
_MOST_KEPT = 64
"""Kept rows of a step: its loop is unrolled."""


@dataclass(frozen=True)
class FewPlan:
    """warps: of a block, each 32 outputs. stages: of 32 kept rows. shares: of the windows, each summed apart."""

    warps: int
    stages: int
    shares: int

    def share(self, weight: NMWeight) -> int:
        """Kept rows of a share: whole windows."""
        windows = weight.pattern.windows(weight.shape[1])
        return -(-windows // self.shares) * weight.pattern.n

    def shared_bytes(self, weight: NMWeight, n: int) -> int:
        """Shared memory of a block."""
        inputs = self.share(weight) // weight.pattern.n * weight.pattern.m
        return self.stages * _STAGE_ROWS * 64 * self.warps + 16 * few_blocks(n) * inputs


@dataclass(frozen=True)
class FloatsPlan:
    """A block of ``tokens`` x ``outputs``, ``down`` x 8 a thread, steps of ``windows``; ``shares`` of the steps."""

    tokens: int
    outputs: int
    down: int
    windows: int
    packed: bool
    stages: int
    shares: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.tokens // (8 * self.down) * self.outputs

    @property
    def resident(self) -> int:
        """Blocks whose registers a multiprocessor holds."""
        return max(1, _REGISTERS // (self.threads * (128 if self.down <= 8 else 255)))


@dataclass(frozen=True, eq=False)
class Steps:
    """What kernel ``floats`` reads beside the weight.

    positions: uint8 ``(blocks, steps, groups of a block, kept)``, the row of the step's activations that belongs to a kept
    input. lists: int32 ``(blocks, steps, inputs)``, which inputs these rows are; empty if they are all. room: rows at most.
    """

    positions: Tensor
    lists: Tensor
    room: int


def few_blocks(n: int) -> int:
    """Tokens in eights, as kernel ``few`` takes them: 1, 2 or 4."""
    return 1 << max(0, (-(-n // 8) - 1).bit_length())


def few_plans(weight: NMWeight, n: int) -> list[FewPlan]:
    """Plans that fit, the most promising first: all multiprocessors busy, few shares."""
    scored = []
    for warps, stages, shares in product((4, 8), (3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)):
        plan = FewPlan(warps, stages, shares)
        windows = weight.pattern.windows(weight.shape[1])
        if shares > windows or (shares - 1) * plan.share(weight) >= weight.kept:
            continue
        resident = min(_SHARED_BYTES // (plan.shared_bytes(weight, n) + 1024), _WARPS // (2 * warps))
        if not resident:
            continue
        blocks = -(-weight.shape[0] // (32 * warps)) * shares
        rounds = blocks / (H200.processors * resident)
        busy = rounds / -(-blocks // (H200.processors * resident)) if rounds > 1 else min(1.0, blocks / H200.processors)
        flying = min(1.0, resident * (stages - 1) * _STAGE_ROWS * 64 * warps / 65536)
        scored.append((busy * (0.5 + 0.5 * flying) - 0.01 * shares, plan))
    scored.sort(key=lambda entry: -entry[0])
    return [plan for _, plan in scored[:_MEASURED]]


def multiply_few(weight: NMWeight, x: Tensor, plan: FewPlan) -> Tensor:
    """``x @ W.T`` for ``x`` (n, in), n up to 32, in the weight's 16-bit type."""
    n, (rows, columns), pattern = x.shape[0], weight.shape, weight.pattern
    share = plan.share(weight)
    shares = -(-weight.kept // share)
    x = aligned(x.contiguous())
    y = torch.empty((n, rows), dtype=x.dtype, device=x.device)
    partial = torch.empty((shares, n, rows) if shares > 1 else 0, dtype=torch.float32, device=x.device)
    macros = (("WARPS", plan.warps), ("STAGES", plan.stages), ("BLOCKS", few_blocks(n)))
    divide = -(-(1 << 32) // pattern.n) if pattern.n > 1 else 0
    kernel("nm_few.cu", "nm_few", macros, x.dtype, x.device).launch(
        (-(-rows // (32 * plan.warps)), shares), 32 * plan.warps,
        aligned(weight.values), weight.index, x, y, partial, n, rows, columns, weight.kept, weight.groups, pattern.vector,
        pattern.n, pattern.m, np.uint32(divide), share, shared_bytes=plan.shared_bytes(weight, n),
    )  # fmt: skip
    if shares > 1:
        add = kernel("nm_few.cu", "add_shares", macros, x.dtype, x.device)
        add.launch(-(-y.numel() // _ADD_THREADS), _ADD_THREADS, partial, y, y.numel(), shares)
    return y


def steps_of(weight: NMWeight, plan: FloatsPlan) -> Steps:
    """The positions and lists for one plan, made anew."""
    pattern, groups = weight.pattern, plan.outputs // weight.pattern.vector
    width, kept = plan.windows * pattern.m, plan.windows * pattern.n
    if plan.packed:
        packed = nm_pack(weight, plan.outputs, plan.windows)
        positions, lists = packed.index.transpose(2, 3), packed.columns
        room = min(width, -(-int(packed.count.max()) // _ROOM_STEP) * _ROOM_STEP)
    else:
        steps, blocks = -(-weight.kept // kept), -(-weight.groups // groups)
        places = weight.inputs.new_zeros(steps * kept, blocks * groups)
        places[: weight.kept, : weight.groups] = weight.inputs % width
        positions = places.view(steps, kept, blocks, groups).permute(2, 0, 3, 1).to(torch.uint8)
        lists, room = torch.empty(0, dtype=torch.int32, device=places.device), width
    return Steps(F.pad(positions, (0, -kept % 4)).contiguous(), lists.contiguous(), room)


def floats_plans(weight: NMWeight, n: int) -> list[FloatsPlan]:
    """Plans that fit, in the order of their predicted times; of every tile, packed or not, the two best shares."""
    model = nm_spmm_model(weight.shape, n, weight.pattern, H200)
    plans: list[FloatsPlan] = []
    for candidate in model.candidates:
        tile = (candidate.tile.tokens, candidate.tile.outputs, candidate.packed)
        if sum((plan.tokens, plan.outputs, plan.packed) == tile for plan in plans) >= 2:
            continue
        for windows, stages in product((model.step_windows, max(1, model.step_windows // 2)), (3, 2)):
            plan = FloatsPlan(*tile[:2], candidate.tile.thread[0], windows, candidate.packed, stages, candidate.split)
            if _fits(weight, plan):
                plans.append(plan)
                break
    return plans[:_MEASURED]


def _fits(weight: NMWeight, plan: FloatsPlan) -> bool:
    """Whether a multiprocessor holds two blocks (or one, if its registers do), with what lists usually need."""
    inputs, kept = plan.windows * weight.pattern.m, plan.windows * weight.pattern.n
    listed = min(1.0, 1.25 * expected_listed(weight.pattern, plan.outputs)) if plan.packed else 1.0
    stage = 4 * (plan.tokens * inputs * listed + plan.outputs * kept)
    return (
        plan.stages * stage <= _SHARED_BYTES // min(2, plan.resident) - 4096
        and inputs <= MOST_INPUTS
        and kept <= _MOST_KEPT
        and plan.shares <= -(-weight.shape[1] // inputs)
    )


def multiply_floats(weight: NMWeight, x: Tensor, plan: FloatsPlan, steps: Steps) -> Tensor:
    """``x @ W.T`` for ``x`` (n, in) float32; no copy is made of one that is the transpose of a matrix."""
    (rows, columns), pattern, n = weight.shape, weight.pattern, x.shape[0]
    x = feature_major(x, columns)
    blocks, count, groups, _ = steps.positions.shape
    share = -(-count // plan.shares)
    shares = -(-count // share)
    y = torch.empty((n, rows), dtype=x.dtype, device=x.device)
    sums = y if shares == 1 else torch.empty((shares, n, rows), dtype=x.dtype, device=x.device)
    macros = {
        "TOKENS": plan.tokens, "OUTPUTS": plan.outputs, "DOWN": plan.down, "KEPT": plan.windows * pattern.n,
        "INPUTS": plan.windows * pattern.m, "ROOM": steps.room, "ACROSS": groups, "STAGES": plan.stages,
        "PACKED": int(plan.packed), "RESIDENT": plan.resident,
    }  # fmt: skip
    chosen = tuple(macros.items())
    kernel("nm_floats.cu", "nm_floats", chosen, torch.float32, x.device).launch(
        (-(-n // plan.tokens), blocks, shares), plan.threads,
        x, aligned(weight.values), steps.positions, steps.lists, sums, n, rows, columns, weight.kept,
        weight.groups * pattern.vector, count, share, np.uint64(x.stride(0)),
        shared_bytes=floats_shared(weight, plan, steps),
    )  # fmt: skip
    if shares > 1:
        add = kernel("nm_floats.cu", "add_shares", chosen, torch.float32, x.device)
        add.launch(-(-y.numel() // _ADD_THREADS), _ADD_THREADS, sums, y, np.uint64(y.numel()), shares)
    return y


def floats_shared(weight: NMWeight, plan: FloatsPlan, steps: Steps) -> int:
    """Shared memory of a block: stages of activations, weights and positions, and the lists."""
    _, _, groups, positions = steps.positions.shape
    stage = 4 * plan.tokens * steps.room + 4 * plan.outputs * plan.windows * weight.pattern.n
    stage += -(-groups * positions // 16) * 16
    return plan.stages * (stage + (-(-4 * plan.windows * weight.pattern.m // 16) * 16 if plan.packed else 0))


def feature_major(x: Tensor, inputs: int) -> Tensor:
    """``x`` (n, in) as (inputs, n or more) with runs of 16 bytes: a view where ``x`` is a transpose already."""
    run = 16 // x.element_size()
    turned = x.t()
    if turned.stride(1) == 1 and turned.stride(0) % run == 0 and turned.data_ptr() % 16 == 0 and len(turned) == inputs:
        return turned
    from gossamer.weights._nm_tiles import transposed

    return transposed(x, inputs, run)


class NMOnGpu:
    """One weight's products on its GPU. Holds what they need beside the weight: a few per cent of its bytes."""

    def __init__(self, weight: NMWeight) -> None:
        self._weight = weight
        self._steps: dict[FloatsPlan, Steps] = {}
        self._inputs: Tensor | None = None
        self._plans: dict[tuple[str, int], Any] = {}

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ W.T`` for ``x`` (n, in) in the weight's type."""
        weight, n = self._weight, x.shape[0]
        if weight.dtype == torch.float32:
            plan = self.floats_plan(n)
            steps = self.steps(plan)
            return _run("floats", x, self._arrays(steps.positions, steps.lists), self._numbers(plan, steps.room))
        if n <= FEW:
            return _run("few", x, self._arrays(), self._numbers(self.few_plan(n)))
        return _run("tiles", x, self._arrays(self.inputs), self._numbers(self.tile_plan(n)))

    def steps(self, plan: FloatsPlan) -> Steps:
        """Positions and lists for a plan, kept for the next product."""
        if plan not in self._steps:
            self._steps[plan] = steps_of(self._weight, plan)
        return self._steps[plan]

    @property
    def inputs(self) -> Tensor:
        """The kept inputs of each group, int32 ``(groups, kept)``."""
        if self._inputs is None:
            self._inputs = self._weight.inputs.t().to(torch.int32).contiguous()
        return self._inputs

    def few_plan(self, n: int) -> FewPlan:
        """The fastest plan of ``few``."""
        return self._best("few", 8 * few_blocks(n), few_plans(self._weight, n), multiply_few)

    def floats_plan(self, n: int) -> FloatsPlan:
        """The fastest plan of ``floats``."""

        def call(weight: NMWeight, x: Tensor, plan: FloatsPlan) -> Tensor:
            return multiply_floats(weight, x, plan, self.steps(plan))

        plan = self._best("floats", _bucket(n), floats_plans(self._weight, n), call)
        self._steps = {known: steps for known, steps in self._steps.items() if known in self._plans.values()}
        return plan

    def tile_plan(self, n: int) -> Any:
        """The fastest plan of ``tiles``."""
        from gossamer.weights._nm_tiles import candidates

        def call(weight: NMWeight, x: Tensor, plan: Any) -> Tensor:
            return multiply_tiled(weight, x, plan, self.inputs)

        return self._best("tiles", _bucket(n), candidates(self._weight.pattern.vector), call)

    def _best(self, name: str, n: int, plans: list[Any], multiply: Any) -> Any:
        if (name, n) not in self._plans:
            weight = self._weight
            rows, columns = weight.shape
            key = f"{name} {weight.pattern} {str(weight.dtype).removeprefix('torch.')} {rows}x{columns} n{n}"
            x = torch.randn(n, columns, device=weight.values.device).to(weight.dtype)
            copies = self._copies() if name == "few" else [weight]
            self._plans[name, n] = fastest_plan(
                "nm", key, plans, lambda plan: [partial(multiply, copy, x, plan) for copy in copies]
            )
        return self._plans[name, n]

    def _copies(self) -> list[NMWeight]:
        """Copies that exceed the L2 cache."""
        weight = self._weight
        l2 = torch.cuda.get_device_properties(weight.values.device).L2_cache_size
        more = range(min(31, _L2_FACTOR * l2 // weight.nbytes + 1))
        return [weight, *(weight.to(weight.values.device, copy=True) for _ in more)]

    def _arrays(self, *beside: Tensor) -> list[Tensor]:
        return [self._weight.values, self._weight.index, *beside]

    def _numbers(self, plan: Any, *more: int) -> list[int]:
        weight = self._weight
        pattern = (weight.pattern.n, weight.pattern.m, weight.pattern.vector)
        return [weight.shape[0], *pattern, *(int(value) for value in vars(plan).values()), *more]


def multiply_tiled(weight: NMWeight, x: Tensor, plan: Any, inputs: Tensor) -> Tensor:
    """``x @ W.T`` by kernel ``tiles``; ``inputs`` int32 ``(groups, kept)``."""
    from gossamer.weights._nm_tiles import multiply_tiles, transposed

    windows = weight.pattern.windows(weight.shape[1])
    turned = transposed(x, windows * weight.pattern.m, plan.tokens)
    return multiply_tiles(turned, weight.value_matrix, inputs, weight.shape[0], weight.pattern.vector, len(x), plan)


@torch.library.custom_op("gossamer::nm_linear", mutates_args=())
def _run(kind: str, x: Tensor, arrays: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """A product as an operator that ``torch.compile`` and CUDA graphs can hold.

    arrays: values, index and what the kernel wants beside. numbers: outputs, n, m, vector, the plan's, and more.
    """
    from gossamer.weights._nm import NMWeight
    from gossamer.weights._nm_pattern import NMPattern

    rows, n, m, vector, *rest = numbers
    weight = NMWeight((rows, x.shape[1]), x.dtype, NMPattern(n, m, vector), arrays[0], arrays[1])
    with torch.cuda.device(x.device):
        if kind == "few":
            return multiply_few(weight, x, FewPlan(*rest))
        if kind == "tiles":
            from gossamer.weights._nm_tiles import TilePlan

            return multiply_tiled(weight, x, TilePlan(*rest), arrays[2])
        *plan, room = rest
        tokens, outputs, down, windows, packed, stages, shares = plan
        chosen = FloatsPlan(tokens, outputs, down, windows, bool(packed), stages, shares)
        return multiply_floats(weight, x, chosen, Steps(arrays[2], arrays[3], room))


@_run.register_fake
def _run_shape(kind: str, x: Tensor, arrays: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape[0], numbers[0])


def _bucket(n: int) -> int:
    """Numbers of rows that share a plan: to the next power of two."""
    return max(8, 1 << (n - 1).bit_length())
