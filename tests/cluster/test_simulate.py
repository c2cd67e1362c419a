"""The engine: invariants under every policy, hand-made timelines, and errors that name the row."""

import math

import numpy as np
import pytest
from clusters import PROFILES, most_at_once, occupancy, random_jobs, table

from gossamer.cluster import (
    FIFO,
    SJF,
    SRTF,
    BestSharingBenefit,
    Cluster,
    ConstantInterference,
    EasyBackfill,
    FirstFitSharing,
    GandivaLike,
    Job,
    Profile,
    StepTime,
    Themis,
    Tiresias,
    check_jobs,
    simulate,
)

NEVER_MOVE = [FIFO, EasyBackfill, SJF, FirstFitSharing, BestSharingBenefit]
PREEMPT = [SRTF, Tiresias, Themis, GandivaLike]
SHARE = {"ffs", "bsbf", "gandiva"}
SMALL = Cluster(4, 4, gpu_memory=16_384)


@pytest.mark.parametrize("policy", [*NEVER_MOVE, *PREEMPT])
@pytest.mark.parametrize("seed", [0, 1])
def test_gangs_are_whole_gpus_hold_two_jobs_at_most_and_all_jobs_end(policy, seed):
    jobs = random_jobs(150, seed)
    result = simulate(jobs, SMALL, policy(), table(seed))
    for stretches in occupancy(result):
        assert most_at_once(stretches) <= (2 if result.policy in SHARE else 1)
        for begin, end, row in stretches:
            for other_begin, other_end, other in stretches:
                if other != row and min(end, other_end) > max(begin, other_begin):
                    least = [job.profile.memory(1) for job in (jobs[row], jobs[other])]
                    assert sum(least) <= SMALL.gpu_memory
    held = {}
    for row, gpus, begin, end in result.segments:
        assert len(set(gpus)) == jobs[row].gpus
        held.setdefault(row, []).append((begin, end))
    assert set(held) == set(range(150))
    for row, stretches in held.items():
        assert sum(end - begin for begin, end in stretches) >= jobs[row].duration * (1 - 1e-9)
        assert len(stretches) == 1 + result.restarts[row]
        if policy in NEVER_MOVE:
            assert len(stretches) == 1
    assert (result.jct >= result.alone * (1 - 1e-9)).all()
    assert (result.queueing >= 0).all()


@pytest.mark.parametrize("policy", [FIFO, SJF, FirstFitSharing, BestSharingBenefit])
def test_no_gpu_idles_while_a_single_gpu_job_waits(policy):
    result = simulate(random_jobs(120, 3, gangs=(1,), span=500), SMALL, policy(), table())
    waiting_from = result.submit
    for stretches in occupancy(result):
        covered = sorted((begin, end) for begin, end, _ in stretches)
        time = 0.0
        for begin, end in covered:
            if begin > time:
                waits = (waiting_from < (time + begin) / 2) & (result.start > (time + begin) / 2)
                assert not waits.any()
            time = max(time, end)


def test_first_in_first_out_on_one_gpu_is_lindleys_recursion():
    jobs = random_jobs(200, 4, gangs=(1,), profiles=False)
    result = simulate(jobs, Cluster(1, 1), FIFO())
    free, expected = 0.0, []
    for job in jobs:
        free = max(free, job.submit) + job.duration
        expected.append(free)
    assert result.finish == pytest.approx(expected, rel=1e-12)
    assert result.utilisation() == pytest.approx(sum(job.duration for job in jobs) / result.makespan)


def test_energy_counts_busy_and_idle_gpus():
    result = simulate(
        [Job("a", 0.0, 2, 100.0), Job("b", 0.0, 1, 50.0)], Cluster(1, 4, busy_watts=200, idle_watts=20), SJF()
    )
    assert result.energy() == pytest.approx(250 * 200 + 150 * 20)


def test_shortest_first_on_one_gpu():
    jobs = [Job("first", 0, 1, 10), Job("long", 1, 1, 30), Job("short", 2, 1, 5), Job("middle", 3, 1, 8)]
    assert simulate(jobs, Cluster(1, 1), SJF()).finish.tolist() == [10, 53, 15, 23]
    assert simulate(jobs, Cluster(1, 1), SJF(ageing=100.0)).finish.tolist() == [10, 40, 45, 53]


def test_a_preempted_job_keeps_its_progress_and_pays_for_resuming():
    jobs = [Job("long", 0, 1, 100), Job("short", 40, 1, 10)]
    result = simulate(jobs, Cluster(1, 1), SRTF(), restart_seconds=7)
    assert result.finish.tolist() == [40 + 10 + 7 + 60, 50]
    assert result.restarts.tolist() == [1, 0]
    assert simulate(jobs, Cluster(1, 1), SJF(), restart_seconds=7, start_seconds=3).finish.tolist() == [103, 116]


def test_a_backfilled_job_does_not_delay_the_head():
    jobs = [Job("half", 0, 2, 100), Job("all", 1, 4, 50), Job("fits", 2, 1, 90), Job("too long", 3, 1, 200)]
    result = simulate(jobs, Cluster(1, 4), EasyBackfill())
    assert result.start.tolist() == [0, 100, 2, 150]
    assert simulate(jobs, Cluster(1, 4), FIFO()).start.tolist() == [0, 100, 150, 150]


def test_tiresias_sinks_a_job_that_has_had_its_share_at_the_next_round():
    jobs = [Job("old", 0, 1, 1000), Job("new", 30, 1, 50)]
    result = simulate(jobs, Cluster(1, 1), Tiresias(threshold=250), restart_seconds=0)
    assert result.start[1] == 300  # 250 s are up in the round that ends at 300
    assert result.restarts.tolist() == [1, 0]
    assert result.finish.tolist() == [360 + 700, 350]


def test_gandiva_parts_a_pair_that_gains_nothing():
    jobs = [Job("a", 0, 1, 600, PROFILES[0]), Job("b", 0, 1, 600, PROFILES[2])]
    bad = simulate(jobs, Cluster(1, 1), GandivaLike(slice_rounds=1000), ConstantInterference(2.5), restart_seconds=0)
    assert bad.restarts.tolist() == [0, 1]
    assert bad.finish[1] > 1100
    good = simulate(jobs, Cluster(1, 1), GandivaLike(), ConstantInterference(1.2), restart_seconds=0)
    assert good.finish == pytest.approx([720, 720])


def test_themis_lets_the_worst_off_go_first_when_leases_end():
    jobs = [Job("long", 0, 1, 5000), Job("short", 10, 1, 60)]
    result = simulate(jobs, Cluster(1, 1), Themis(lease=600), restart_seconds=0)
    assert result.start[1] == 600
    assert result.summary()["worst_unfairness"] == pytest.approx(650 / 60)


def test_a_gang_is_slowed_by_its_slowest_worker():
    gang, single = Profile("gang", StepTime(0, 1), 1), Profile("single", StepTime(0, 1), 1)
    result = simulate(
        [Job("gang", 0, 4, 100, gang), Job("single", 0, 1, 1000, single)], Cluster(1, 4), FirstFitSharing(),
        ConstantInterference(1.5),
    )  # fmt: skip
    assert result.finish[0] == pytest.approx(150)


def test_the_number_of_events_grows_with_jobs_and_not_with_time():
    for policy in (FIFO, SJF, BestSharingBenefit):
        few = simulate(random_jobs(200, 5), SMALL, policy(), table()).events
        many = simulate(random_jobs(800, 5, span=16_000), SMALL, policy(), table()).events
        slow = simulate(random_jobs(200, 5, span=4_000_000), SMALL, policy(), table()).events
        assert many <= 4.4 * few
        assert slow <= 1.1 * few + 200


def test_wrong_estimates_change_the_order_and_not_the_work():
    rng = np.random.default_rng(0)
    jobs = random_jobs(150, 6)
    noisy = [
        Job(job.id, job.submit, job.gpus, job.duration, job.profile, estimate=job.duration * rng.uniform(0.5, 1.5))
        for job in jobs
    ]
    exact, believed = (simulate(which, SMALL, BestSharingBenefit(), table()) for which in (jobs, noisy))
    assert believed.jct.mean() < 1.5 * exact.jct.mean()
    assert (believed.jct >= believed.alone * (1 - 1e-9)).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"submit": -1.0}, r"job 'x' \(row 1\): submit must be a time from 0 on, got -1"),
        ({"submit": math.nan}, "submit must be a time"),
        ({"submit": 1.0}, "submit 1 is before 5 of the row above"),
        ({"duration": 0.0}, "duration must be positive"),
        ({"duration": math.inf}, "duration must be positive"),
        ({"gpus": 17}, "gpus 17 is more than the cluster's 16"),
        ({"gpus": 0}, "gpus must be a whole number from 1 on"),
        ({"id": "first"}, "its id was there before"),
        ({"estimate": math.nan}, "estimate must be positive"),
        (
            {"profile": Profile("m", StepTime(0, 1), 64, memory_per_sample=1000)},
            "needs 64000 MiB on a GPU, which has 16384",
        ),
    ],
)
def test_a_wrong_job_is_named_by_its_row(bad, message):
    job = {"id": "x", "submit": 6.0, "gpus": 1, "duration": 1.0} | bad
    with pytest.raises(ValueError, match=message):
        simulate([Job("first", 5.0, 1, 1.0), Job(**job)], SMALL, FIFO())


def test_bad_moves_are_refused():
    class Wrong(FIFO):
        def schedule(self, state):
            for run in state.pending:
                state.start(run, [0] * run.job.gpus)

    with pytest.raises(ValueError, match="must be different"):
        simulate([Job("a", 0, 2, 1)], SMALL, Wrong())
    with pytest.raises(ValueError, match="has two jobs already"):
        simulate([Job(name, 0, 1, 1) for name in "abc"], SMALL, Wrong())
    with pytest.raises(ValueError, match="do not fit on one GPU"):
        heavy = Profile("m", StepTime(0, 1), 1, memory_fixed=9000)
        simulate([Job(name, 0, 1, 1, heavy) for name in "ab"], SMALL, Wrong())
    with pytest.raises(ValueError, match="leaves 1 jobs waiting for ever"):
        simulate([Job("a", 0, 2, 1)], SMALL, type("Idle", (FIFO,), {"schedule": lambda self, state: None})())


def test_a_cluster_and_costs_must_make_sense():
    with pytest.raises(ValueError, match="nodes must be positive"):
        Cluster(0, 4)
    with pytest.raises(ValueError, match="busy_watts must not be negative"):
        Cluster(1, 1, busy_watts=-1)
    with pytest.raises(ValueError, match="restart_seconds must not be negative"):
        simulate([], SMALL, FIFO(), restart_seconds=-1)
    assert check_jobs([], SMALL) == []
    assert simulate([], SMALL, FIFO()).events == 0
