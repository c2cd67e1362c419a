"""Job traces of other clusters: Helios, Alibaba PAI, Alibaba's GPU sharing of 2023, Muri, Tiresias.

Jobs that ended before they used a GPU are no work to replay; readers keep none of them and say so in their text.
Everything else that does not fit the format is an error with its line.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import datetime

from gossamer.cluster._jobs import Job
from gossamer.cluster.traces._rows import Row, csv_rows


def read_helios(path: str | os.PathLike[str]) -> list[Job]:
    """Read a ``cluster_log.csv`` of Helios (Hu et al., SC 2021). Jobs without GPUs (CPU jobs) are left out."""
    columns = (
        "job_id",
        "user",
        "vc",
        "gpu_num",
        "cpu_num",
        "node_num",
        "state",
        "submit_time",
        "start_time",
        "end_time",
    )
    jobs = []
    for row in csv_rows(path, columns, optional=("jobname", "duration", "queue")):
        gpus = row.whole("gpu_num")
        start, end, submit = (_time(row, row.text(name)) for name in ("start_time", "end_time", "submit_time"))
        if end < start or start < submit:
            raise row.error("needs submit_time <= start_time <= end_time")
        if gpus and end > start:
            jobs.append(Job(row.text("job_id"), submit, gpus, end - start, tenant=row.text("vc")))
    return _from_zero(jobs)


def read_pai(tasks: str | os.PathLike[str]) -> list[Job]:
    """Read ``pai_task_table.csv`` (no header) of Alibaba PAI 2020 (Weng et al., NSDI 2022).

    GPUs are ``inst_num x plan_gpu / 100``, rounded up: PAI shares GPUs by hundredths. Tasks without a GPU, or without
    both times (they never ran, or still did), are left out. The table has starts, not submissions.
    """
    header = (
        "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
        "gpu_type",
    )  # fmt: skip
    jobs = []
    for row in csv_rows(tasks, header, header=header):
        if not (row.text("plan_gpu") and row.text("start_time") and row.text("end_time")):
            continue
        start, end = row.number("start_time", 0), row.number("end_time", 0)
        if end < start:
            raise row.error(f"end_time {end:g} is before start_time {start:g}")
        gpus = -(-row.number("inst_num", 1) * row.number("plan_gpu", 0) // 100)
        if gpus >= 1 and end > start:
            jobs.append(Job(f"{row.text('job_name')}/{row.text('task_name')}", start, int(gpus), end - start))
    return _from_zero(jobs)


def read_alibaba(path: str | os.PathLike[str]) -> list[Job]:
    """Read an ``openb_pod_list*.csv`` of Alibaba 2023 (Weng et al., ATC 2023): pods with fractions of GPUs.

    A fraction counts as one GPU. Pods without GPUs or without a schedule (they never ran) are left out.
    """
    columns = (
        "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "gpu_spec", "qos", "pod_phase", "creation_time",
        "deletion_time", "scheduled_time",
    )  # fmt: skip
    jobs = []
    for row in csv_rows(path, columns):
        gpus = row.whole("num_gpu")
        if not gpus or not row.text("scheduled_time") or not row.text("deletion_time"):
            continue
        if row.whole("gpu_milli") > 1000:
            raise row.error(f"gpu_milli must be at most 1000, got {row.text('gpu_milli')}")
        start, end = row.number("scheduled_time", 0), row.number("deletion_time", 0)
        if end < start:
            raise row.error(f"deletion_time {end:g} is before scheduled_time {start:g}")
        if end > start:
            jobs.append(
                Job(row.text("name"), row.number("creation_time", 0), gpus, end - start, tenant=row.text("qos"))
            )
    return _from_zero(jobs)


def read_muri(path: str | os.PathLike[str]) -> list[Job]:
    """Read a trace of Muri (Zhao et al., SIGCOMM 2022); its times are milliseconds."""
    columns = (
        "job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration", "interval",
        "iteration_time", "resource_time_0", "resource_time_1", "resource_time_2", "priority",
    )  # fmt: skip
    jobs = [
        Job(
            row.text("job_id"), row.number("submit_time", 0) / 1000, row.whole("num_gpu", 1),
            row.number("iterations", 1) * row.number("iteration_time", 0) / 1000, tenant=row.text("model_name"),
        )
        for row in csv_rows(path, columns)
    ]  # fmt: skip
    return _from_zero(jobs)


def read_tiresias(path: str | os.PathLike[str]) -> list[Job]:
    """Read a trace of Tiresias (Gu et al., NSDI 2019), in seconds."""
    columns = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval")
    jobs = [
        Job(
            row.text("job_id"), row.number("submit_time", 0), row.whole("num_gpu", 1), row.number("duration", 0),
            tenant=row.text("model_name"),
        )
        for row in csv_rows(path, columns)
    ]  # fmt: skip
    return _from_zero(jobs)


def _time(row: Row, text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise row.error(f"a time must look like 2020-04-01 00:00:02, got {text!r}") from None


def _from_zero(jobs: list[Job]) -> list[Job]:
    """In order of submission, counted from the first."""
    jobs.sort(key=lambda job: job.submit)
    first = jobs[0].submit if jobs else 0.0
    return [replace(job, submit=job.submit - first) for job in jobs]
