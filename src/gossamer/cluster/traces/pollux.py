"""The workloads of Pollux (Qiao et al., OSDI 2021): 160 or 240 jobs of six measured applications on 64 GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gossamer.cluster._applications import EPOCHS, Application
from gossamer.cluster._cluster import Cluster
from gossamer.cluster._jobs import Job, Profile
from gossamer.cluster._step_time import StepTime
from gossamer.cluster.traces._rows import csv_rows

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")

GAVEL_MODELS: Mapping[str, str] = {
    "bert": "Transformer",
    "cifar10": "ResNet-18",
    "ncf": "Recommendation",
    "imagenet": "ResNet-50",
    "deepspeech2": "LM",
    "yolov3": "CycleGAN",
}
"""The model in Gavel's interference table that stands for each application: the same network or the same kind."""


def read_applications(folder: str | os.PathLike[str]) -> dict[str, Application]:
    """The six measured applications from a folder with one folder each; errors as :meth:`Application.read`."""
    return {name: Application.read(Path(folder) / name) for name in EPOCHS}


def read_pollux(
    path: str | os.PathLike[str], applications: Mapping[str, Application], cluster: Cluster, elastic: bool
) -> list[Job]:
    """Read a ``workload-N.csv``: one job a row.

    elastic: jobs whose GPUs and batch a policy may change (Pollux, Optimus), or that report their goodput epoch by
        epoch (Tiresias, as published); else rigid gangs with a fixed length and a profile, for policies that share.

    Raises:
        ValueError: by line: an unknown or missing column, an application that was not measured, a bad number.
    """
    jobs, known = [], {}
    for row in csv_rows(path, COLUMNS):
        app = applications.get(row.text("application"))
        if app is None:
            raise row.error(f"application must be one of {', '.join(applications)}, got {row.text('application')!r}")
        gpus, batch = row.whole("num_replicas", 1), row.whole("batch_size", 1)
        key = app.name, gpus, batch
        if key not in known:
            known[key] = app.duration(batch, cluster.packed(gpus)), None if elastic else rigid_profile(app, gpus, batch)
        duration, profile = known[key]
        jobs.append(
            Job(
                row.text("name"), row.number("time", 0), gpus, duration, profile,
                application=app if elastic else None, batch=batch,
            )
        )  # fmt: skip
    return jobs


def rigid_profile(app: Application, gpus: int, batch: int) -> Profile:
    """What an application looks like to policies that share: its fitted step time at one local batch.

    Memory is not in the measurements; which loads do not fit on one GPU is in the interference table.
    """
    measured = [
        (len(placement), sum(placement), local, step - sync, step)
        for placement, times in app.placements.items()
        for local, step, sync in zip(*times, strict=True)
    ]
    nodes, replicas, locals_, compute, steps = zip(*measured, strict=True)
    step_time = StepTime.fit(nodes, replicas, locals_, compute, steps)
    return Profile(GAVEL_MODELS.get(app.name, app.name), step_time, app.split(batch, gpus)[0])
