"""Readers on schema twins and real files, statistics on closed forms, generators on the traces that they learned."""

import gzip
import json

import numpy as np
import pytest
from scipy import stats

from gossamer.cluster import Cluster, InterferenceTable
from gossamer.cluster.traces import burstiness as b
from gossamer.cluster.traces._files import read_jobs, read_requests
from gossamer.cluster.traces.gavel import read_profiles
from gossamer.cluster.traces.philly import busy_sample, read_philly, with_profiles
from gossamer.cluster.traces.requests import RequestTrace, read_azure, read_burstgpt, read_mooncake

TWINS = {
    "philly": (
        "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"
        "2017-10-09 06:01:55,30.0,4,120.0,6214e9\n\n"
    ),
    "helios": (
        "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "1,u,vc1,j,8,32,1,COMPLETED,2020-04-01 00:00:02,2020-04-01 00:00:12,2020-04-01 01:00:12,3600,10\n"
        "2,u,vc1,j,0,32,1,COMPLETED,2020-04-01 00:00:03,2020-04-01 00:00:13,2020-04-01 01:00:12,3599,10\n"
        "3,u,vc2,j,1,4,1,FAILED,2020-04-01 00:01:02,2020-04-01 00:01:02,2020-04-01 00:02:02,60,0\n"
    ),
    "pai": (
        "a1,worker,4,Terminated,100.0,700.0,600,30,25,MISC\na2,ps,1,Terminated,50.0,60.0,600,30,,CPU\n"
        "a3,worker,1,Running,300.0,,600,30,100,V100\na4,tensorflow,2,Failed,20.0,80.0,600,30,100,P100\n"
    ),
    "alibaba": (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "openb-pod-0000,12000,16384,1,1000,,LS,Running,0,12537496,0\n"
        "openb-pod-0001,6000,12288,1,460,,LS,Running,427061,12902960,427061\n"
        "openb-pod-0002,6000,12288,0,0,,BE,Running,427062,12902960,427062\n"
    ),
    "muri": (
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0,"
        "resource_time_1,resource_time_2,priority\n0,8,1000,100,gpt2,4,43000,91000,430,0.6,419,49,0\n"
    ),
    "tiresias": "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,1,0,606,vgg19,164,30\n",
    "plain": "id,submit,gpus,duration\na,0,1,10\nb,5,2,20\n",
}
EXPECTED = {
    "philly": [(0, 4, 30), (3600, 1, 66)],
    "helios": [(0, 8, 3600), (60, 1, 60)],
    "pai": [(0, 2, 60), (80, 1, 600)],
    "alibaba": [(0, 1, 12537496), (427061, 1, 12902960 - 427061)],
    "muri": [(0, 8, 43)],
    "tiresias": [(0, 1, 164)],
    "plain": [(0, 1, 10), (5, 2, 20)],
}


@pytest.mark.parametrize("name", TWINS)
def test_job_traces_are_told_by_their_columns_and_read(name, tmp_path):
    path = tmp_path / "any.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(TWINS[name])
    assert [(job.submit, job.gpus, job.duration) for job in read_jobs(path)] == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("philly", "66.0,1,66.0", "66.0,x,66.0", "line 2: num_gpus must be a number, got 'x'"),
        ("philly", "66.0,1,66.0", "-66.0,1,-66.0", "line 2: duration must be a finite number from 0 on"),
        ("philly", "66.0,1,66.0", "nan,1,66.0", "line 2: duration must be a finite number"),
        ("philly", "66.0,1,66.0", "66.0,2,66.0", "line 2: gpu_time 66.0 is not num_gpus x duration"),
        ("philly", "66.0,1,66.0,11cb48", "66.0,1", "line 2: has 3 fields instead of 5"),
        ("philly", "2017-10-09 07:01:55", "soon", "line 2: timestamp must look like"),
        ("philly", "gpu_time,cluster", "gpu_time,cluster,mood", "unknown columns mood"),
        ("helios", "2020-04-01 00:00:12", "2021-04-01 00:00:12", "needs submit_time <= start_time <= end_time"),
        ("pai", "700.0", "70.0", "end_time 70 is before start_time 100"),
        ("alibaba", "460", "1460", "gpu_milli must be at most 1000"),
        ("plain", "5,2,20", "5,2.5,20", "line 3: gpus must be a whole number"),
        ("plain", "id,", "name,", "known are Philly, Helios"),
    ],
)
def test_a_wrong_row_is_named_by_its_line(name, old, new, message, tmp_path):
    (tmp_path / "t.csv").write_text(TWINS[name].replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_jobs(tmp_path / "t.csv")


def burstgpt(extra=""):
    head = "Timestamp,{}Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    if extra == "sessions":
        return head.format("Session ID,Elapsed time,") + (
            "5,1,3.5,ChatGPT,472,18,490,Conversation log\n45,,,GPT-4,1087,0,1087,API log\n"
        )
    return head.format("") + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n"


@pytest.mark.parametrize("extra", ["", "sessions"])
def test_both_releases_of_burstgpt_are_read(extra, tmp_path):
    (tmp_path / "t.csv").write_text(burstgpt(extra))
    trace = read_requests(tmp_path / "t.csv")
    assert trace.arrival.tolist() == [0, 40]
    assert trace.kind == ("ChatGPT, Conversation log", "GPT-4, API log")
    assert trace.failures == 0.5
    assert len(trace.where(trace.output > 0)) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("472,18,490", "472,-18,454", "line 2: Response tokens must be a finite number from 0 on"),
        ("472,18,490", "472,18,491", "line 2: Total tokens 491 is not 472"),
        ("API log", "Diary", "line 3: unknown model 'GPT-4' or log 'Diary'"),
        ("\n45,", "\n4,", "line 3: it is before the row above"),
    ],
)
def test_wrong_requests_are_named_by_their_line(old, new, message, tmp_path):
    (tmp_path / "t.csv").write_text(burstgpt().replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_burstgpt(tmp_path / "t.csv")
    if "above" in message:
        assert read_burstgpt(tmp_path / "t.csv", sort=True).arrival.tolist() == [0, 1]


def test_azure_and_mooncake_twins_are_read(tmp_path):
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    trace = read_requests(tmp_path / "azure.csv")
    assert trace.arrival[1] == pytest.approx(0.052, abs=1e-6)
    lines = [
        {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]},
        {"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2]},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trace = read_requests(tmp_path / "m.jsonl")
    assert trace.arrival[1] == pytest.approx(3.053)
    assert trace.prefix == ((46, 47), (46, 2))
    (tmp_path / "m.jsonl").write_text('{"timestamp": 1, "hash_ids": []}')
    with pytest.raises(ValueError, match="line 1: needs the fields"):
        read_mooncake(tmp_path / "m.jsonl")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no request trace"):
        read_requests(tmp_path / "x.csv")


def test_arrays_that_are_no_trace_are_refused():
    with pytest.raises(ValueError, match="row 1 is before"):
        RequestTrace(np.array([1.0, 0.0]), np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="output of row 1 is negative"):
        RequestTrace(np.array([0.0, 1.0]), np.ones(2), np.array([1, -1]))
    with pytest.raises(ValueError, match="not a number"):
        RequestTrace(np.array([0.0, np.nan]), np.ones(2), np.ones(2))


def test_gamma_and_zipf_fits_recover_what_was_drawn():
    fits = []
    for seed in range(20):
        arrival = b.GammaGaps(0.25, 7.0).sample(100_000, seed)
        gaps = np.diff(arrival)
        fit = b.GammaGaps.fit(gaps)
        assert fit.shape == pytest.approx(0.25, rel=0.05)
        assert fit.rate == pytest.approx(7.0, rel=0.02)
        fits.append(
            stats.kstest(gaps[:2000], stats.gamma(fit.shape, scale=1 / (fit.rate * fit.shape)).cdf).pvalue > 0.01
        )
        lengths = b.ZipfLengths(1.1, 1024).sample(100_000, seed)
        assert b.ZipfLengths.fit(lengths, 1024).exponent == pytest.approx(1.1, abs=0.02)
    assert np.mean(fits) >= 0.9
    assert b.coefficient_of_variation(gaps) == pytest.approx(2.0, rel=0.05)


def test_gaps_are_those_of_vllms_formula():
    burstiness, rate = 0.5, 3.0
    theta = 1.0 / (rate * burstiness)
    gaps = np.random.default_rng(4).gamma(shape=burstiness, scale=theta, size=100)
    assert b.GammaGaps(burstiness, rate).sample(100, 4) == pytest.approx(np.cumsum(gaps))


def test_a_poisson_stream_has_no_memory():
    arrival = b.GammaGaps(1.0, 20.0).sample(100_000, 0)
    assert b.coefficient_of_variation(np.diff(arrival)) == pytest.approx(1, abs=0.02)
    assert [b.fano(arrival, window) for window in (1, 10)] == pytest.approx([1, 1], abs=0.15)
    assert np.abs(b.autocorrelation(arrival, 1.0, 5)).max() < 0.05
    assert b.hurst(arrival) == pytest.approx(0.5, abs=0.08)
    criteria = b.gap_criteria(np.diff(arrival)[:5000])
    assert min(criteria, key=criteria.get) in ("exponential", "gamma", "weibull")
    assert criteria["log-normal"] > criteria["exponential"] + 100


def test_whole_seconds_are_spread_without_changing_the_counts():
    true = b.GammaGaps(1.0, 5.0).sample(20_000, 1)
    spread = b.spread_whole_seconds(np.floor(true), seed=2)
    assert np.array_equal(np.floor(spread), np.floor(true))
    assert b.GammaGaps.fit(np.diff(spread)).shape == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match="whole seconds"):
        b.spread_whole_seconds(true)


def bursty_twin(seed=0):
    """A service with lulls: bursts of a few minutes' rhythm, twenty minutes."""
    rng = np.random.default_rng(seed)
    rate = 4 * (1 + np.sin(np.arange(1200) / 60)) * rng.gamma(0.5, 2.0, 1200)
    arrival = np.sort(np.concatenate([second + rng.uniform(0, 1, rng.poisson(r)) for second, r in enumerate(rate)]))
    prompt = rng.lognormal(6, 1, len(arrival)).astype(int) + 1
    return RequestTrace(arrival - arrival[0], prompt, (prompt * rng.uniform(0.1, 0.5, len(arrival))).astype(int) + 1)


def alike(trace, model, seeds):
    """Means over drawn traces beside the trace's own statistics, with the tolerances that are claimed."""
    drawn = [model.sample(float(trace.arrival[-1]), seed) for seed in range(seeds)]

    def mean(statistic):
        return np.mean([statistic(item) for item in drawn])

    assert mean(len) == pytest.approx(len(trace), rel=0.1)
    assert mean(lambda t: b.coefficient_of_variation(t.gaps)) == pytest.approx(
        b.coefficient_of_variation(trace.gaps), rel=0.1
    )
    for window in (1.0, 10.0, 60.0):
        assert mean(lambda t, w=window: b.fano(t.arrival, w)) == pytest.approx(b.fano(trace.arrival, window), rel=0.2)
    assert mean(lambda t: b.autocorrelation(t.arrival, 10.0, 1)[0]) == pytest.approx(
        b.autocorrelation(trace.arrival, 10.0, 1)[0], abs=0.1
    )
    for lengths in ("prompt", "output"):
        distances = [stats.ks_2samp(getattr(t, lengths), getattr(trace, lengths)).statistic for t in drawn]
        assert np.mean(distances) < 0.05
    return drawn


def test_a_generated_trace_is_like_the_one_it_was_learned_from():
    trace = bursty_twin()
    drawn = alike(trace, b.ArrivalModel.fit(trace), seeds=12)
    again = b.ArrivalModel.fit(trace).sample(float(trace.arrival[-1]), 0)
    assert np.array_equal(drawn[0].arrival, again.arrival)
    assert len(b.ArrivalModel.fit(trace).sample(600.0, 1, rate=40.0)) == pytest.approx(24_000, rel=0.25)


def test_a_busy_sample_and_its_profiles_follow_their_rules(tmp_path):
    rows = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    for day in range(1, 11):
        for hour, count in ((3, 2), (10, 20), (12, 20)):
            rows += [
                f"2017-10-{day:02d} {hour:02d}:00:{i:02d},{100 * (i + 1)},1,{100 * (i + 1)},vc" for i in range(count)
            ]
    (tmp_path / "p.csv").write_text("\n".join(rows))
    jobs = read_philly(tmp_path / "p.csv")
    sample = busy_sample(jobs, 100, hours=4, seed=1)
    assert len({job.id for job in sample}) == 100
    assert sample[0].submit == 0 and sample[-1].submit <= 4 * 3600
    with pytest.raises(ValueError, match="count must be at most 400"):
        busy_sample(jobs, 401, hours=4)


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "variation"),
    [
        ("azure/AzureLLMInferenceTrace_code.csv", 13.2),
        ("azure/AzureLLMInferenceTrace_conv.csv", 1.09),
        ("mooncake/conversation_trace.jsonl.gz", 3.03),
    ],
)
def test_real_services_are_as_bursty_as_known_and_can_be_imitated(data_file, file, variation):
    trace = read_requests(data_file(f"llm_serving/{file}"))
    assert b.coefficient_of_variation(trace.gaps) == pytest.approx(variation, rel=0.01)
    window = 0.1 if "mooncake" in file else 1.0
    if "mooncake" not in file:
        alike(trace, b.ArrivalModel.fit(trace, window), seeds=12)


@pytest.mark.data
def test_real_cluster_traces_are_read(data_file):
    jobs = read_jobs(data_file("cluster/philly/philly.csv.gz"))
    assert len(jobs) == 82_247
    assert sum(job.gpus * job.duration for job in jobs) / 86_400 == pytest.approx(40_753.27, rel=1e-6)
    assert len(read_jobs(data_file("cluster/muri_traces/cluster_trace.csv"))) == 400
    assert len(read_jobs(data_file("cluster/tiresias/60_job.csv"))) == 60
    table = data_file("cluster/gavel_pairs/simulation_throughputs.v100_k80.json")
    factors = [pair[0] for pair in InterferenceTable.from_gavel(table).entries.values() if pair is not None]
    assert np.quantile(factors, [0.25, 0.5, 0.75]) == pytest.approx([1.19, 1.47, 2.07], abs=0.05)
    profiles = read_profiles(table)
    given = with_profiles(busy_sample(jobs, 240, seed=0), profiles, 0)
    assert len(given) == 240 and all(job.profile is not None for job in given)
    assert Cluster(16, 4).gpus == 64


@pytest.mark.data
def test_azure_rows_are_all_there(data_file):
    assert len(read_azure(data_file("llm_serving/azure/AzureLLMInferenceTrace_conv.csv"))) == 19_366
