"""The verbs ``gossamer cluster ...``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gossamer.core.report import shown_number

if TYPE_CHECKING:
    from gossamer.cluster import InterferenceTable, Job, Policy

app = typer.Typer(no_args_is_help=True)
_room = typer.Typer(no_args_is_help=True)
app.add_typer(_room, name="cluster", help="Clusters: policies on traces, load, energy. Every verb has --json.")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.callback()
def _rooms() -> None:
    """Hold the room's verbs."""


def policies() -> dict[str, Callable[[], Policy]]:
    """Policies for rigid jobs, by name."""
    from gossamer import cluster

    makers: tuple[Callable[[], Policy], ...] = (
        cluster.FIFO, cluster.EasyBackfill, cluster.SJF, cluster.SRTF, cluster.Tiresias, cluster.Themis,
        cluster.GandivaLike, cluster.FirstFitSharing, cluster.BestSharingBenefit, cluster.Castor,
    )  # fmt: skip
    return {maker().name: maker for maker in makers}


@_room.command("simulate")
def simulate_command(
    trace: Annotated[Path, typer.Argument(help="Philly, Helios, PAI, Alibaba, Muri, Tiresias or plain CSV, also .gz.")],
    nodes: Annotated[int, typer.Option(help="Nodes.")] = 16,
    gpus: Annotated[int, typer.Option(help="GPUs of each node.")] = 4,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; give it several times to compare.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Take so many jobs, drawn from the busiest hours.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Draw that often, and show means.")] = 1,
    slowdown: Annotated[float, typer.Option(help="What sharing a GPU costs each job.")] = 1.3,
    pairs: Annotated[Path | None, typer.Option(help="Measured slow-downs instead: a throughput file of Gavel.")] = None,
    restart: Annotated[float, typer.Option(help="Seconds that resuming a job costs.")] = 30.0,
    workers: Annotated[int, typer.Option(min=1, help="Replays at a time.")] = 1,
    ray: Annotated[str | None, typer.Option("--ray", help="Address of a Ray cluster to replay on.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report here.")] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace under several policies and compare them."""
    from gossamer.cluster import Cluster, ConstantInterference, sweep, write_report

    known = policies()
    chosen = policy or ["fifo", "bsbf"]
    for name in chosen:
        if name not in known:
            raise ValueError(f"policy must be one of {', '.join(known)}, got {name!r}")
    cluster = Cluster(nodes, gpus)
    traces, table = _jobs(trace, jobs, seeds, pairs, cluster.gpus)
    results = sweep(
        traces, [known[name] for name in chosen], cluster, table or ConstantInterference(slowdown), workers, ray,
        restart_seconds=restart,
    )  # fmt: skip
    if html is not None:
        write_report(results[0], html, f"{trace.name} on {nodes} x {gpus} GPUs")
    summaries = [_mean([row[index].summary() for row in results]) for index in range(len(chosen))]
    if as_json:
        print(
            json.dumps(
                {"trace": str(trace), "nodes": nodes, "gpus_per_node": gpus, "seeds": seeds, "policies": summaries}
            )
        )
        return
    shown = Table("policy", "mean JCT, h", "p99, h", "queueing, h", "makespan, h", "utilisation", "restarts", "shared")
    for s in summaries:
        hours = [shown_number(s[key] / 3600) for key in ("mean_jct", "p99_jct", "mean_queueing", "makespan")]
        shown.add_row(s["policy"], *hours, f"{100 * s['utilisation']:.0f} %", f"{s['restarts']:g}", f"{s['shared']:g}")
    Console().print(shown)
    if html is not None:
        Console(stderr=True).print(f"wrote {html}")


def _jobs(
    trace: Path, count: int | None, seeds: int, pairs: Path | None, gpus: int
) -> tuple[list[list[Job]], InterferenceTable | None]:
    from gossamer.cluster import InterferenceTable
    from gossamer.cluster.traces import read_jobs
    from gossamer.cluster.traces.gavel import read_profiles
    from gossamer.cluster.traces.philly import busy_sample, with_profiles

    every = read_jobs(trace)
    if seeds > 1 and count is None:
        raise ValueError("seeds above 1 need --jobs: without it every draw is the whole trace")
    drawn = [busy_sample(every, count, seed=seed, most_gpus=gpus) if count else every for seed in range(seeds)]
    if pairs is None:
        return drawn, None
    profiles = read_profiles(pairs)
    return [with_profiles(jobs, profiles, seed) for seed, jobs in enumerate(drawn)], InterferenceTable.from_gavel(pairs)


def _mean(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    first = summaries[0]
    numbers = {key: sum(s[key] for s in summaries) / len(summaries) for key in first if key != "policy"}
    return {"policy": first["policy"], **numbers}


@_room.command("trace")
def trace_command(
    trace: Annotated[Path, typer.Argument(help="A request trace of Azure, BurstGPT or Mooncake, also .gz.")],
    like: Annotated[
        Path | None, typer.Option(help="Write a trace like it here, as JSON lines of Mooncake's form.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Its length; that of the trace by default.")] = None,
    rate: Annotated[float | None, typer.Option(help="Its requests per second; those of the trace by default.")] = None,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Show how bursty a request trace is; write another one like it."""
    from gossamer.cluster.traces import ArrivalModel, read_requests
    from gossamer.core.files import atomic_write

    requests = read_requests(trace)
    found = {"given": _statistics(requests)}
    if like is not None:
        drawn = ArrivalModel.fit(requests).sample(seconds or float(requests.arrival[-1]), seed, rate)
        found["drawn"] = _statistics(drawn)
        with atomic_write(like) as temporary, temporary.open("w", encoding="utf-8") as file:
            for at, prompt, output in zip(drawn.arrival, drawn.prompt, drawn.output, strict=True):
                fields = {"timestamp": round(1000 * at), "input_length": int(prompt), "output_length": int(output)}
                file.write(json.dumps({**fields, "hash_ids": []}) + "\n")
    if as_json:
        print(json.dumps(found))
        return
    table = Table("", *found)
    for key in found["given"]:
        table.add_row(key, *(shown_number(column[key]) for column in found.values()))
    Console().print(table)


def _statistics(requests: Any) -> dict[str, float]:
    from gossamer.cluster.traces import burstiness

    gaps = requests.gaps
    fano = {f"Fano factor, {window:g} s": burstiness.fano(requests.arrival, window) for window in (1.0, 10.0, 60.0)}
    return {
        "requests": len(requests),
        "seconds": float(requests.arrival[-1]),
        "requests per second": len(requests) / float(requests.arrival[-1]),
        "coefficient of variation of the gaps": burstiness.coefficient_of_variation(gaps),
        **fano,
        "Hurst exponent": burstiness.hurst(requests.arrival),
        "mean prompt tokens": float(requests.prompt.mean()),
        "mean output tokens": float(requests.output.mean()),
        "failures": requests.failures,
    }


@_room.command("load")
def load_command(
    address: Annotated[str, typer.Argument(help="Of a service with OpenAI's completions, like http://127.0.0.1:8000.")],
    trace: Annotated[Path | None, typer.Option(help="Send the requests of this trace, each at its time.")] = None,
    speed: Annotated[float, typer.Option(help="So many times as fast as the trace.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Without a trace: requests per second.")] = 1.0,
    burstiness: Annotated[float, typer.Option(help="Without a trace: 1 is Poisson, less is more bursty.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="So many requests at most.")] = 100,
    prompt: Annotated[int, typer.Option(min=1, help="Without a trace: tokens of a prompt.")] = 32,
    output: Annotated[int, typer.Option(min=1, help="Without a trace: tokens to ask for.")] = 16,
    model: Annotated[str, typer.Option(help="The model's name at the service.")] = "default",
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Load a service, every request at its time whatever became of those before, and show its latencies."""
    import numpy as np

    from gossamer.cluster.load import replay
    from gossamer.cluster.traces import GammaGaps, RequestTrace, read_requests

    if trace is not None:
        sent = read_requests(trace).faster(speed)
    else:
        if not (rate > 0 and burstiness > 0):
            raise ValueError(f"rate and burstiness must be positive, got {rate}, {burstiness}")
        arrival = GammaGaps(burstiness, rate).sample(requests, seed)
        sent = RequestTrace(arrival - arrival[0], np.full(requests, prompt), np.full(requests, output))
    found = replay(sent, address, model, most=requests).summary()
    if as_json:
        print(json.dumps(found))
        return
    counts = [f"{found[key]:.4g} {key.replace('_', ' ')}" for key in found if not isinstance(found[key], dict)]
    Console().print(", ".join(counts), highlight=False)
    table = Table("ms", "mean", "p50", "p90", "p99", "max")
    for name, row in found.items():
        if isinstance(row, dict) and row:
            table.add_row(name, *(shown_number(1000 * row[key]) for key in ("mean", "p50", "p90", "p99", "max")))
    Console().print(table)


@_room.command("energy")
def energy_command(
    tasks: Annotated[int, typer.Option(min=1, help="Synthetic deadline tasks.")] = 3277,
    theta: Annotated[float, typer.Option(help="How far a task may be squeezed.")] = 1.0,
    gpus: Annotated[int, typer.Option(help="GPUs of a node, which is on or off as a whole.")] = 1,
    hours: Annotated[float, typer.Option(help="Over which tasks arrive; 0: all at once.")] = 0.0,
    narrow: Annotated[bool, typer.Option("--narrow", help="Only settings that boards allowed.")] = False,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """Schedule deadline tasks with least energy, and compare with default clocks and with the bound."""
    import numpy as np

    from gossamer.cluster.energy.deadlines import EDL, synthetic_tasks
    from gossamer.cluster.energy.dvfs import NARROW, WIDE

    arrivals = np.sort(np.random.default_rng(seed).uniform(0, 3600 * hours, tasks)) if hours else None
    drawn = synthetic_tasks(tasks, seed, (0.15, 0.85) if hours else (0.25, 0.75), arrivals)
    scaled = EDL(theta=theta, gpus_per_node=gpus, interval=NARROW if narrow else WIDE)
    ours, default = scaled.schedule(drawn), replace(scaled, scale=False).schedule(drawn)
    found = {
        name: {"run_J": s.run, "idle_J": s.idle, "total_J": s.total, "nodes": s.nodes, "late": s.missed(drawn)}
        for name, s in (("default clocks", default), ("scaled", ours))
    }
    saving, most = 1 - ours.total / default.total, 1 - ours.bound / ours.default
    if as_json:
        print(json.dumps({"schedules": found, "saving": saving, "bound": most}))
        return
    table = Table("", "run, MJ", "idle, MJ", "total, MJ", "nodes", "late")
    for name, row in found.items():
        joules = [shown_number(row[key] / 1e6) for key in ("run_J", "idle_J", "total_J")]
        table.add_row(name, *joules, str(row["nodes"]), str(row["late"]))
    console = Console()
    console.print(table)
    console.print(f"saved {100 * saving:.1f} % of at most {100 * most:.1f} % (every task at its own best setting)")
    print("Synthetic tasks; the best measured settings of two real boards save 5 to 6 %.", file=sys.stderr)


@_room.command("run")
def run_command(
    jobs: Annotated[Path, typer.Argument(help="A YAML file with a list called jobs.")],
    folder: Annotated[Path, typer.Option(help="Logs and checkpoints go here, a folder a job.")] = Path("runs"),
    policy: Annotated[str, typer.Option(help="A policy without preemption.")] = "castor",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of each machine.")] = 1,
    memory: Annotated[float, typer.Option(help="MiB of a GPU.")] = 16_384.0,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; above 1 the others start: gossamer cluster agent.")] = 1,
    host: Annotated[str, typer.Option(help="Address for agents of other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for them; 0 takes a free one.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="Times that a crashed job is queued again.")] = 2,
    as_json: Json = False,
) -> None:
    """Run real training processes that share GPUs where that pays; crashed ones resume.

    Exits with 1 if a job did not end well.
    """
    import asyncio
    from dataclasses import asdict

    from gossamer.cluster.runner import Agent, Controller, Outcome, read_specs

    known = {
        name: maker for name, maker in policies().items() if name in ("fifo", "easy", "sjf", "ffs", "bsbf", "castor")
    }
    if policy not in known:
        raise ValueError(f"policy must be one of {', '.join(known)}, got {policy!r}")
    console = Console(stderr=True)

    def show(what: str, outcome: Outcome) -> None:
        console.print(f"{outcome.name} {what}", highlight=False)

    controller = Controller(read_specs(jobs), known[policy](), nodes, gpus, memory, retries=retries, on_change=show)

    async def main() -> None:
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(controller.run(host, port, ready.set_result))
        taken = await ready
        if nodes > 1:
            console.print(f"on every other machine: gossamer cluster agent {host} {taken} --secret {controller.secret}")
        agent = asyncio.create_task(Agent(host, taken, list(range(gpus)), folder, controller.secret).run())
        try:
            await work
        finally:
            await agent

    asyncio.run(main())
    outcomes = list(controller.outcomes.values())
    if as_json:
        print(json.dumps({"policy": policy, "jobs": [asdict(outcome) for outcome in outcomes]}))
    else:
        table = Table("job", "started, s", "finished, s", "alone, s", "sub-batch", "crashes", "shared with", "code")
        for o in outcomes:
            times = [shown_number(value) for value in (o.start, o.finish, o.alone)]
            table.add_row(o.name, *times, str(o.sub_batch), str(o.crashes), ", ".join(o.partners), str(o.code))
        Console().print(table)
    if not all(outcome.done for outcome in outcomes):
        raise typer.Exit(1)


@_room.command("agent")
def agent_command(
    host: Annotated[str, typer.Argument(help="Of the controller.")],
    port: Annotated[int, typer.Argument(help="Of the controller.")],
    secret: Annotated[str, typer.Option(help="What the controller shows when it starts.")],
    folder: Annotated[Path, typer.Option(help="Logs and checkpoints go here.")] = Path("runs"),
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to lend.")] = 1,
    as_json: Json = False,
) -> None:
    """Lend this machine's GPUs to a controller until it is done."""
    import asyncio

    from gossamer.cluster.runner import Agent

    asyncio.run(Agent(host, port, list(range(gpus)), folder, secret).run())
    if as_json:
        print(json.dumps({"done": True}))
