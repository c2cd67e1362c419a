"""The DVFS optimum against grids and SLSQP, schedules against bounds and exhaustive search, models against tables."""

import math
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gossamer.cluster.energy.boards import DEFAULT_CLOCKS, read_board
from gossamer.cluster.energy.deadlines import EDL, Task, synthetic_tasks
from gossamer.cluster.energy.dvfs import NARROW, WIDE, DvfsModel, Interval
from gossamer.cluster.energy.kernel_time import (
    GPUS,
    KernelCounters,
    mean_error,
    predict_cycles,
    predict_milliseconds,
    read_nsight,
    read_nvprof,
)

models = st.builds(
    DvfsModel,
    static=st.floats(5, 100), memory=st.floats(5, 60), core=st.floats(20, 200),
    fixed=st.floats(0, 50), scaled=st.floats(1, 400), delta=st.floats(0.02, 0.98),
)  # fmt: skip


def on_a_grid(model, interval, limit=math.inf, steps=400):
    """Least energy over a dense grid of settings, core clock as high as the voltage allows."""
    slowest, fastest = (np.sqrt((v - 0.5) / 2) + 0.5 for v in interval.voltage)
    core = np.linspace(slowest, fastest, steps)[:, None]  # even in the clock, which is steep in the voltage
    v = 2 * (core - 0.5) ** 2 + 0.5
    m = np.linspace(*interval.memory, steps)[None, :]
    time = model.fixed + model.scaled * (model.delta / core + (1 - model.delta) / m)
    energy = (model.static + model.memory * m + model.core * v**2 * core) * time
    return np.where(time <= limit, energy, np.inf).min()


@given(models, st.sampled_from([WIDE, NARROW]))
def test_the_optimum_is_that_of_a_dense_grid(model, interval):
    best, grid = model.optimal(interval=interval), on_a_grid(model, interval)
    assert best.energy <= grid * (1 + 1e-9)
    assert best.energy >= grid * (1 - 5e-4)
    assert interval.voltage[0] <= best.voltage <= interval.voltage[1]
    assert interval.memory[0] <= best.memory <= interval.memory[1]


@given(models, st.floats(0.0, 1.0), st.sampled_from([WIDE, NARROW]))
def test_a_limit_is_kept_at_the_least_energy(model, tightness, interval):
    shortest, relaxed = model.shortest(interval), model.optimal(interval=interval).time
    limit = shortest + tightness * max(0.0, relaxed - shortest)
    best = model.optimal(limit * (1 + 1e-12), interval)
    assert best.time <= limit * (1 + 1e-9)
    assert best.energy <= on_a_grid(model, interval, limit) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_general_solver_finds_nothing_better(seed):
    rng = np.random.default_rng(seed)
    model = DvfsModel(*rng.uniform(20, 120, 3), *rng.uniform(5, 100, 2), rng.uniform(0.1, 0.9))
    limit = 1.05 * model.shortest()
    ours = model.optimal(limit)
    found = minimize(
        lambda x: model.at(*x).energy / 1e3, (1.2, 1.15), method="SLSQP", bounds=[WIDE.voltage, WIDE.memory],
        constraints={"type": "ineq", "fun": lambda x: limit - model.at(*x).time}, options={"ftol": 1e-12},
    )  # fmt: skip
    assert ours.energy <= 1e3 * found.fun * 1.001


def test_a_limit_that_no_setting_meets_is_refused():
    model = DvfsModel(60, 30, 100, 10, 90, 0.5)
    with pytest.raises(ValueError, match="below the .* s of the fastest setting"):
        model.optimal(0.9 * model.shortest())


@pytest.mark.parametrize("bad", [{"static": -1.0}, {"delta": 1.5}, {"fixed": 0.0, "scaled": 0.0}, {"core": math.nan}])
def test_an_impossible_task_is_refused(bad):
    with pytest.raises(ValueError, match=r"must"):
        DvfsModel(**({"static": 1.0, "memory": 1.0, "core": 1.0, "fixed": 1.0, "scaled": 1.0, "delta": 0.5} | bad))


@settings(max_examples=15)
@given(models)
def test_the_fit_recovers_a_task_from_its_measurements(model):
    model = DvfsModel(model.static, model.memory, model.core, model.fixed + 1, model.scaled + 10, model.delta)
    core, memory = (grid.ravel() for grid in np.meshgrid(np.linspace(0.8, 1.1, 5), np.linspace(0.7, 1.1, 4)))
    volts = 2 * (core - 0.5) ** 2 + 0.5
    time = model.fixed + model.scaled * (model.delta / core + (1 - model.delta) / memory)
    power = model.static + model.memory * memory + model.core * volts**2 * core
    fitted = DvfsModel.fit(core, memory, time, power)
    again = fitted.fixed + fitted.scaled * (fitted.delta / core + (1 - fitted.delta) / memory)
    assert np.abs(again / time - 1).mean() < 0.01
    assert fitted.default.power == pytest.approx(model.default.power, rel=0.01)


def test_no_deadline_is_missed_in_ten_thousand_random_sets():
    rng = np.random.default_rng(0)
    pool = synthetic_tasks(4000, 7, (0.15, 0.85))
    tight = [
        Task(task.model, 0.0, task.model.shortest() * float(rng.choice([1.0, 1.001, 1.1, 2.0, 4.0]))) for task in pool
    ]
    for number in range(10_000):
        chosen = rng.integers(len(pool), size=3)
        arrivals = np.sort(rng.choice([0.0, 0.0, 30.0, 400.0], 3))
        tasks = [
            Task(tight[row].model, float(at), float(at) + tight[row].deadline)
            for row, at in zip(chosen, arrivals, strict=True)
        ]
        edl = EDL(theta=float(rng.uniform()), gpus_per_node=1 + number % 4, sleep_after=float(rng.choice([0, 60])))
        schedule = edl.schedule(tasks)
        assert schedule.missed(tasks) == 0
        assert schedule.run >= schedule.bound * (1 - 1e-9)


@pytest.mark.parametrize("theta", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("per_node", [1, 4])
def test_a_gpu_runs_one_task_at_a_time_and_the_joules_add_up(theta, per_node):
    rng = np.random.default_rng(1)
    tasks = synthetic_tasks(300, 2, arrivals=sorted(rng.uniform(0, 5000, 300)))
    edl = EDL(theta=theta, gpus_per_node=per_node, idle_watts=10.0, turn_on_joules=5.0, sleep_after=100.0)
    schedule = edl.schedule(tasks)
    by_gpu = {}
    for placed, task in zip(schedule.placed, tasks, strict=True):
        assert placed.start >= task.arrival
        by_gpu.setdefault(placed.gpu, []).append((placed.start, placed.end))
    busy, on, turn_ons = 0.0, 0.0, 0
    nodes = {}
    for gpu, stretches in by_gpu.items():
        stretches.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(stretches))
        busy += sum(end - start for start, end in stretches)
        nodes.setdefault(gpu // per_node, []).extend(stretches)
    for stretches in nodes.values():  # a node is on from its first task until it has slept, again and again
        stretches.sort()
        begin, last = stretches[0]
        turn_ons += 1
        for start, end in stretches[1:]:
            if start > last + 100.0:
                on += last + 100.0 - begin
                begin, turn_ons = start, turn_ons + 1
            last = max(last, end)
        on += last - begin
    assert schedule.turn_ons == turn_ons
    assert schedule.missed(tasks) == 0
    # nodes whose last sleep nobody noticed are billed to their last task only
    assert schedule.idle == pytest.approx(10.0 * (on * per_node - busy), abs=10.0 * 100.0 * per_node * len(nodes))
    assert schedule.total == schedule.run + schedule.idle + 5.0 * turn_ons


def exhaustive(tasks, settings):
    """Least run energy on any number of GPUs' worth of orders: one GPU, all orders, all settings."""
    best = math.inf
    for order in permutations(range(len(tasks))):
        for chosen in product(range(len(settings)), repeat=len(tasks)):
            now = energy = 0.0
            for row in order:
                setting = tasks[row].model.at(*settings[chosen[row]])
                now += setting.time
                energy += setting.energy
                if now > tasks[row].deadline:
                    break
            else:
                best = min(best, energy)
    return best


def test_small_sets_are_near_the_best_of_all_schedules():
    tried = [(v, m) for v in (0.6, 0.8, 1.0, 1.25) for m in (0.6, 1.0, 1.2)]
    for seed in range(4):
        tasks = synthetic_tasks(3, seed, (0.2, 0.3))
        schedule = EDL(theta=0.0, turn_on_joules=0.0).schedule(tasks)
        if schedule.nodes == 1:
            assert schedule.run <= 1.1 * exhaustive(tasks, tried)
        else:
            assert schedule.run <= 1.1 * sum(min(t.model.at(*s).energy for s in tried) for t in tasks)


def test_published_energies_and_nodes_are_met():
    tasks = synthetic_tasks(3277, 3)
    loose, off = EDL().schedule(tasks), EDL(scale=False).schedule(tasks)
    assert off.run == pytest.approx(9.698e7, rel=0.02)
    assert loose.run == pytest.approx(6.441e7, rel=0.02)
    assert off.nodes == pytest.approx(1218.5, rel=0.04)
    assert loose.nodes == pytest.approx(1492.8, rel=0.04)
    ideal = 1 - loose.bound / loose.default
    assert (1 - loose.total / off.total) / ideal >= 0.9
    tasks = synthetic_tasks(2048, 4)
    totals = {theta: EDL(theta=theta, gpus_per_node=16).schedule(tasks).total for theta in (0.5, 0.7, 0.9, 1.0)}
    for theta, published in ((0.5, 4.80e7), (0.7, 4.82e7), (0.9, 5.04e7), (1.0, 5.15e7)):
        assert totals[theta] == pytest.approx(published, rel=0.03)
    assert totals[0.7] < totals[0.9] < totals[1.0]


def test_wrong_tasks_and_schedulers_are_refused():
    task = synthetic_tasks(1, 0)[0]
    with pytest.raises(ValueError, match="task 0: has 1 s, and the fastest setting takes"):
        EDL().schedule([Task(task.model, 0.0, 1.0)])
    with pytest.raises(ValueError, match="needs 0 <= arrival <= deadline"):
        EDL().schedule([Task(task.model, 5.0, 1.0)])
    with pytest.raises(ValueError, match="theta must lie between 0 and 1"):
        EDL(theta=1.5)
    with pytest.raises(ValueError, match="voltage must rise"):
        Interval((0.4, 1.0), (0.5, 1.0))


def counters(**changed):
    values = {
        "warps": 4096.0, "occupancy": 0.9, "instructions": 400.0, "l2_reads": 65536.0, "l2_writes": 16384.0,
        "dram_reads": 60000.0, "dram_writes": 15000.0, "shared_loads": 8192.0, "shared_stores": 8192.0, "texture": 0.0,
        "double": 0.0, "branches": 4096.0,
    } | changed  # fmt: skip
    return KernelCounters(("kernel",), **{name: np.array([value]) for name, value in values.items()})


def by_hand(spec, fc, fm, c):
    """One kernel, enough warps, no names: the text of the model, number by number."""
    n = 64 * c["occupancy"]
    g = (c["l2_reads"] + c["l2_writes"]) / c["warps"]
    miss = min(1.0, (c["dram_reads"] + c["dram_writes"]) / (g * c["warps"]))
    l_dm = spec.dram_latency[0] * fc / fm + spec.dram_latency[1]
    d_dm = (spec.dram_delay[0] / fm + spec.dram_delay[1]) * fc / fm
    t_mem = g * (d_dm * miss + spec.l2[1] * (1 - miss)) * n
    shared = (c["shared_loads"] + c["shared_stores"]) / c["warps"]
    insts = c["instructions"] - g - c["shared_loads"] / c["warps"] - c["shared_stores"] / c["warps"] / 4
    t_comp = spec.instruction[1] * insts * c["occupancy"] * 32 * 64 / spec.cores + spec.instruction[0]
    t_sm = t_comp + spec.shared[1] * shared * n + spec.shared[0]
    rounds = c["warps"] / (n * spec.sms)
    return (max(t_mem, t_sm) + l_dm) * rounds / (fc * 1000)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("instructions", [400.0, 40.0])
def test_a_kernel_takes_the_time_that_the_text_says(gpu, instructions):
    c = counters(instructions=instructions)
    values = {name: float(getattr(c, name)[0]) for name in vars(c) if name != "name"}
    expected = by_hand(GPUS[gpu], 1000.0, 800.0, values)
    assert predict_milliseconds(GPUS[gpu], c, 1000.0, 800.0)[0] == pytest.approx(expected, rel=1e-12)


def test_time_never_rises_with_a_clock():
    rng = np.random.default_rng(0)
    for _ in range(50):
        c = counters(
            instructions=float(rng.uniform(30, 3000)), l2_reads=float(rng.uniform(1e3, 1e6)),
            occupancy=float(rng.uniform(0.1, 1.0)),
        )  # fmt: skip
        for gpu in GPUS.values():
            by_core = [predict_milliseconds(gpu, c, core, 800.0)[0] for core in (500, 700, 900, 1200)]
            by_memory = [predict_milliseconds(gpu, c, 900.0, memory)[0] for memory in (400, 600, 800, 1200)]
            assert by_core == sorted(by_core, reverse=True)
            assert by_memory == sorted(by_memory, reverse=True)


def test_what_binds_a_kernel_is_told():
    assert predict_cycles(GPUS["gtx980"], counters(instructions=5000.0), 1000, 1000).bound[0] == 1
    assert predict_cycles(GPUS["gtx980"], counters(instructions=50.0), 1000, 1000).bound[0] == 0
    assert predict_cycles(GPUS["gtx980"], counters(occupancy=0.2), 1000, 1000).bound[0] == 2
    assert predict_cycles(GPUS["gtx980"], counters(texture=1e7), 1000, 1000, "texture").bound[0] == 3
    no_memory = counters(l2_reads=0.0, l2_writes=0.0, dram_reads=0.0, dram_writes=0.0)
    assert np.isfinite(predict_milliseconds(GPUS["gtx980"], no_memory, 1000, 1000)).all()


def test_impossible_counters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="l2_reads must not be negative"):
        counters(l2_reads=-1.0)
    with pytest.raises(ValueError, match="occupancy above 0"):
        counters(occupancy=0.0)
    (tmp_path / "a.csv").write_text("appName,coreF\nx,1\n")
    with pytest.raises(ValueError, match="has no column memF"):
        read_nvprof(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="ncu --metrics"):
        read_nsight(tmp_path / "a.csv")


def test_tables_of_both_profilers_are_read(tmp_path):
    nvprof = (
        "appName,coreF,memF,time/ms,warps,achieved_occupancy,inst_per_warp,l2_read_transactions,l2_write_transactions,"
        "dram_read_transactions,dram_write_transactions,shared_load_transactions,shared_store_transactions,"
        "tex_cache_transactions,inst_fp_64,cf_executed\nvectorAdd,1000,800,0.5,4096,0.9,400,65536,16384,60000,15000,"
        "8192,8192,-1,0,4096\ncfd,1000,800,0.5,4096,0.9,400,65536,16384,60000,15000,8192,8192,0,0,4096\n"
    )
    (tmp_path / "nvprof.csv").write_text(nvprof)
    measured = read_nvprof(tmp_path / "nvprof.csv")
    assert len(measured) == 2 and len(read_nvprof(tmp_path / "nvprof.csv", scored_only=True)) == 1
    expected = predict_milliseconds(GPUS["gtx980"], counters(), 1000.0, 800.0)
    assert predict_milliseconds(GPUS["gtx980"], measured.counters, 1000.0, 800.0)[0] == expected[0]
    error = mean_error(GPUS["gtx980"], measured.where(np.array([True, False])))
    assert error == pytest.approx(100 * abs(expected[0] / 0.5 - 1))


PUBLISHED = [
    ("gtx980", "dvfs_counters_2021/gtx980-low-dvfs-real-small-workload-Performance.csv", 3.85, 5.13),
    ("gtx1080ti", "dvfs_counters_2021/gtx1080ti-dvfs-real-Performance.csv", 8.56, 11.0),
    ("p100", "dvfs_counters_p100/p100-dvfs-real-Performance.csv", 8.82, 11.44),
    ("v100", "dvfs_counters_v100/v100-dvfs-real-Performance.csv", 8.83, 17.32),
]


@pytest.mark.data
@pytest.mark.parametrize(("gpu", "file", "published", "generic"), PUBLISHED)
def test_the_published_errors_are_reproduced(data_file, gpu, file, published, generic):
    measured = read_nvprof(data_file(f"power/{file}"), scored_only=True)
    assert mean_error(GPUS[gpu], measured, "published") == pytest.approx(published, abs=0.01)
    assert mean_error(GPUS[gpu], measured, "generic") == pytest.approx(generic, abs=0.01)


@pytest.mark.data
@pytest.mark.parametrize(
    ("board", "saving", "largest", "errors"),
    [("gtx1080ti", 6.1, 15.1, (1.40, 0.84)), ("gtx2070s", 5.3, 11.7, (1.33, 0.77))],
)
def test_measured_boards_save_five_to_six_per_cent(data_file, board, saving, largest, errors):
    kernels = read_board(data_file(f"power/dvfs_job_schedule/{board}-dvfs-real-Performance-Power.csv"))
    savings = [100 * kernel.saving(DEFAULT_CLOCKS[board]) for kernel in kernels]
    assert np.mean(savings) == pytest.approx(saving, abs=0.05)
    assert max(savings) == pytest.approx(largest, abs=0.05)
    fitted = [kernel.fit(DEFAULT_CLOCKS[board]) for kernel in kernels]
    assert np.mean([time for _, time, _ in fitted]) == pytest.approx(errors[0], abs=0.05)
    assert np.mean([power for _, _, power in fitted]) == pytest.approx(errors[1], abs=0.05)
