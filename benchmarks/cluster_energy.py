"""Energy of GPUs: kernel times at other clocks against published errors, and deadline schedules against their bound."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.cluster.energy.boards import DEFAULT_CLOCKS, read_board
from gossamer.cluster.energy.deadlines import EDL, synthetic_tasks
from gossamer.cluster.energy.dvfs import NARROW, WIDE
from gossamer.cluster.energy.kernel_time import GPUS, mean_error, read_nvprof
from gossamer.core.assets import data_file
from gossamer.core.measure import Bench, Row, claim, largest, worst

TABLES = {
    "gtx980": ("dvfs_counters_2021/gtx980-low-dvfs-real-small-workload-Performance.csv", 3.85, 5.1),
    "gtx1080ti": ("dvfs_counters_2021/gtx1080ti-dvfs-real-Performance.csv", 8.56, 11.0),
    "p100": ("dvfs_counters_p100/p100-dvfs-real-Performance.csv", 8.82, 11.4),
    "v100": ("dvfs_counters_v100/v100-dvfs-real-Performance.csv", 8.83, 17.3),
}


@claim(
    "dvfs-model",
    text="largest deviation from the published errors of the kernel time model, in percentage points, four GPUs",
    system=["DVFS performance model", "DVFS performance model, extended"],
    peer="the published mean errors: 3.85, 8.56, 8.82, 8.83 % with rules by kernel name, and 5.1 to 17.3 % without",
    unit="points",
    bar=0.1,
    better="lower",
    summary=largest,
    sources=("cluster/energy/kernel_time.py",),
)
def published_errors(bench: Bench) -> Iterator[Row]:
    for gpu, (file, published, generic) in TABLES.items():
        measured = read_nvprof(data_file(f"power/{file}"), scored_only=True)
        for rules, expected in (("published", published), ("generic", generic)):
            error = mean_error(GPUS[gpu], measured, rules)  # type: ignore[arg-type]
            note = f"mean error {error:.2f} %, published {expected} %, {len(measured)} samples"
            yield bench.value(f"{gpu}, {rules} rules", abs(error - expected), "points", note=note)
        error = mean_error(GPUS[gpu], measured, "texture")
        yield bench.value(f"{gpu}, texture as a third bound", error, "%", counted=False, note="our generic rule")


@claim(
    "dvfs-saving",
    text="energy saved by EDL-theta over what is saved at most in the same interval of settings, all deadlines met",
    system=["DVFS scheduling"],
    peer="the bound: every task at its own best setting, nothing idle",
    unit="share",
    bar=0.90,
    better="higher",
    summary=worst,
    sources=("cluster/energy/deadlines.py", "cluster/energy/dvfs.py", "cluster/energy/_optimum.py"),
)
def saving_over_bound(bench: Bench) -> Iterator[Row]:
    """Synthetic tasks of the published distributions; two real boards' best measured settings beside them."""
    for name, interval in (("wide", WIDE), ("narrow", NARROW)):
        for load in (0.4, 1.0, 1.6):
            tasks = synthetic_tasks(round(2048 * load), seed=1)
            ours = EDL(interval=interval).schedule(tasks)
            default = EDL(interval=interval, scale=False).schedule(tasks)
            saving, most = 1 - ours.total / default.total, 1 - ours.bound / ours.default
            note = f"saves {100 * saving:.1f} % of at most {100 * most:.1f} %; {ours.missed(tasks)} late"
            yield bench.value(f"{name}, utilisation {load}", float(saving / most), "share", note=note)
    tasks = synthetic_tasks(3277, seed=1)
    for per_node, theta in ((4, 1.0), (4, 0.7), (16, 1.0), (16, 0.7)):
        edl = EDL(theta=theta, gpus_per_node=per_node)
        ours = edl.schedule(tasks)
        default = EDL(gpus_per_node=per_node, scale=False).schedule(tasks)
        saving, most = 1 - ours.total / default.total, 1 - ours.bound / ours.default
        note = f"saves {100 * saving:.1f} % of at most {100 * most:.1f} %"
        case = f"wide, nodes of {per_node}, theta {theta}"
        yield bench.value(case, float(saving / most), "share", counted=False, note=note)
    for board, clocks in DEFAULT_CLOCKS.items():
        try:
            path = data_file(f"power/dvfs_job_schedule/{board}-dvfs-real-Performance-Power.csv")
        except FileNotFoundError:
            continue
        savings = [100 * kernel.saving(clocks) for kernel in read_board(path)]
        note = "mean over kernels of the best measured setting's saving"
        yield bench.value(f"{board}, measured", sum(savings) / len(savings), "%", counted=False, note=note)
