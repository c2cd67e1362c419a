"""The Philly trace (Jeon et al., ATC 2019) in the flattened form that came with Pollux, and busy samples of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np

from gossamer.cluster._jobs import Job, Profile
from gossamer.cluster.traces._rows import csv_rows

COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")

APPLICATIONS_BY_GPU_HOURS: Sequence[tuple[float, tuple[str, ...]]] = (
    (1.0, ("ResNet-18", "Recommendation")),
    (10.0, ("Transformer", "LM")),
    (100.0, ("CycleGAN",)),
    (float("inf"), ("ResNet-50",)),
)
"""Kinds of training by GPU-hours below a bound: the classes of Pollux (OSDI 2021), with the models that Gavel measured."""


def read_philly(path: str | os.PathLike[str]) -> list[Job]:
    """Read ``philly.csv``: one job a row, submission in seconds since the first.

    The published file is not in the order of submission; the jobs given are. ``tenant`` is the virtual cluster.

    Raises:
        ValueError: by line: an unknown or missing column, a time that cannot be read, a duration or number of GPUs
            that is not positive, a GPU time that is not their product.
    """
    jobs = []
    for row in csv_rows(path, COLUMNS):
        try:
            submit = datetime.fromisoformat(row.text("timestamp")).timestamp()
        except ValueError:
            raise row.error(f"timestamp must look like 2017-10-09 07:01:55, got {row.text('timestamp')!r}") from None
        gpus, duration = row.whole("num_gpus", 1), row.number("duration", 0)
        if duration == 0:
            raise row.error("duration must be positive, got 0")
        if abs(row.number("gpu_time", 0) - gpus * duration) > 1:
            raise row.error(f"gpu_time {row.text('gpu_time')} is not num_gpus x duration, {gpus * duration:g}")
        jobs.append(Job(f"philly-{row.line}", submit, gpus, duration, tenant=row.text("cluster")))
    jobs.sort(key=lambda job: job.submit)
    first = jobs[0].submit if jobs else 0.0
    return [replace(job, submit=job.submit - first) for job in jobs]


def busy_sample(
    jobs: Sequence[Job],
    count: int,
    hours: int = 8,
    seed: int = 0,
    shortest: float = 60.0,
    most_gpu_hours: float = 1000.0,
    most_gpus: int = 64,
) -> list[Job]:
    """``count`` jobs drawn without replacement from the busiest hours of the day, put on one day.

    The ``hours`` hours of the day (counted from the trace's first submission) with most submissions over the whole
    trace are taken; a job keeps its time of day, length and gang. Only jobs of at least ``shortest`` seconds, under
    ``most_gpu_hours`` and of at most ``most_gpus`` GPUs are drawn from, as in the workloads of Pollux and SJF-BSBF.

    Raises:
        ValueError: there are fewer such jobs.
    """
    fit = [
        job
        for job in jobs
        if job.duration >= shortest and job.gpus * job.duration < 3600 * most_gpu_hours and job.gpus <= most_gpus
    ]
    by_hour = np.bincount([int(job.submit % 86_400 // 3600) for job in fit], minlength=24)
    first = int(np.argmax([np.take(by_hour, range(hour, hour + hours), mode="wrap").sum() for hour in range(24)]))
    times = [(job.submit - 3600 * first) % 86_400 for job in fit]
    busy = [index for index, time in enumerate(times) if time < 3600 * hours]
    if len(busy) < count:
        raise ValueError(f"count must be at most {len(busy)}, the jobs of the busiest {hours} hours; got {count}")
    drawn = np.random.default_rng(seed).choice(busy, count, replace=False)
    chosen = sorted((times[index], int(index)) for index in drawn)
    return [replace(fit[index], submit=time - chosen[0][0]) for time, index in chosen]


def with_profiles(jobs: Sequence[Job], profiles: Mapping[tuple[str, float], Profile], seed: int = 0) -> list[Job]:
    """Give every job the profile of a model of its class of GPU-hours, with one of its batches drawn at random."""
    rng = np.random.default_rng(seed)
    batches: dict[str, list[Profile]] = {}
    for (model, _), profile in sorted(profiles.items()):
        batches.setdefault(model, []).append(profile)
    given = []
    for job in jobs:
        hours = job.gpus * job.duration / 3600
        models = next(names for bound, names in APPLICATIONS_BY_GPU_HOURS if hours < bound)
        choices = batches[models[rng.integers(len(models))]]
        given.append(replace(job, profile=choices[rng.integers(len(choices))]))
    return given
