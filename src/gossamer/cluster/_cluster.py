"""A cluster of equal nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines with ``gpus_per_node`` GPUs of ``gpu_memory`` MiB each.

    idle_watts, busy_watts: power of a GPU without and with a job, for energy reports.

    Raises:
        ValueError: a count or the memory is not positive, or a power is negative.

    >>> Cluster(nodes=16, gpus_per_node=4).gpus
    64
    """

    nodes: int
    gpus_per_node: int
    gpu_memory: float = 16_384.0
    idle_watts: float = 40.0
    busy_watts: float = 250.0

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "gpu_memory"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("idle_watts", "busy_watts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def node(self, gpu: int) -> int:
        """The node of a GPU; GPUs are numbered node by node."""
        return gpu // self.gpus_per_node

    def packed(self, gpus: int) -> tuple[int, ...]:
        """GPUs on each node where ``gpus`` of them stand on as few nodes as possible.

        >>> Cluster(4, 4).packed(6)
        (4, 2)
        """
        full, rest = divmod(gpus, self.gpus_per_node)
        return (self.gpus_per_node,) * full + ((rest,) if rest else ())
