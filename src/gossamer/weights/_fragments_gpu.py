"""The GPU kernel of weights in fragment order, and what runs it: a plan, found by measuring once.

The source is ``kernels/fragment_prelude.cu``, then the format's decoder, then ``kernels/fragment_linear.cu``. It needs a
GPU of compute capability 9.0 or newer.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.files import write_json
from gossamer.core.hardware import cache_dir
from gossamer.core.measure import Bench, median
from gossamer.core.nvrtc import Kernel, load_kernel

if TYPE_CHECKING:
    from gossamer.weights._fragments import FragmentWeight

MAX_N = 32
"""More rows of activations than this are multiplied by the decoded matrix."""
COMPUTE_CAPABILITY = (9, 0)

_TILE_BYTES = 2048  # of x, for eight rows of activations
_ADD_THREADS = 256
_TABLE_VERSION = 2
_MEASURED, _FINALISTS = 40, 5
_MARGIN = 1.03
_L2_FACTOR = 4
_SMS, _SHARED_BYTES, _REGISTERS, _WARPS = 132, 227 << 10, 1 << 16, 64  # of one H200, and of one multiprocessor of it


@dataclass(frozen=True)
class Decoder:
    """The part of the kernel that is a format's own.

    file: its source below ``kernels``. registers: of a thread, by blocks of eight rows, for one strip and for two.
    """

    file: str
    registers: Mapping[int, tuple[int, int]]

    def source(self) -> str:
        """The whole CUDA source."""
        folder = files("gossamer.weights") / "kernels"
        names = ("fragment_prelude.cu", self.file, "fragment_linear.cu")
        return "".join((folder / name).read_text(encoding="utf-8") for name in names)


@dataclass(frozen=True)
class FragmentPlan:
    """A variant of the kernel and its launch.

    strips: strips of 16 rows a warp multiplies at once. stages: records in flight a warp. warps: of a block.
    splits: shares of the columns, each summed apart and added by a second kernel. chunk: tiles of x that a block holds.
    """

    strips: int
    stages: int
    warps: int
    splits: int
    chunk: int

    def x_bytes(self, tiles: int, n: int) -> int:
        """Shared memory for x: two chunks in turn, or one if there is but one."""
        split = -(-tiles // self.splits)
        return (1 if self.chunk >= split else 2) * min(self.chunk, split) * _TILE_BYTES * _blocks(n)

    def shared_bytes(self, weight: FragmentWeight, n: int) -> int:
        """Shared memory of a block."""
        stage = self.strips * _slot_bytes(weight) + 16
        return self.x_bytes(weight.tiles, n) + self.warps * self.stages * stage


def macros(plan: FragmentPlan, n: int, weight: FragmentWeight) -> dict[str, int]:
    """What the source is compiled with."""
    return {
        "BLOCKS": _blocks(n), "STRIPS": plan.strips, "STAGES": plan.stages,
        "BFLOAT16": int(weight.dtype == torch.bfloat16),
    }  # fmt: skip


def multiply(weight: FragmentWeight, x: Tensor, plan: FragmentPlan | None = None, early: bool = True) -> Tensor:
    """``x @ W.T`` for ``x`` of shape ``(n, in)``, n up to ``MAX_N``, with the dtype and on the GPU of the weight.

    The same bits come out every time: sums are taken in a fixed order. plan: the best known one if not given. early:
    fetch weights while the product before on this stream still ends; False shows what that is worth.
    """
    n, rows = x.shape[0], weight.shape[0]
    plan = plan or best_plan(weight, n)
    padding = weight.padded_columns - x.shape[1]
    x = torch.nn.functional.pad(x, (0, padding)) if padding else x.contiguous()
    if x.data_ptr() % 16:  # a slice of something larger; the kernel copies 16 bytes at a time
        x = x.clone()
    y = torch.empty((n, rows), dtype=x.dtype, device=x.device)
    partial = torch.empty((plan.splits, n, rows) if plan.splits > 1 else 0, dtype=torch.float32, device=x.device)
    linear, add = _kernels(weight.decoder.file, tuple(macros(plan, n, weight).items()), x.device.index or 0)
    linear.launch(
        (-(-weight.strips // (plan.strips * plan.warps)), plan.splits), 32 * plan.warps,
        weight.records, weight.offsets, x, y, partial, n, rows, weight.strips, weight.tiles,
        -(-weight.tiles // plan.splits), plan.chunk, plan.x_bytes(weight.tiles, n), _slot_bytes(weight), weight.constant,
        shared_bytes=plan.shared_bytes(weight, n), early=early,
    )  # fmt: skip
    if plan.splits > 1:
        add.launch(-(-y.numel() // _ADD_THREADS), _ADD_THREADS, partial, y, y.numel(), plan.splits, early=early)
    return y


def candidates(weight: FragmentWeight, n: int) -> list[FragmentPlan]:
    """Plans that fit, most promising first: multiprocessors evenly busy, with many warps, few splits."""
    scored = []
    for values in product((1, 2), (2, 3), (5, 7, 8, 10, 14, 16), (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 16), (4, 8, 16)):
        plan = FragmentPlan(*values)
        split = -(-weight.tiles // plan.splits)
        if (plan.splits - 1) * split >= weight.tiles or plan.chunk > max(4, 1.5 * split):
            continue
        threads = 32 * plan.warps
        resident = min(
            _SHARED_BYTES // (plan.shared_bytes(weight, n) + 1024),
            _WARPS // plan.warps,
            _REGISTERS // (threads * weight.decoder.registers[_blocks(n)][plan.strips - 1]),
        )
        if resident:
            scored.append((_promise(weight, n, plan, split, resident), plan))
    scored.sort(key=lambda entry: -entry[0])
    return [plan for _, plan in scored[:_MEASURED]]


def best_plan(weight: FragmentWeight, n: int) -> FragmentPlan:
    """The plan for this shape, density and number of rows: measured once on this GPU, then read from a table on disk.

    Nothing is measured while a CUDA graph is being captured: the most promising candidate serves then.
    """
    table = _table(torch.cuda.get_device_name(weight.records.device))
    key = _key(weight, n)
    if key not in table:
        plans = candidates(weight, n)
        if torch.cuda.is_current_stream_capturing():
            return plans[0]
        table[key] = asdict(_fastest(weight, n, plans))
        with contextlib.suppress(OSError):  # a read-only home costs only the measuring, next time again
            write_json(_table_path(torch.cuda.get_device_name(weight.records.device)), table)
    plan = FragmentPlan(**table[key])
    fits = plan.shared_bytes(weight, n) <= _SHARED_BYTES
    return plan if fits else candidates(weight, n)[0]


def fastest_way(weight: FragmentWeight, n: int) -> str:
    """``"compressed"`` if that multiplies ``n`` rows clearly faster than dense, else the dense library to take.

    The libraries are ``"cublas"`` and ``"cublaslt"``, as :func:`dense_linear` names them.

    Measured once on this GPU, the dense product by both libraries. A layer that mostly has to serve rows for which
    dense is faster should be kept dense: to decode it every time costs far more.
    """
    gpu = torch.cuda.get_device_name(weight.records.device)
    table, key = _table(gpu), f"way for {n} of {_key(weight, n)}"
    if key not in table:
        seconds = _race_dense(weight, n)
        dense = min(("cublas", "cublaslt"), key=seconds.__getitem__)
        table[key] = "compressed" if seconds["compressed"] * _MARGIN < seconds[dense] else dense
        with contextlib.suppress(OSError):
            write_json(_table_path(gpu), table)
    return str(table[key])


def dense_linear(x: Tensor, weight: Tensor, library: str) -> Tensor:
    """``F.linear`` by a library of choice: ``"cublas"`` or ``"cublaslt"``."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        return torch.nn.functional.linear(x, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _race_dense(weight: FragmentWeight, n: int) -> dict[str, float]:
    """Seconds of each way."""
    x = _activations(weight, n)
    first = weight.to_dense()
    dense = [first, *(first.clone() for _ in range(1 + _L2_FACTOR * _l2_bytes(weight) // weight.dense_nbytes))]
    libraries = {name: [partial(dense_linear, x, copy, name) for copy in dense] for name in ("cublas", "cublaslt")}
    bench = Bench(samples=7)
    with bench.cuda_graphs():
        row = bench.compare("", [partial(multiply, copy, x) for copy in _past_l2(weight)], libraries)
    assert row.peer is not None
    return {"compressed": row.ours, row.peer_name: row.peer, **row.others}


def _activations(weight: FragmentWeight, n: int) -> Tensor:
    device = weight.records.device
    generator = torch.Generator(device).manual_seed(0)  # torch's own stays as it is
    return torch.randn(n, weight.shape[1], device=device, generator=generator).to(weight.dtype)


def _past_l2(weight: FragmentWeight) -> list[FragmentWeight]:
    """Copies that exceed the L2 cache four times over."""
    return [weight, *(weight.clone() for _ in range(1 + _L2_FACTOR * _l2_bytes(weight) // weight.nbytes))]


def _l2_bytes(weight: FragmentWeight) -> int:
    return int(torch.cuda.get_device_properties(weight.records.device).L2_cache_size)


def _key(weight: FragmentWeight, n: int) -> str:
    """Weights of one shape and, to a twentieth, one size share a plan."""
    size = round(20 * weight.nbytes / weight.dense_nbytes) / 20
    return f"{weight.name} {weight.shape[0]}x{weight.shape[1]} n{8 * _blocks(n)} size {size:.2f}"


def _fastest(weight: FragmentWeight, n: int, plans: list[FragmentPlan]) -> FragmentPlan:
    """By the clock."""
    copies, x = _past_l2(weight), _activations(weight, n)
    quick, careful = Bench(samples=3, sample_seconds=1e-4), Bench(samples=9)
    for bench in (quick, careful):
        with bench.cuda_graphs():
            times = {
                plan: median(bench.seconds([partial(multiply, copy, x, plan) for copy in copies])) for plan in plans
            }
        plans = sorted(plans, key=times.__getitem__)[:_FINALISTS]
    return plans[0]


def _promise(weight: FragmentWeight, n: int, plan: FragmentPlan, split: int, resident: int) -> float:
    blocks = -(-weight.strips // (plan.strips * plan.warps)) * plan.splits
    rounds = blocks / (_SMS * resident)
    share = -(-blocks // _SMS) if rounds <= 1 else resident
    busy = blocks / (_SMS * share) if rounds <= 1 else rounds / math.ceil(rounds)
    hidden = min(1.0, 0.55 + 0.45 * plan.warps * share / 28)
    return busy * hidden * weight.tiles / (split * plan.splits) * (1 - 0.004 * plan.splits * n / 8)


def _slot_bytes(weight: FragmentWeight) -> int:
    """Room for one record in shared memory; a pair's second load may read two bytes past the last value."""
    return 16 * weight.longest + 16


def _blocks(n: int) -> int:
    """The kernel's tile of activations, in eights: 1, 2 or 4."""
    return 1 << max(0, (-(-n // 8) - 1).bit_length())


@cache
def _kernels(decoder: str, chosen: tuple[tuple[str, int], ...], device: int) -> tuple[Kernel, Kernel]:
    text = Decoder(decoder, {}).source()
    return load_kernel(text, "fragment_linear", chosen, device), load_kernel(text, "add_splits", chosen, device)


@cache
def _table(gpu: str) -> dict[str, Any]:
    try:
        return dict(json.loads(_table_path(gpu).read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def _table_path(gpu: str) -> Path:
    return cache_dir() / f"fragments-{gpu.lower().replace(' ', '-')}-v{_TABLE_VERSION}.json"
