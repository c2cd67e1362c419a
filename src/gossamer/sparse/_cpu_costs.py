"""What each way to a product costs on a CPU, as data: seconds per unit of work, measured on one machine.

The coefficients only tell which ways are worth a closer look: where two come out within the planner's margin of each
other, it times them. They were fitted on a Zen 3 core (AVX2) in float32; a machine where they are wrong is timed more
often, and misled only where a ratio is off by more than that margin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Seconds of one way on one thread: ``call + nnz * (entry + product * n) + m * k * (cell + dense * n)``;

    in float64 ``product`` counts ``wide`` times.
    """

    call: float
    entry: float = 0.0
    product: float = 0.0
    cell: float = 0.0
    dense: float = 0.0
    wide: float = 1.0

    def seconds(self, shape: tuple[int, int], nnz: int, n: int, threads: int, wide: bool = False) -> float:
        """Predicted seconds of a product with ``n`` columns; ``wide``: in float64."""
        product = self.product * (self.wide if wide else 1.0)
        work = nnz * (self.entry + product * n) + shape[0] * shape[1] * (self.cell + self.dense * n)
        return self.call + work / threads


COSTS = {
    "rows": Cost(call=2.5e-5, entry=1.2e-9, product=1.2e-10, wide=2.0),
    "torch": Cost(call=1.4e-5, entry=1.0e-9, product=4.0e-10),
    "scipy": Cost(call=2.0e-5, entry=1.0e-9, product=4.5e-10),
    "dense": Cost(call=6.0e-6, cell=6.0e-10, dense=4.0e-11),
}
"""By the planner's names of the ways."""
