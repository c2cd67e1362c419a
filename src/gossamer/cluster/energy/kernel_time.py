"""Time of a GPU kernel at any core and memory clock, from the counters of one profile.

One SM works through rounds of N resident warps. A round costs the larger of what its instructions take and of what its
memory traffic takes, plus one cold miss; with too few warps latencies are not hidden and count themselves. The model
and its constants are those of Wang and Chu (ICPADS 2018) and the extension to four GPUs.

Two sets of rules. ``published`` treats some kernels by name, as the authors' evaluation does. ``generic`` knows no
names and is what to use on kernels of your own.
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Rules = Literal["published", "generic", "texture"]


@dataclass(frozen=True)
class GpuSpec:
    """Constants of one GPU, from micro-benchmarks; latencies and delays in core cycles, clocks in MHz.

    dram_latency: (a, b) of ``a fc / fm + b``. dram_delay: (a, b) of ``(a / fm + b) fc / fm``, per transaction.
    l2, instruction, shared: (latency, delay). double_delay: per double-precision instruction; NaN where unknown.
    texture: (units, delay). sms, cores, warps: SMs, cores used per SM, most warps per SM. few_warps: the occupancy at
    and below which latencies show.
    """

    name: str
    dram_latency: tuple[float, float]
    dram_delay: tuple[float, float]
    l2: tuple[float, float]
    instruction: tuple[float, float]
    shared: tuple[float, float]
    double_delay: float
    texture: tuple[float, float]
    sms: int
    cores: int
    warps: int = 64
    few_warps: float = 0.3


GPUS: dict[str, GpuSpec] = {
    "gtx980": GpuSpec(
        "gtx980", (78.417, 97.62), (805.03, 8.1762), (222, 1.2), (4, 1.0), (28, 1.0), 20, (8, 1.0), 16, 128
    ),
    "gtx1080ti": GpuSpec(
        "gtx1080ti", (178.22, 396.72), (7208.57, 10.0305), (220, 1.3), (4, 1.2), (28, 0.95), 20, (8, 1.4), 28, 128
    ),
    "p100": GpuSpec("p100", (26.73, 266.23), (176.26, 1.8), (263, 1.0), (8, 1.4), (28, 1.0), 1, (4, 2.5), 56, 64),
    "v100": GpuSpec(
        "v100", (26.73, 133.23), (251.26, 2.5), (263, 1.0), (8, 1.0), (28, 1.0), 1, (4, 2.5), 80, 128, few_warps=0.25
    ),
}
"""The four published GPUs. The V100's 128 cores per SM are as published; the chip has 64 for single precision."""

UNSCORED = frozenset({
    "backpropBackward", "binomialOptions", "cfd", "eigenvalues", "gaussian", "srad", "dxtc", "pathfinder",
    "scanScanExclusiveShared", "stereoDisparity",
})  # fmt: skip
"""Kernels of the published tables that the published errors leave out."""


@dataclass(frozen=True)
class KernelCounters:
    """Counters of kernels, one array entry each; totals of a launch unless said otherwise.

    occupancy: achieved, 0 to 1. instructions: per warp. branches: control-flow instructions.

    Raises:
        ValueError: lengths differ, or a count is negative or not a number, or a launch has no warp or no occupancy.
    """

    name: tuple[str, ...]
    warps: NDArray
    occupancy: NDArray
    instructions: NDArray
    l2_reads: NDArray
    l2_writes: NDArray
    dram_reads: NDArray
    dram_writes: NDArray
    shared_loads: NDArray
    shared_stores: NDArray
    texture: NDArray
    double: NDArray
    branches: NDArray

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            values = getattr(self, field.name)
            if len(values) != len(self.name):
                raise ValueError(f"{field.name} must have {len(self.name)} entries, got {len(values)}")
            if not (values >= 0).all():
                row = int((~(values >= 0)).argmax())
                raise ValueError(f"{field.name} must not be negative, got {values[row]} for {self.name[row]}")
        if not ((self.warps > 0) & (self.occupancy > 0)).all():
            raise ValueError("every kernel needs warps and an occupancy above 0")


_NVPROF = {
    "warps": ("warps",),
    "occupancy": ("achieved_occupancy",),
    "instructions": ("inst_per_warp",),
    "l2_reads": ("l2_read_transactions",),
    "l2_writes": ("l2_write_transactions",),
    "dram_reads": ("dram_read_transactions",),
    "dram_writes": ("dram_write_transactions",),
    "shared_loads": ("shared_load_transactions",),
    "shared_stores": ("shared_store_transactions",),
    "texture": ("tex_cache_transactions",),
    "double": ("inst_fp_64",),
    "branches": ("cf_executed",),
}

_NSIGHT = {
    "warps": "smsp__warps_launched.sum",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__average_inst_executed_per_warp.ratio",
    "l2_reads": "lts__t_sectors_op_read.sum",
    "l2_writes": "lts__t_sectors_op_write.sum",
    "dram_reads": "dram__sectors_read.sum",
    "dram_writes": "dram__sectors_write.sum",
    "shared_loads": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared_stores": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "texture": "l1tex__texin_requests.sum",
    "double": "smsp__sass_thread_inst_executed_op_fp64_pred_on.sum",
    "branches": "smsp__inst_executed_op_branch.sum",
}


@dataclass(frozen=True)
class Measurements:
    """Counters with the clocks (MHz) at which kernels ran and the time (ms) that they took."""

    counters: KernelCounters
    core: NDArray
    memory: NDArray
    milliseconds: NDArray

    def __len__(self) -> int:
        return len(self.core)

    def where(self, chosen: NDArray) -> Measurements:
        """The measurements of a mask."""
        columns = [getattr(self.counters, field.name)[chosen] for field in fields(KernelCounters)[1:]]
        names = tuple(name for name, keep in zip(self.counters.name, chosen, strict=True) if keep)
        counters = KernelCounters(names, *columns)
        return Measurements(counters, self.core[chosen], self.memory[chosen], self.milliseconds[chosen])


def read_nvprof(path: str | os.PathLike[str], scored_only: bool = False) -> Measurements:
    """Read a table of nvprof metrics with the columns ``appName, coreF, memF, time/ms`` and the counters.

    scored_only: leave out the kernels that the published errors leave out.

    Raises:
        ValueError: a column is missing or a number cannot be read, by line.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ["appName", "coreF", "memF", "time/ms", *(name for choice in _NVPROF.values() for name in choice)]
    missing = [name for name in names if rows and name not in rows[0]]
    if missing or not rows:
        raise ValueError(f"{path} has no column {', '.join(missing)}" if missing else f"{path} has no rows")
    if scored_only:
        rows = [row for row in rows if row["appName"] not in UNSCORED]

    def column(name: str) -> NDArray:
        try:
            return np.array([float(row[name]) for row in rows])
        except ValueError as error:
            raise ValueError(f"{path}, column {name}: {error}") from None

    counters = {key: np.maximum(column(choice[0]), 0.0) for key, choice in _NVPROF.items()}
    kernels = KernelCounters(tuple(row["appName"] for row in rows), **counters)
    return Measurements(kernels, column("coreF"), column("memF"), column("time/ms"))


def read_nsight(path: str | os.PathLike[str]) -> KernelCounters:
    """Read a wide table of Nsight Compute (``ncu --csv --page raw``): one row a kernel, one column a metric.

    Sectors are 32 bytes, as nvprof's transactions were; occupancy is a percentage there and a share here.

    Raises:
        ValueError: a metric is missing; the message lists what to collect.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("Kernel Name")]
    missing = [metric for metric in _NSIGHT.values() if not rows or metric not in rows[0]]
    if missing:
        raise ValueError(f"{path} lacks metrics; collect them with: ncu --metrics {','.join(missing)}")

    def column(metric: str) -> NDArray:
        return np.array([float(row[metric].replace(",", "")) for row in rows])

    counters = {key: column(metric) for key, metric in _NSIGHT.items()}
    counters["occupancy"] = counters["occupancy"] / 100
    return KernelCounters(tuple(row["Kernel Name"] for row in rows), **counters)


@dataclass(frozen=True)
class Cycles:
    """Cycles of a round, and where they come from: all arrays per kernel.

    rounds: how many rounds an SM works through. bound: 0 memory, 1 SM, 2 latency (too few warps), 3 texture.
    """

    total: NDArray
    memory: NDArray
    sm: NDArray
    rounds: NDArray
    bound: NDArray


BOUNDS = ("memory", "sm", "latency", "texture")


def predict_cycles(
    spec: GpuSpec, counters: KernelCounters, core: ArrayLike, memory: ArrayLike, rules: Rules = "generic"
) -> Cycles:
    """Cycles per round at core clock ``core`` and memory clock ``memory``, in MHz.

    rules: ``"generic"``, no names and no exceptions; ``"texture"``, texture traffic counts as a third bound;
    ``"published"``, the exceptions of the authors' evaluation.
    """
    core, memory = np.asarray(core, dtype=float), np.asarray(memory, dtype=float)
    if not (core > 0).all() or not (memory > 0).all():
        raise ValueError("core and memory clocks must be positive, in MHz")
    ratio = core / memory
    latency = spec.dram_latency[0] * ratio + spec.dram_latency[1]
    delay = (spec.dram_delay[0] / memory + spec.dram_delay[1]) * ratio
    c, warps = counters, counters.warps
    resident = spec.warps * c.occupancy
    loads, stores, shared_loads, shared_stores = (
        column / warps for column in (c.l2_reads, c.l2_writes, c.shared_loads, c.shared_stores)
    )
    traffic = loads + stores
    missed = np.divide(c.dram_reads + c.dram_writes, traffic * warps, out=np.zeros_like(warps), where=traffic > 0)
    missed = np.minimum(missed, 1.0)
    average_latency = (latency + delay) * missed + spec.l2[0] * (1 - missed)
    average_delay = delay * missed + spec.l2[1] * (1 - missed)
    instructions = np.maximum(0.0, c.instructions - (traffic + shared_loads + shared_stores / 4))
    doubles = c.double / (32 * warps)

    t_memory = traffic * average_delay * resident
    t_compute = spec.instruction[1] * instructions * c.occupancy * 32 * spec.warps / spec.cores + spec.instruction[0]
    t_shared = spec.shared[1] * (shared_loads + shared_stores) * resident + spec.shared[0]
    t_sm = t_compute + t_shared + doubles * resident * spec.double_delay
    t_texture = c.texture / warps * resident / spec.texture[0] * spec.texture[1]
    branches = c.branches / (32 * warps) * resident * 16

    names = np.array(c.name)
    cold = np.broadcast_to(latency, t_sm.shape).astype(float)
    if rules == "published":
        t_memory = t_memory + np.where(names == "convolutionTexture", t_texture, 0.0)
        if spec.name != "v100":
            t_sm = t_sm + np.where(names == "reduction", branches, 0.0)
    few = c.occupancy <= spec.few_warps
    own = np.divide(instructions, traffic, out=np.zeros_like(traffic), where=traffic > 0) * spec.instruction[0]
    waits = average_latency + own + average_delay * resident + (own + average_latency) * (traffic - 1) / 4
    hides = own * (resident - 1) + (own + average_latency) * traffic / 4
    total = np.maximum(t_sm, t_memory)
    bound = np.where(t_sm > t_memory, 1, 0)
    if rules == "texture":
        bound = np.where(t_texture > total, 3, bound)
        total = np.maximum(total, t_texture)
    if rules == "published":
        cold = np.where((names == "nn") & (total > 2800), 0.0, cold)  # as published: the miss is hidden
    total = np.where(few, np.maximum(waits, hides), total + cold)
    bound = np.where(few, 2, bound)
    if rules == "published" and spec.name == "v100":
        textured = np.isin(names, ["matrixMulGlobal", "conjugateGradient", "histogram"])
        total = np.where(textured, total + t_texture, total)
        of_one_warp = instructions * spec.instruction[0] + traffic * average_latency / 4
        total = np.where(names == "quasirandomGenerator", of_one_warp, total)
    return Cycles(total, t_memory, t_sm, warps / (resident * spec.sms), bound)


def predict_milliseconds(
    spec: GpuSpec, counters: KernelCounters, core: ArrayLike, memory: ArrayLike, rules: Rules = "generic"
) -> NDArray:
    """Milliseconds of each kernel at the given clocks (MHz)."""
    cycles = predict_cycles(spec, counters, core, memory, rules)
    return cycles.total * cycles.rounds / (np.asarray(core, dtype=float) * 1000)


def mean_error(spec: GpuSpec, measured: Measurements, rules: Rules = "generic") -> float:
    """Mean absolute error of the predicted time in per cent of the measured one."""
    predicted = predict_milliseconds(spec, measured.counters, measured.core, measured.memory, rules)
    return float(100 * np.mean(np.abs(predicted / measured.milliseconds - 1)))
