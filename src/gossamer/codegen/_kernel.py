"""What a micro-kernel is to do, as a small value: everything that the generated code depends on.

A kernel computes a strip of C that is ``vectors`` registers wide, tile after tile of ``rows`` rows, over a depth that is
given when it is called::

          b: vectors registers                      for every tile of rows:
         +-----+-----+                                acc = zero of the semiring
    a  --| acc | acc |                                for k: acc[i, v] = acc[i, v] (+) a[i, k] (x) b[k, v]
    rows | acc | acc |                                c[i, v] = activation(acc[i, v] + bias[v])
         +-----+-----+
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gossamer.codegen._targets import ELEMENT_BYTES, Target

Semiring = Literal["plus_times", "min_plus", "max_min"]
Update = Literal["store", "accumulate", "scale"]
Activation = Literal["none", "relu", "elu"]

SEMIRINGS = ("plus_times", "min_plus", "max_min")
UPDATES = ("store", "accumulate", "scale")
ACTIVATIONS = ("none", "relu", "elu")
DYNAMIC_EDGE = -1


@dataclass(frozen=True)
class MicroKernel:
    """One generated function.

    rows, vectors: the register tile. element: "f32", "f64", "i32" (semirings of minima only).
    semiring: "plus_times", "min_plus" (sums, then minima; int32 infinity is 2**30 - 1) or "max_min" (on 0 and 1: or-and).
    edge: columns in the last vector; 0 where it is full, ``DYNAMIC_EDGE`` where the call says it (x86 and SVE; on AVX2
        stores under such masks are slow).
    update: "store" (C is overwritten, never read), "accumulate" (C (+) product), "scale" (alpha * product + beta * C).
    bias, activation: applied last. padded_b: rows of B may be read to the end of the last vector.
    b_element: "bf16" where a packed B holds bfloat16. unroll: steps of the inner loop; 0 leaves it to :meth:`steps`.
    prefetch: bytes ahead of the current row of B to ask for, for a B that streams from beyond the second cache.
    """

    rows: int
    vectors: int
    element: str = "f32"
    semiring: Semiring = "plus_times"
    edge: int = 0
    update: Update = "store"
    bias: bool = False
    activation: Activation = "none"
    padded_b: bool = False
    b_element: str = ""
    unroll: int = 0
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.vectors < 1:
            raise ValueError(f"rows and vectors must be at least 1, got {self.rows} and {self.vectors}")
        if self.element not in ELEMENT_BYTES:
            raise ValueError(f"element must be one of {', '.join(ELEMENT_BYTES)}, got {self.element!r}")
        for name, value, known in (
            ("semiring", self.semiring, SEMIRINGS),
            ("update", self.update, UPDATES),
            ("activation", self.activation, ACTIVATIONS),
            ("b_element", self.b_element, ("", "bf16")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        if self.semiring == "plus_times" and self.element == "i32":
            raise ValueError("element i32 is for semirings min_plus and max_min; plus_times takes f32 and f64")
        arithmetic = self.bias or self.activation != "none" or self.update == "scale"
        if self.semiring != "plus_times" and arithmetic:
            raise ValueError(f"bias, activation and scale need semiring plus_times, got {self.semiring!r}")
        if self.activation == "elu" and self.element != "f32":
            raise ValueError(f"activation elu needs element f32, got {self.element!r}")
        if self.b_element and (self.element != "f32" or not self.padded_b):
            raise ValueError("b_element bf16 needs element f32 and padded_b")
        if self.unroll < 0 or self.rows * self.vectors * self.unroll > 2000:
            raise ValueError(f"unroll must be from 0 to {2000 // (self.rows * self.vectors)}, got {self.unroll}")

    def steps(self) -> int:
        """Steps of the inner loop: 4, or 1 for tall tiles, whose addresses of several steps would fill the registers."""
        tall = self.rows > 6 or (self.rows == 6 and self.semiring != "plus_times")
        return self.unroll or (1 if tall else 4)

    def check(self, target: Target) -> None:
        """Raise ``ValueError`` if ``target`` cannot hold the tile in registers or cut its edge."""
        needed = self.registers(target)
        if needed > target.registers:
            raise ValueError(
                f"a tile of {self.rows} rows and {self.vectors} vectors needs {needed} registers; "
                f"{target.name} has {target.registers}"
            )
        lanes = target.lanes(self.element)
        lowest = DYNAMIC_EDGE if target.masks or target.triple.startswith("x86") else 0
        if not lowest <= self.edge < lanes or (target.scalable and self.edge > 0):
            raise ValueError(f"edge must be from {lowest} to {lanes - 1} for {target.name}, got {self.edge}")

    def by_element(self, target: Target) -> bool:
        """Whether A is read four steps at a time: no processor adds or compares by an element, only multiplies."""
        return target.by_element and self.semiring == "plus_times" and self.element == "f32"

    def registers(self, target: Target) -> int:
        """Vector registers in use at once: accumulators, operands of one step, and what the semiring computes."""
        held = self.rows if self.by_element(target) else min(self.rows, self.vectors)
        streamed = self.vectors if self.by_element(target) else 1
        temporary = 0 if self.semiring == "plus_times" else 1
        return self.rows * self.vectors + held + streamed + temporary

    def rotating_registers(self, target: Target) -> int:
        """Registers in use where every register of B is loaded again right after its last use."""
        held = self.rows if self.by_element(target) or self.vectors > self.rows else 1
        return self.rows * self.vectors + self.vectors + held + (self.semiring != "plus_times")

    @property
    def name(self) -> str:
        """A symbol that names the tile."""
        edge = "" if not self.edge else "_masked" if self.edge == DYNAMIC_EDGE else f"_edge{self.edge}"
        return f"{self.semiring}_{self.element}_{self.rows}x{self.vectors}{edge}_{self.update}"
