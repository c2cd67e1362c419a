"""How long an N:M product takes on a GPU, by a model, and which kernel it picks.

For every block size, packing or not, and split of the inputs, four times are predicted: arithmetic, shared memory to
registers, memory to shared memory, and the weights' own bytes from DRAM. The largest is the candidate's time, since
a pipelined kernel overlaps them (the model of Ma et al., IPDPS 2025, in a form of our own). It knows nothing but sizes
and the device's peaks, so that it can be read, tested and overruled.
"""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.weights._nm_packed import expected_listed
from gossamer.weights._nm_pattern import NMPattern

PACK_BELOW = 0.75
"""Packing is considered where blocks list less than this share of the inputs."""
_SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class NMDevice:
    """Peaks of a device: float32 FLOP/s, bytes/s of DRAM, L2 and all shared memories, seconds of a launch."""

    name: str
    processors: int
    flops: float
    dram: float
    l2: float
    shared: float
    launch: float = 4e-6
    blocks_per_processor: int = 2


H200 = NMDevice("H200", 132, 67e12, 4.3e12, 7e12, 132 * 128 * 1.98e9)
A100 = NMDevice("A100", 108, 19.5e12, 1.5e12, 4e12, 108 * 128 * 1.41e9)


@dataclass(frozen=True)
class NMTile:
    """A block of ``tokens`` x ``outputs``, computed by ``threads`` of ``thread`` (tokens, outputs) sums each."""

    name: str
    tokens: int
    outputs: int
    thread: tuple[int, int]
    threads: int


TILES = (
    NMTile("small", 32, 32, (4, 8), 32),
    NMTile("medium", 32, 64, (4, 8), 64),
    NMTile("large", 64, 64, (8, 8), 64),
    NMTile("huge", 64, 128, (8, 8), 128),
    NMTile("wide", 128, 128, (8, 8), 256),
    NMTile("tall", 256, 128, (16, 8), 256),
)
"""The four classes of the paper, and two for larger products."""


@dataclass(frozen=True)
class NMCandidate:
    """One way to compute the product, and the seconds that each of its limits alone would take."""

    tile: NMTile
    packed: bool
    split: int
    arithmetic: float
    shared: float
    loads: float
    dram: float
    launch: float

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return max(self.arithmetic, self.shared, self.loads, self.dram) + self.launch

    @property
    def bound(self) -> str:
        """What limits it: "arithmetic", "shared", "loads" or "dram"."""
        return max(("arithmetic", "shared", "loads", "dram"), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class NMPlan:
    """The candidates for one product, the chosen one first."""

    shape: tuple[int, int]
    tokens: int
    pattern: NMPattern
    device: NMDevice
    step_windows: int
    candidates: tuple[NMCandidate, ...]

    @property
    def chosen(self) -> NMCandidate:
        """The candidate with the least predicted time."""
        return self.candidates[0]

    @property
    def ideal_speedup(self) -> float:
        """Over a dense product that is bound by the same limit: M/N."""
        return self.pattern.m / self.pattern.n

    def explain(self) -> str:
        """The predicted times of all candidates, a line each, the chosen one first."""
        rows, columns = self.shape
        lines = [f"{self.pattern} {rows}x{columns}, {self.tokens} tokens on {self.device.name} (microseconds)"]
        lines.append(
            f"{'tile':8}{'pack':6}{'split':7}{'total':>9}{'math':>9}{'shared':>9}{'loads':>9}{'dram':>9}  bound"
        )
        for each in self.candidates:
            times = (each.seconds, each.arithmetic, each.shared, each.loads, each.dram)
            shown = "".join(f"{1e6 * time:9.1f}" for time in times)
            lines.append(f"{each.tile.name:8}{'yes' if each.packed else 'no':6}{each.split:<7}{shown}  {each.bound}")
        return "\n".join(lines)


def nm_spmm_model(
    shape: tuple[int, int], tokens: int, pattern: NMPattern, device: NMDevice = H200, item_bytes: int = 4
) -> NMPlan:
    """Plan ``y = x @ W.T`` for an N:M weight ``(out, in)`` and ``x`` ``(tokens, in)``, ``item_bytes`` a number.

    Raises:
        ValueError: a size is not positive.

    >>> nm_spmm_model((4096, 4096), 2048, NMPattern(8, 32)).chosen.tile.name
    'large'
    """
    if min(*shape, tokens) < 1:
        raise ValueError(f"shape and tokens must be positive, got {shape} and {tokens}")
    windows = max(1, (64 if pattern.density <= 0.25 else 32) // pattern.m)
    candidates = [
        _predict(shape, tokens, pattern, device, item_bytes, windows, tile, packed, split)
        for tile in TILES
        if tile.outputs % pattern.vector == 0
        for packed in ((False, True) if expected_listed(pattern, tile.outputs) < PACK_BELOW else (False,))
        for split in _SPLITS
        if split <= -(-pattern.windows(shape[1]) // windows)
    ]
    return NMPlan(shape, tokens, pattern, device, windows, tuple(sorted(candidates, key=lambda each: each.seconds)))


def _predict(
    shape: tuple[int, int], tokens: int, pattern: NMPattern, device: NMDevice, item_bytes: int, windows: int,
    tile: NMTile, packed: bool, split: int,
) -> NMCandidate:  # fmt: skip
    rows, columns = shape
    step, kept = windows * pattern.m, windows * pattern.n
    steps = -(-columns // step)
    blocks = -(-tokens // tile.tokens) * -(-rows // tile.outputs) * split
    at_once = device.processors * device.blocks_per_processor
    rounds = -(-blocks // at_once) * at_once / blocks  # idle places in the last round
    share = min(1.0, blocks * tile.threads / (device.processors * 128))  # 128 threads fill a processor's units
    block_steps = blocks * -(-steps // split) * rounds
    listed = step * expected_listed(pattern, tile.outputs) if packed else step
    lists = kept * tile.outputs // pattern.vector + (4 * step if packed else 0)
    loaded = item_bytes * (tile.tokens * listed + kept * tile.outputs) + lists
    down, across = tile.thread
    read = item_bytes * kept * tile.tokens * tile.outputs * (1 / (4 * down) + 1 / (4 * across))  # lanes share operands
    weight = pattern.kept(columns) * (item_bytes * rows + pattern.groups(rows))
    sums = 4 * tokens * rows * (2 * split if split > 1 else 1)
    return NMCandidate(
        tile,
        packed,
        split,
        arithmetic=2 * tile.tokens * tile.outputs * kept * block_steps / (device.flops * share),
        shared=(read + loaded) * block_steps / (device.shared * share),
        loads=loaded * block_steps / device.l2,
        dram=(weight + item_bytes * tokens * columns + sums) / device.dram,
        launch=device.launch * (2 if split > 1 else 1),
    )
