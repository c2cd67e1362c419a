"""What this machine has, and how fast it can go at most.

Features decide which kernel runs; kernels also take them as an argument, so that the path of a lesser machine can be
tested on a better one. The ceilings (copying memory, multiply-adds) are measured once and remembered on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from gossamer.core.files import write_json

_COPY_BYTES = 1 << 28
_FMA_CHAINS = 10
_FMA_STEPS = 1_000_000


@dataclass(frozen=True)
class Hardware:
    """One machine, as far as kernels and records care.

    cpu: model name. isa: family label such as "zen3" or "sapphirerapids". cores: usable by this process.
    memory_bytes: physical memory. llc_bytes: last-level cache that one core can use. gpu: model name or None.
    """

    cpu: str
    isa: str
    cores: int
    memory_bytes: int
    llc_bytes: int
    gpu: str | None

    @property
    def slug(self) -> str:
        """A file name for this machine's records, like "amd-epyc-zen3-2c" or "...-nvidia-h200"."""
        words = f"{_brand(self.cpu)} {self.isa} {self.cores}c {self.gpu or ''}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


@lru_cache(maxsize=1)
def hardware() -> Hardware:
    """This machine.

    >>> hardware().cores >= 1 and hardware().llc_bytes > 0
    True
    """
    from llvmlite import binding

    isa = re.sub(r"^znver", "zen", binding.get_host_cpu_name())
    return Hardware(_cpu_name(), isa, usable_cores(), _memory_bytes(), _llc_bytes(), _gpu_name())


def usable_cores() -> int:
    """Cores that this process may run on (affinity and container masks respected)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """Instruction sets that compiled kernels may use, by LLVM's names ("avx2", "fma", "avx512vbmi2", "neon", ...).

    Where numba is told to build for a lesser processor (its ``NUMBA_CPU_FEATURES``), only what that one has.

    >>> cpu_features() <= cpu_features() | {"avx2"}
    True
    """
    from llvmlite import binding
    from numba import config

    wanted = getattr(config, "CPU_FEATURES", None)
    if wanted is not None:
        return frozenset(name[1:] for name in wanted.split(",") if name.startswith("+"))
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def cache_dir() -> Path:
    """The folder for what can be computed again: ``gossamer`` inside the user's cache folder. Created if missing.

    >>> cache_dir().name
    'gossamer'
    """
    home = Path.home()
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        root = home / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    folder = root / "gossamer"
    with contextlib.suppress(OSError):  # a read-only home: those who write there cope with that
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def copy_bandwidth(threads: int = 1) -> float:
    """Bytes read and written per second by a plain copy of memory far beyond the caches, in GB/s."""
    return _remembered(f"copy-t{threads}", lambda: _measure_copy(threads))


def fma_peak(threads: int = 1) -> float:
    """Single-precision multiply-adds on registers, in GFLOP/s (two operations each)."""
    return _remembered(f"fma-t{threads}", lambda: _measure_fma(threads))


def _measure_copy(threads: int) -> float:
    import numpy as np

    share = _COPY_BYTES // threads
    pairs = [(np.ones(share, np.uint8), np.empty(share, np.uint8)) for _ in range(threads)]
    work: list[Callable[[], object]] = [partial(np.copyto, target, source) for source, target in pairs]
    return 2 * share * threads / _best_seconds(work) / 1e9


def _measure_fma(threads: int) -> float:
    from gossamer.core.jit import LANES, fma_chains

    work = [lambda: fma_chains(_FMA_STEPS)] * threads
    return 2.0 * LANES * _FMA_CHAINS * _FMA_STEPS * threads / _best_seconds(work) / 1e9


def _best_seconds(work: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Shortest time in which all of ``work``, one thread each, was done."""
    best = float("inf")
    for number in range(rounds + 1):
        others = [threading.Thread(target=job) for job in work[1:]]
        start = time.perf_counter()
        for thread in others:
            thread.start()
        work[0]()
        for thread in others:
            thread.join()
        if number:  # the first round warms up
            best = min(best, time.perf_counter() - start)
    return best


def _remembered(question: str, answer: Callable[[], float]) -> float:
    path = cache_dir() / f"ceilings-{hardware().slug}.json"
    known: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    if question not in known:
        known[question] = answer()
        with contextlib.suppress(OSError):
            write_json(path, known)
    return known[question]


def _cpu_name() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _brand(cpu: str) -> str:
    """The first words of a processor's name, without trade marks, frequencies and core counts."""
    plain = re.sub(r"\(.*?\)|@.*|\d+-Core|Processor|CPU", " ", cpu)
    return " ".join(plain.split()[:4])


def _memory_bytes() -> int:
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _llc_bytes() -> int:
    """Size of the largest cache of the first processor; 32 MiB where the system does not say."""
    sizes = [_text(str(path)).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=32 << 20)


def _gpu_name() -> str | None:
    """The first NVIDIA device's model, asked of the driver's own tool so that no framework is loaded for it."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    names = answer.stdout.split("\n")
    return names[0].strip() or None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
