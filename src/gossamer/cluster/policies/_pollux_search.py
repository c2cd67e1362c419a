"""The genetic search of Pollux over allocation matrices, compiled: a day's trace holds a thousand rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray


def search(
    base: NDArray,
    seeds: NDArray,
    speedup: NDArray,
    keep: NDArray,
    limits: NDArray,
    per_node: int,
    population: int,
    generations: int,
    seed: int,
) -> NDArray:
    """Allocations ``(population, jobs, nodes)``, best first.

    base: the present allocation. seeds: where to begin. speedup: ``(jobs, nodes + 1, gpus + 1)``. keep: what is left
    of a job's speed-up when it is moved. limits: most GPUs of each job.
    """
    return _search(base, seeds, speedup, keep, limits, per_node, population, generations, seed % (1 << 32))


@njit(cache=True)
def _search(
    base: NDArray, seeds: NDArray, speedup: NDArray, keep: NDArray, limits: NDArray, per_node: int,
    population: int, generations: int, seed: int,
) -> NDArray:  # fmt: skip
    np.random.seed(seed)
    jobs, nodes = base.shape
    pool = np.zeros((2 * population, jobs, nodes), dtype=np.int64)
    value = np.empty(2 * population)
    for i in range(population):
        pool[i] = seeds[i % len(seeds)]
        if i >= len(seeds):
            _mutate(pool[i], base, per_node)
        _repair(pool[i], limits, per_node)
        value[i] = _fitness(pool[i], base, speedup, keep)
    for _ in range(generations):
        for i in range(population, 2 * population, 2):
            a, b = _tournament(value, population), _tournament(value, population)
            cut = np.random.randint(jobs)
            for child, first, second in ((i, a, b), (min(i + 1, 2 * population - 1), b, a)):
                pool[child, :cut] = pool[first, :cut]
                pool[child, cut:] = pool[second, cut:]
                _mutate(pool[child], base, per_node)
                _repair(pool[child], limits, per_node)
                value[child] = _fitness(pool[child], base, speedup, keep)
        order = np.argsort(-value)
        pool, value = pool[order], value[order]
        for i in range(1, population):  # a copy is worth nothing: it makes way for something new
            if value[i] == value[i - 1] and (pool[i] == pool[i - 1]).all():
                value[i] = -1.0
    order = np.argsort(-value)
    return pool[order[:population]]


@njit(cache=True)
def _tournament(value: NDArray, population: int) -> int:
    a, b = np.random.randint(population), np.random.randint(population)
    return a if value[a] >= value[b] else b


@njit(cache=True)
def _fitness(state: NDArray, base: NDArray, speedup: NDArray, keep: NDArray) -> float:
    """Power mean, with exponent -1, of the jobs' speed-ups."""
    total = 0.0
    for job in range(len(state)):
        on, gpus, moved = 0, 0, False
        for node in range(state.shape[1]):
            count = state[job, node]
            on += count > 0
            gpus += count
            moved |= count != base[job, node]
        total += 1.0 / (speedup[job, on, gpus] * (keep[job] if moved else 1.0) + 1e-3)
    return len(state) / total


@njit(cache=True)
def _mutate(state: NDArray, base: NDArray, per_node: int) -> None:
    """Reset some jobs, thin some out, and give more to some: about one change among free and one among used GPUs."""
    jobs, nodes = state.shape
    used = np.zeros(nodes, dtype=np.int64)
    for job in range(jobs):
        if np.random.random() < 0.1:
            state[job] = base[job]
        if np.random.random() < 0.1:
            for node in range(nodes):
                if np.random.random() < 0.1:
                    state[job, node] = 0
        used += state[job]
    open_nodes = (used < per_node).sum()
    for job in range(jobs):
        held = 0
        for node in range(nodes):
            held += used[node] < per_node and state[job, node] > 0
        for node in range(nodes):
            if used[node] >= per_node:
                continue
            anew = 1.0 / open_nodes
            more = 1.0 / held if state[job, node] > 0 else 0.0
            if np.random.random() < anew + more - anew * more:
                state[job, node] = np.random.randint(state[job, node], per_node + 1)


@njit(cache=True)
def _repair(state: NDArray, limits: NDArray, per_node: int) -> None:
    """Cut down to what is allowed: one job that spans nodes per node, each job's limit, each node's GPUs."""
    jobs, nodes = state.shape
    taken = np.zeros(nodes, dtype=np.bool_)
    room = np.full(nodes, per_node)
    for job in range(jobs):
        spans = (state[job] > 0).sum() > 1
        left = limits[job]
        for node in np.random.permutation(nodes):
            if state[job, node] == 0:
                continue
            if spans:
                if taken[node]:
                    state[job, node] = 0
                    continue
                taken[node] = True
            count = min(state[job, node], left, room[node])
            state[job, node] = count
            left -= count
            room[node] -= count
