"""What Castor adds: substrates, gangs kept together, beliefs that are corrected, deferral; and reports and sweeps."""

import json
import math

import numpy as np
import pytest
from clusters import PROFILES, random_jobs, table

from gossamer.cluster import (
    FIFO,
    BestSharingBenefit,
    Castor,
    Cluster,
    ConstantInterference,
    InterferenceTable,
    Job,
    PredictedInterference,
    Profile,
    StepTime,
    TwoSubstrates,
    simulate,
    sweep,
    write_report,
)
from gossamer.cluster._predict import held_out_errors, noisy
from gossamer.core.report import read_report_data

A, B = (Profile(name, StepTime(0, 1), 1) for name in "ab")


def test_the_better_substrate_is_taken():
    jobs = [Job("b", 0, 1, 100, B), Job("a", 0, 1, 90, A)]
    both = TwoSubstrates(ConstantInterference(1.8), ConstantInterference(1.1))
    result = simulate(jobs, Cluster(1, 1), Castor(), both)
    assert result.finish[1] == pytest.approx(99)
    only = simulate(jobs, Cluster(1, 1), Castor(substrates=("time-slice",)), both)
    assert not only.shared.any()


def test_a_gang_stays_on_one_node_although_better_partners_are_scattered():
    entries = {
        (("b", 1.0), ("a", 1.0)): (1.3, 1.3),
        (("c", 1.0), ("a", 1.0)): (1.05, 1.05),
        (("c", 1.0), ("b", 1.0)): (1.1, 1.1),
    }
    c = Profile("c", StepTime(0, 1), 1)
    residents = [Job("b0", 0, 2, 1000, B), Job("c0", 0, 1, 1000, c), Job("x", 0, 1, 1000, None)]
    jobs = [*residents, Job("c1", 0, 1, 1000, c), Job("y", 0, 1, 1000, None), Job("gang", 1, 2, 500, A)]
    factors = InterferenceTable(entries, default=None)
    consolidated = simulate(jobs, Cluster(3, 2), Castor(defer=False), factors)
    placed = {consolidated.jobs[row].id: gpus for row, gpus, _, _ in consolidated.segments}
    assert len({gpu // 2 for gpu in placed["gang"]}) == 1
    anywhere = simulate(jobs, Cluster(3, 2), Castor(consolidate=False, defer=False), factors)
    scattered = {anywhere.jobs[row].id: gpus for row, gpus, _, _ in anywhere.segments}
    assert len({gpu // 2 for gpu in scattered["gang"]}) == 2


def test_a_job_waits_for_a_gpu_that_comes_up_soon():
    jobs = [Job("b", 0, 1, 1000, B), Job("short", 0, 1, 20, None), Job("a", 1, 1, 400, A)]
    factors = InterferenceTable({(("a", 1.0), ("b", 1.0)): (1.5, 1.1)})
    waits = simulate(jobs, Cluster(1, 2), Castor(), factors)
    assert waits.start[2] == 20 and not waits.shared[2]
    eager = simulate(jobs, Cluster(1, 2), Castor(defer=False), factors)
    assert eager.start[2] == 1 and eager.finish.mean() > waits.finish.mean()


def test_a_wrong_belief_is_corrected_and_the_pair_not_made_again():
    truth = ConstantInterference(3.0)
    belief = PredictedInterference(math.log(0.1), {}, {})
    jobs = [
        Job(f"{name}{index}", float(600 * index), 1, 500, {"a": A, "b": B}[name]) for index in range(4) for name in "ba"
    ]
    result = simulate(jobs, Cluster(1, 1), Castor(substrates=("time-slice",), belief=belief, defer=False), truth)
    assert (("a", 1.0), ("b", 1.0), "time-slice") in belief.denied
    together = [
        {a, b}
        for a, (row, _, begin, end) in enumerate(result.segments)
        for b, (other, _, other_begin, other_end) in enumerate(result.segments)
        if a < b
        and min(end, other_end) > max(begin, other_begin)
        and {jobs[row].profile, jobs[other].profile} == {A, B}
    ]
    assert len(together) == 1
    assert belief.seen[("a", 1.0), ("b", 1.0), "time-slice"] > 2
    with pytest.raises(ValueError, match="positive number"):
        belief.observe(("a", 1.0), ("b", 1.0), math.nan)


def test_beliefs_that_are_a_little_off_cost_little():
    ratios = []
    for seed in range(3):
        jobs, truth = random_jobs(100, seed, span=1500), table(seed)
        known = simulate(jobs, Cluster(3, 4, 40_000), Castor(), truth).jct.mean()
        believed = Castor(belief=PredictedInterference.learn(noisy_entries(truth, seed)))
        ratios.append(simulate(jobs, Cluster(3, 4, 40_000), believed, truth).jct.mean() / known)
    assert np.mean(ratios) < 1.1


def noisy_entries(truth, seed):
    off = noisy(truth, 0.3, seed)
    return {(a, b): off.factors(a, b) for a, b in truth.entries}


def test_a_prediction_recovers_factors_of_its_own_form():
    rng = np.random.default_rng(0)
    loads = [(f"m{i}", float(batch)) for i in range(5) for batch in (8, 32)]
    suffers, presses = (
        dict(zip(loads, rng.uniform(0.5, 2, 10), strict=False)),
        dict(zip(loads, rng.uniform(0.5, 2, 10), strict=False)),
    )
    truth = {
        (a, b): (1 + 0.4 * suffers[a] * presses[b], 1 + 0.4 * suffers[b] * presses[a]) for a in loads for b in loads
    }
    given = {pair: factors for index, (pair, factors) in enumerate(truth.items()) if index % 3}
    predicted = PredictedInterference.learn(given, pull=0.0)
    for (a, b), factors in truth.items():
        assert predicted.factors(a, b) == pytest.approx(factors, rel=0.02)
    errors = held_out_errors(truth, shown=3)
    assert errors["mape"] < errors["median_mape"] and errors["spearman"] > 0.9
    assert predicted.factors(("m0", 30.0), ("m1", 8.0)) == predicted.factors(("m0", 32.0), ("m1", 8.0))
    with pytest.raises(ValueError, match="at least one measured pair"):
        PredictedInterference.learn(truth, without=[f"m{i}" for i in range(5)])


@pytest.mark.data
def test_held_out_models_are_predicted_better_than_by_the_median(data_file):
    measured = InterferenceTable.from_gavel(data_file("cluster/gavel_pairs/simulation_throughputs.v100_k80.json"))
    errors = held_out_errors(measured.entries, shown=8)
    assert errors["mape"] < 22 < 30 < errors["median_mape"]
    assert errors["spearman"] > 0.7


def test_a_sweep_gives_what_single_replays_give(tmp_path):
    traces = [random_jobs(40, seed) for seed in range(2)]
    cluster = Cluster(2, 4, 40_000)
    alone = sweep(traces, [FIFO, BestSharingBenefit], cluster, table())
    together = sweep(traces, [FIFO, BestSharingBenefit], cluster, table(), workers=2)
    for a, b in zip(alone, together, strict=True):
        assert [r.jct.tolist() for r in a] == [r.jct.tolist() for r in b]
    page = write_report(alone[0], tmp_path / "r.html", "Two policies")
    summaries = read_report_data(page)
    assert [s["policy"] for s in summaries] == ["fifo", "bsbf"]
    assert summaries[1]["mean_jct"] == pytest.approx(alone[0][1].jct.mean())
    with pytest.raises(ValueError, match="at least one result"):
        write_report([], tmp_path / "r.html", "")


@pytest.mark.browser
def test_the_report_shows_in_a_browser(tmp_path, browse):
    results = sweep([random_jobs(30, 0)], [FIFO, BestSharingBenefit], Cluster(2, 4, 40_000), table())[0]
    page = browse(write_report(results, tmp_path / "r.html", "A trace"))
    assert page.errors == [] and page.requests == []
    assert "Who ran where: bsbf" in page.text


def test_the_command_compares_policies(tmp_path, capsys):
    from typer.testing import CliRunner

    from gossamer.cluster.cli import app

    rows = "\n".join(f"j{i},{10 * i},{1 + i % 3},{50 + 7 * i}" for i in range(40))
    (tmp_path / "t.csv").write_text(f"id,submit,gpus,duration\n{rows}\n")
    run = CliRunner().invoke
    options = ["--nodes", "2", "--policy", "bsbf", "--policy", "tiresias", "--policy", "castor"]
    done = run(
        app, ["cluster", "simulate", str(tmp_path / "t.csv"), *options, "--html", str(tmp_path / "r.html"), "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [policy["policy"] for policy in found["policies"]] == ["bsbf", "tiresias", "castor"]
    assert (tmp_path / "r.html").stat().st_size > 1e5
    assert "bsbf" in run(app, ["cluster", "simulate", str(tmp_path / "t.csv"), *options]).stdout
    with pytest.raises(ValueError, match="policy must be one of"):
        run(app, ["cluster", "simulate", str(tmp_path / "t.csv"), "--policy", "magic"], catch_exceptions=False)
    arrivals = np.cumsum(np.random.default_rng(0).gamma(0.4, 1.0, 300))
    lines = [{"timestamp": int(1000 * t), "input_length": 9, "output_length": 3, "hash_ids": []} for t in arrivals]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run(app, ["cluster", "trace", str(tmp_path / "m.jsonl"), "--like", str(tmp_path / "n.jsonl"), "--json"])
    assert json.loads(done.stdout)["given"]["requests"] == 300
    done = run(app, ["cluster", "energy", "--tasks", "50", "--hours", "1", "--json"])
    found = json.loads(done.stdout)
    assert 0 < found["saving"] <= found["bound"]
    assert [row["late"] for row in found["schedules"].values()] == [0, 0]


def test_profiles_are_objects_of_their_own():
    assert PROFILES[0] != Profile(PROFILES[0].model, PROFILES[0].step, PROFILES[0].batch)
