"""Processors that kernels are generated for: vector width, registers, and how edges are cut off.

The host is described by what LLVM finds on it; the others can be emitted anywhere, because LLVM's back ends travel with
llvmlite. No inline assembly is ever used: for a foreign target LLVM would abort the process.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import cache

from gossamer.core.hardware import cpu_features

ELEMENT_BYTES = {"f32": 4, "f64": 8, "i32": 4}


@dataclass(frozen=True)
class Target:
    """One processor as a kernel generator sees it.

    vector_bytes: of one register; of the smallest one where ``scalable``. registers: how many.
    masks: edges of any length by predicate registers; otherwise every edge length has a kernel of its own.
    by_element: multiply-adds can take one element of a register, so rows of A are loaded four steps at a time.
    fma_ports, load_ports, fma_latency, issue: instructions a cycle and cycles, for the performance model.
    """

    name: str
    triple: str
    cpu: str
    features: str
    vector_bytes: int
    registers: int
    masks: bool
    by_element: bool = False
    scalable: bool = False
    fma_ports: int = 2
    load_ports: float = 2.0
    fma_latency: int = 4
    issue: int = 6

    def lanes(self, element: str = "f32") -> int:
        """Numbers in one register (in the smallest one where the width is not fixed).

        >>> named_target("x86-avx2").lanes("f64")
        4
        """
        return self.vector_bytes // ELEMENT_BYTES[element]


_LINUX_X86, _LINUX_ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

_TARGETS = {
    "x86-avx512": Target("x86-avx512", _LINUX_X86, "skylake-avx512", "", 64, 32, masks=True),
    # Loads: what tall tiles, which read A from rows far apart, were measured to get on a Zen 3.
    "x86-avx2": Target("x86-avx2", _LINUX_X86, "haswell", "", 32, 16, masks=False, load_ports=1.4),
    "aarch64-neon": Target("aarch64-neon", _LINUX_ARM, "generic", "+neon", 16, 32, False, by_element=True),
    "aarch64-sve": Target("aarch64-sve", _LINUX_ARM, "generic", "+sve", 16, 32, True, by_element=True, scalable=True),
}
TARGET_NAMES = (*_TARGETS, "host")


def named_target(name: str) -> Target:
    """One of ``x86-avx512``, ``x86-avx2``, ``aarch64-neon``, ``aarch64-sve``, ``host``.

    Raises:
        ValueError: the name is none of these, or the host is a processor without FMA vectors.

    >>> named_target("aarch64-neon").registers
    32
    """
    if name == "host":
        return host_target()
    if name not in _TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGET_NAMES)}, got {name!r}")
    return _TARGETS[name]


@cache
def host_target(features: frozenset[str] | None = None) -> Target:
    """This machine, or this machine with nothing but ``features`` (LLVM's names), for testing the path of a lesser one.

    Raises:
        RuntimeError: the processor has neither AVX2 with FMA nor NEON.
    """
    from llvmlite import binding

    present = cpu_features() if features is None else features
    machine = platform.machine().lower()
    cpu, triple = binding.get_host_cpu_name(), binding.get_default_triple()
    if machine in ("x86_64", "amd64") and {"avx2", "fma"} <= present:
        wide = {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= present
        form = _TARGETS["x86-avx512" if wide else "x86-avx2"]
        spelled = ",".join(f"+{name}" for name in sorted(present))
        if features is not None or not wide:
            cpu = form.cpu  # a lesser processor's name, so that LLVM does not add what was left out
            spelled = "" if not wide else spelled
        return replace(form, name=f"host:{form.name}", triple=triple, cpu=cpu, features=spelled)
    if machine in ("aarch64", "arm64"):
        form = _TARGETS["aarch64-neon"]
        return replace(form, name="host:aarch64-neon", triple=triple, cpu=cpu)
    raise RuntimeError(
        f"generated kernels need AVX2 with FMA, AVX-512 or NEON; this processor ({machine}, {cpu}) has none of them"
    )
