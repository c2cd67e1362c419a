"""Elastic jobs: a generated application with closed forms, and the published ones against published results."""

import csv
import itertools
import json

import numpy as np
import pytest

from gossamer.cluster import Application, Cluster, Job, Optimus, Pollux, StepTime, Tiresias, simulate
from gossamer.cluster._goodput import Goodput
from gossamer.cluster.policies._pollux_search import search
from gossamer.cluster.traces.pollux import read_applications, read_pollux

TRUE = StepTime(0.02, 0.002, 0.05, 0.004, 0.01, 0.001, overlap=1.5)


def write(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    """An application whose step time is TRUE exactly, and whose gradient noise falls from epoch to epoch."""
    folder = tmp_path_factory.mktemp("apps") / "twin"
    folder.mkdir()
    locals_ = (8, 16, 32, 64)
    placements = ["1", "2", "3", "4", "11", "12", "13", "14", "22", "23", "24", "33", "34", "44"]
    step = lambda local, gpus, nodes: TRUE.seconds(local, 1, gpus, nodes)  # noqa: E731
    rows = []
    for name in placements:
        gpus, nodes = sum(map(int, name)), len(name)
        for local in locals_:
            seconds = step(local, gpus, nodes)
            rows.append((name, local, seconds, seconds - TRUE.compute(local)))
    write(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time"), rows)
    rows = [
        (nodes, gpus, local, step(local, gpus, nodes), step(local, gpus, nodes) - TRUE.compute(local))
        for nodes in (3, 4) for gpus in (nodes, 4 * nodes) for local in locals_
    ]  # fmt: skip
    write(folder / "scalability.csv", ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"), rows)
    for batch in (32, 128, 512):
        rows = [(1000.0 * (epoch + 1), 0, 0, 1.0, 0.5 * (epoch + 1)) for epoch in range(5)]
        header = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
        write(folder / f"validation-{batch}.csv", header, rows)
    return Application.read(folder)


def test_a_rigid_run_takes_the_sum_of_its_epochs(app):
    job = Job("j", 0.0, 2, 1.0, application=app, batch=64)
    result = simulate([job], Cluster(1, 4), Tiresias(), start_seconds=30)
    step, scale = TRUE.seconds(32, 1, 2, 1), 2.0
    epochs = [1000 * step * (0.5 * e / scale + 1) / (0.5 * e + 1) for e in range(1, 6)]
    assert app.duration(64, (2,)) == pytest.approx(sum(epochs), rel=1e-9)
    assert result.finish[0] == pytest.approx(30 + sum(epochs), rel=1e-9)


def test_placements_are_turned_and_unknown_ones_interpolated(app):
    assert app.step((2, 1), 16) == app.step((1, 2), 16)
    assert app.step((1, 2), 24)[0] == pytest.approx(
        (TRUE.seconds(16, 1, 3, 2) + TRUE.seconds(32, 1, 3, 2)) / 2, rel=1e-9
    )
    assert TRUE.seconds(16, 1, 3, 3) < app.step((1, 2, 2), 16)[0] < TRUE.seconds(16, 1, 12, 3)
    with pytest.raises(ValueError, match="not measured near placement"):
        app.step((4, 4, 4, 4, 4), 16)


def test_one_gpu_accumulates_beyond_what_it_holds(app):
    assert app.split(32, 1) == (32, 1)
    assert app.split(64, 1) == (32, 2)  # above the initial batch noise has to be told apart
    assert app.split(512, 2) == (64, 4)


def test_the_fit_recovers_the_constants():
    rows = [
        (nodes, gpus, local, TRUE.compute(local), TRUE.seconds(local, 1, gpus, nodes))
        for nodes, gpus in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 5), (2, 8), (4, 16)) for local in (8, 16, 32, 64)
    ]  # fmt: skip
    fitted = StepTime.fit(*zip(*rows, strict=True))
    for _nodes, _gpus, local, compute, _step in rows:
        assert fitted.compute(local) == pytest.approx(compute, rel=0.02)
    errors = [abs(fitted.seconds(local, 1, gpus, nodes) / step - 1) for nodes, gpus, local, _, step in rows]
    assert np.mean(errors) < 0.12  # the fit is drawn towards little overlap, as published
    unseen = StepTime.fit([1], [1], [16], [0.05], [0.05])
    assert unseen.communicate(8, 2) < 1e-6
    assert unseen.alpha_compute == pytest.approx(0.025)
    with pytest.raises(ValueError, match="positive times"):
        StepTime.fit([1], [1], [16], [0.0], [0.05])
    with pytest.raises(ValueError, match="as many entries"):
        StepTime.fit([1], [1, 2], [16], [0.1], [0.1])


def test_the_gradient_of_the_fit_is_that_of_its_misfit():
    from scipy.optimize import check_grad

    from gossamer.cluster._step_time import _misfit

    rng = np.random.default_rng(0)
    nodes, gpus = np.array([1, 1, 1, 2, 2, 3]), np.array([1, 2, 4, 2, 6, 9.0])
    data = (nodes > 1, (nodes == 1) & (gpus > 1), gpus, np.array([8, 16, 8, 32, 16, 8.0]), *rng.normal(-3, 0.3, (2, 6)))
    point = np.array([0.02, 0.002, 0.05, 0.004, 0.01, 0.001, 1.7])
    error = check_grad(lambda p: _misfit(p, *data)[0], lambda p: _misfit(p, *data)[1], point)
    assert error < 1e-3 * np.linalg.norm(_misfit(point, *data)[1])


def test_goodput_chooses_the_best_of_all_batches():
    goodput = Goodput(TRUE, (1.0, 3.0), initial=32, largest=512, smallest_local=8, largest_local=64)

    def slowly(nodes, gpus):
        best = 0.0
        for total in np.geomspace(max(32, 8 * gpus), 512, 50):
            accumulation = int(np.ceil(total / gpus / 64 - 1e-8))
            if gpus == 1 and total > 32 + 1e-8:
                accumulation = max(2, accumulation)
            local = int(np.ceil(total / gpus / accumulation - 1e-8))
            scale = gpus * local * accumulation / 32
            gain = 4.0 / (3.0 / scale + 1.0)
            if 8 <= local <= 64:
                best = max(best, gain / TRUE.seconds(local, accumulation, gpus, nodes))
        return best

    on, gpus = np.array([1, 1, 1, 2, 4]), np.array([1, 2, 4, 6, 16])
    expected = [slowly(int(a), int(b)) for a, b in zip(on, gpus, strict=True)]
    assert goodput.best(on, gpus) == pytest.approx(expected, rel=1e-6)


def test_optimus_gives_gpus_where_they_save_most(app):
    jobs = [Job("a", 0.0, 1, 1.0, application=app, batch=256), Job("b", 0.0, 1, 1.0, application=app, batch=32)]
    result = simulate(jobs, Cluster(1, 4), Optimus(), restart_seconds=0)
    first = {row: len(gpus) for row, gpus, begin, _ in result.segments if begin == 0}
    left = lambda batch, gpus: app.seconds(batch, (gpus,)) * app.steps(batch)  # noqa: E731
    best = min((left(256, gpus) + left(32, 4 - gpus), gpus) for gpus in (1, 2, 3))[1]
    assert first == {0: best, 1: 4 - best}


def test_pollux_respects_its_rules_and_beats_a_random_allocation(app):
    rng = np.random.default_rng(0)
    jobs = [Job(f"{i}", float(60 * i), 1, 1.0, application=app, batch=64) for i in range(6)]
    result = simulate(jobs, Cluster(3, 4), Pollux(population=30, generations=20), start_seconds=30)
    spans = {}
    for row, gpus, begin, end in result.segments:
        nodes = {gpu // 4 for gpu in gpus}
        assert len(gpus) <= 64
        if len(nodes) > 1:
            for node in nodes:
                spans.setdefault(node, []).append((begin, end, row))
    for stretches in spans.values():
        stretches.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(stretches))
    base = np.zeros((4, 3), dtype=np.int64)
    table = np.zeros((4, 4, 13))
    table[:, 1:, 1:] = np.sqrt(np.arange(1, 13))
    found = search(base, base[None], table, np.ones(4), np.full(4, 12), 4, 60, 60, 1)[0]
    assert found.sum(axis=0).max() <= 4
    assert _mean(found) > 0.97 * np.sqrt(3)  # the best: three GPUs each
    assert _mean(found) > _mean(rng.multinomial(3, np.ones(4) / 4, 3).T)


def _mean(state):
    return len(state) / sum(1 / (np.sqrt(row.sum()) + 1e-3) for row in state)


def test_policies_for_elastic_jobs_refuse_rigid_ones():
    for policy in (Optimus(), Pollux()):
        with pytest.raises(ValueError, match="elastic jobs only"):
            simulate([Job("a", 0, 1, 1)], Cluster(1, 2), policy)


@pytest.mark.data
def test_tiresias_completes_the_published_workloads_in_the_published_time(data_file):
    root = data_file("cluster/adaptdl_results/tiresias-1.0.json").parents[1]
    reference = json.loads((root / "adaptdl_results/tiresias-1.0.json").read_text())["avgs"]
    apps, cluster = read_applications(root / "adaptdl_throughput"), Cluster(16, 4)
    means = []
    for number in range(1, 9):
        jobs = read_pollux(root / f"adaptdl_workloads/workloads/workload-{number}.csv", apps, cluster, elastic=True)
        means.append(simulate(jobs, cluster, Tiresias(), start_seconds=30).jct.mean())
        assert means[-1] == pytest.approx(reference[f"workload-{number}"], rel=0.05)
    assert np.mean(means) == pytest.approx(4038.18, rel=0.05)


@pytest.mark.data
@pytest.mark.slow
def test_optimus_and_pollux_stand_to_tiresias_as_published(data_file):
    root = data_file("cluster/adaptdl_results/tiresias-1.0.json").parents[1]
    apps, cluster = read_applications(root / "adaptdl_throughput"), Cluster(16, 4)
    mean = dict.fromkeys((Tiresias, Optimus, Pollux), 0.0)
    for number in range(1, 9):
        for policy in mean:
            jobs = read_pollux(root / f"adaptdl_workloads/workloads/workload-{number}.csv", apps, cluster, elastic=True)
            mean[policy] += simulate(jobs, cluster, policy(), start_seconds=30).jct.mean()
    assert mean[Optimus] / mean[Tiresias] == pytest.approx(5681.9 / 4038.2, rel=0.1)
    assert mean[Tiresias] / mean[Pollux] == pytest.approx(4038.2 / 2751.1, rel=0.1)
