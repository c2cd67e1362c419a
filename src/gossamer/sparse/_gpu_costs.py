"""What the two engines of a GPU cost, as data: seconds per unit of work of the hybrid's cost model.

Not calibrated for kernels of ours, which are not written yet. The figures follow from times of the best public kernels
on an NVIDIA H200 in one run (float32 CUDA-core and tf32 tensor-core products, N = 128, graphs and a finite-element
matrix): they give the order of magnitude and the break-even of about two entries a vector.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineCosts:
    """Seconds per unit; times of a product with N columns are

    tensor = launch + blocks * N * block + vectors * N * vector, scalar = launch + nnz * N * entry + parts * part,
    together max + (1 - overlap) * min.
    """

    device: str
    launch: float
    block: float
    vector: float
    entry: float
    part: float
    overlap: float
    calibrated: bool

    def tensor(self, blocks: int, vectors: int, n: int) -> float:
        """Seconds of the tensor-core part; 0 where it is empty."""
        return self.launch + n * (blocks * self.block + vectors * self.vector) if blocks else 0.0

    def scalar(self, entries: int, parts: int, n: int) -> float:
        """Seconds of the CUDA-core part; 0 where it is empty."""
        return self.launch + entries * n * self.entry + parts * self.part if entries else 0.0

    def together(self, tensor: float, scalar: float) -> float:
        """Seconds of both, side by side."""
        return max(tensor, scalar) + (1 - self.overlap) * min(tensor, scalar)


H200 = EngineCosts(
    "nvidia-h200", launch=2e-6, block=4e-13, vector=7.5e-13, entry=5.2e-13, part=2e-11, overlap=0.5, calibrated=False
)
