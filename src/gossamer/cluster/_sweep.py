"""Many replays at once: policies by seeds, on all processors, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gossamer.cluster._cluster import Cluster
from gossamer.cluster._interference import Interference
from gossamer.cluster._jobs import Job
from gossamer.cluster._simulate import Policy, Result, simulate


def sweep(
    traces: Sequence[Sequence[Job]],
    policies: Sequence[Callable[[], Policy]],
    cluster: Cluster,
    interference: Interference | None = None,
    workers: int = 1,
    ray_address: str | None = None,
    restart_seconds: float = 30.0,
    start_seconds: float = 0.0,
) -> list[list[Result]]:
    """Replay every trace under every policy: one list of results (in the order of policies) per trace.

    policies: makers of fresh policies, like the classes themselves, because a policy remembers.
    workers: processes; with ``ray_address`` tasks of that Ray cluster instead.
    restart_seconds, start_seconds: as :func:`simulate`.

    Raises:
        ValueError: as :func:`simulate`. ModuleNotFoundError: more than one worker needs joblib, Ray needs ray.
    """
    costs = restart_seconds, start_seconds
    pairs = [(trace, policy) for trace in traces for policy in policies]
    if workers == 1 and ray_address is None:
        flat = [simulate(trace, cluster, policy(), interference, *costs) for trace, policy in pairs]
    else:
        flat = list(_parallel(pairs, cluster, interference, workers, ray_address, costs))
    return [flat[begin : begin + len(policies)] for begin in range(0, len(flat), len(policies))]


def _parallel(
    pairs: Iterable[tuple[Sequence[Job], Callable[[], Policy]]],
    cluster: Cluster,
    interference: Interference | None,
    workers: int,
    ray_address: str | None,
    costs: tuple[float, float],
) -> Any:
    from joblib import Parallel, delayed, parallel_config

    tasks = (delayed(simulate)(trace, cluster, policy(), interference, *costs) for trace, policy in pairs)
    if ray_address is None:
        return Parallel(n_jobs=workers)(tasks)
    import ray
    from ray.util.joblib import register_ray

    ray.init(address=ray_address, ignore_reinit_error=True)
    register_ray()
    with parallel_config(backend="ray", n_jobs=-1):
        return Parallel()(tasks)
