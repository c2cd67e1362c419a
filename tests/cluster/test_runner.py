"""Real processes under a policy: accumulation is exact, sharing happens, crashes are survived and hurt nobody else."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from train_job import train

from gossamer.cluster import FIFO, BestSharingBenefit, ConstantInterference
from gossamer.cluster.runner import Agent, Controller, JobSpec, read_specs
from gossamer.cluster.runner.training import AccumulatingStep, TrainingSession, refuse_inexact

SCRIPT = (sys.executable, str(Path(__file__).with_name("train_job.py")))


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


@pytest.mark.parametrize("sub_batch", [1, 3, 8, 24])
def test_accumulated_steps_are_those_of_the_full_batch(sub_batch):
    def train(size):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = AccumulatingStep(model, optimizer, loss_of, size)
        losses = [
            step(torch.randn(24, 5, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)) for _ in range(10)
        ]
        return torch.cat([p.flatten() for p in model.parameters()]), losses

    whole, losses = train(24)
    parts, part_losses = train(sub_batch)
    assert (whole - parts).abs().max() <= 1e-10
    assert losses == pytest.approx(part_losses, rel=1e-10)


def test_models_that_cannot_be_accumulated_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="layers 1, 2 depend on how a batch is divided"):
        refuse_inexact(model)
    step = AccumulatingStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, 2)
    with pytest.raises(ValueError, match="accumulates: false"):
        step(torch.randn(4, 4), torch.randn(4, 4))
    refuse_inexact(model.eval())
    with pytest.raises(ValueError, match="at least 1"):
        AccumulatingStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_of, 0)


def run(specs, policy, folder, interference=None, retries=2, gpus=1):
    """All jobs on one agent of this machine; gives the outcomes and the controller."""

    async def main():
        controller = Controller(specs, policy, 1, gpus, interference=interference, retries=retries)
        ready = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(controller.run(on_ready=ready.set_result))
        agent = Agent("127.0.0.1", await ready, list(range(gpus)), folder, controller.secret)
        agent_task = asyncio.create_task(agent.run())
        await asyncio.wait_for(work, 60)
        await asyncio.wait_for(agent_task, 10)
        return controller

    return asyncio.run(main())


def weights(folder, name):
    state = torch.load(folder / name / "checkpoint.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state["model"].values()])


@pytest.mark.ranks
def test_shared_and_crashed_jobs_train_what_they_train_alone(tmp_path):
    """Two jobs share a device, one with sub-batches; one is killed half-way, queued again, and resumes."""
    specs = [
        JobSpec("steady", SCRIPT, iterations=50, batch=8, seconds=0.04, env={"PAUSE": "0.04"}),
        JobSpec(
            "killed", SCRIPT, iterations=24, batch=8, seconds=0.04, env={"CRASH_AT": "12", "PAUSE": "0.04"},
            memory_per_sample=2100.0,
        ),
    ]  # fmt: skip
    crowded = replace(specs[0], memory_fixed=12_000.0)  # beside which the other only fits with half of its batch
    controller = run([crowded, specs[1]], BestSharingBenefit(), tmp_path, ConstantInterference(1.05))
    killed, steady = controller.outcomes["killed"], controller.outcomes["steady"]
    assert killed.done and steady.done
    assert (killed.crashes, steady.crashes) == (1, 0)
    assert "killed" in steady.partners
    assert min(killed.sub_batch, steady.sub_batch) < 8
    for spec in specs:
        session = TrainingSession(default_iterations=spec.iterations, default_batch=8)
        assert (train(session) - weights(tmp_path, spec.name)).abs().max() <= 1e-10
    assert (tmp_path / "killed" / "crashed").exists()


PLAIN = """
import json, os, time
steps = int(os.environ["GOSSAMER_ITERATIONS"])
time.sleep(0.01 * steps)
path = os.path.join(os.environ["GOSSAMER_JOB_FOLDER"], "progress.json")
with open(path + ".new", "w") as file:
    json.dump({"iteration": steps, "seconds": 0.01 + 0.005 * int(os.environ["GOSSAMER_SUB_BATCH"]), "memory": 0}, file)
os.replace(path + ".new", path)
"""


@pytest.mark.ranks
def test_step_times_are_measured_and_failures_end_after_their_retries(tmp_path):
    specs = [
        JobSpec("measured", (sys.executable, "-c", PLAIN), iterations=12, batch=8, accumulates=False),
        JobSpec("hopeless", ("false",), iterations=2, batch=8, seconds=0.01),
        JobSpec("absent", ("/no/such/program",), iterations=2, seconds=0.01),
    ]
    controller = run(specs, FIFO(), tmp_path, retries=1)
    assert controller.outcomes["measured"].done
    assert controller.outcomes["measured"].alone == pytest.approx(12 * 0.05)
    hopeless = controller.outcomes["hopeless"]
    assert (hopeless.code, hopeless.crashes, hopeless.done) == (1, 1, False)
    assert controller.outcomes["absent"].code == 127


def test_a_job_that_fails_while_it_is_measured_ends_the_run_with_its_name(tmp_path):
    with pytest.raises(ValueError, match="job bad ended with code 1 while its step time was measured"):
        run([JobSpec("bad", ("false",), iterations=2, batch=8)], FIFO(), tmp_path)


def test_a_stranger_is_not_let_in(tmp_path):
    async def main():
        controller = Controller([JobSpec("a", ("true",), 1)], FIFO())
        ready = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(controller.run(on_ready=ready.set_result))
        await asyncio.wait_for(Agent("127.0.0.1", await ready, [0], tmp_path, "wrong").run(), 5)
        work.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: []", "at least one job"),
        ("jobs: [{name: a, command: x}]", "job a has no iterations"),
        ("jobs: [{name: a, command: x, iterations: 1, mood: 2}]", "unknown fields mood"),
        ("jobs: [{name: a, command: x, iterations: 0}]", "iterations must be a whole number from 1 on"),
        ("jobs: [{name: a/b, command: x, iterations: 1}]", "without slashes"),
        ("jobs: [{name: a, command: x, iterations: 1, seconds: -1}]", "seconds must not be negative"),
        ("jobs: [{name: a, command: x, iterations: 1}, {name: a, command: x, iterations: 1}]", "names must differ"),
        ("jobs: [1]", "job 0 must be a mapping"),
        ("[", "is not YAML"),
    ],
)
def test_a_wrong_job_file_is_refused(text, message, tmp_path):
    (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_specs(tmp_path / "jobs.yaml")


@pytest.mark.ranks
def test_the_command_runs_a_job_file(tmp_path):
    from typer.testing import CliRunner

    from gossamer.cluster.cli import app

    (tmp_path / "jobs.yaml").write_text(
        "jobs:\n- {name: one, command: 'true', iterations: 4, batch: 4, seconds: 0.01}\n"
    )
    options = ["--folder", str(tmp_path / "out"), "--policy", "castor", "--json"]
    done = CliRunner().invoke(app, ["cluster", "run", str(tmp_path / "jobs.yaml"), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert found[0]["name"] == "one" and found[0]["code"] == 0
    assert (tmp_path / "out" / "one" / "log.txt").exists()


def test_a_gang_larger_than_a_machine_is_refused():
    with pytest.raises(ValueError, match="needs a node with as many GPUs"):
        Controller([JobSpec("a", ("true",), 1, gpus=2)], FIFO())
