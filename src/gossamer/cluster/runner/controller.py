"""The controller: real processes under the policies that the simulator knows.

It keeps the simulator's own state of the cluster, with the real clock: a policy's ``start`` launches a process, ends
and progress come from agents. So what was tried in simulation is what runs.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.cluster._cluster import Cluster
from gossamer.cluster._interference import Interference
from gossamer.cluster._jobs import Job, Profile
from gossamer.cluster._predict import PredictedInterference
from gossamer.cluster._run import FixedTrainer, Run
from gossamer.cluster._simulate import Policy
from gossamer.cluster._state import ClusterState, load_of
from gossamer.cluster._step_time import StepTime
from gossamer.cluster.runner._specs import JobSpec
from gossamer.cluster.runner._wire import receive, send
from gossamer.core.events import Simulation

_PROFILE_STEPS = 20


@dataclass
class Outcome:
    """What became of a job; times in seconds since the controller began.

    alone: expected seconds alone. sub_batch: the smallest that it ran with. partners: names of jobs that it shared a GPU
    with. code: of the last exit.
    """

    name: str
    submit: float
    start: float = math.nan
    finish: float = math.nan
    alone: float = math.nan
    sub_batch: int = 0
    crashes: int = 0
    code: int | None = None
    partners: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


@dataclass
class _Worker:
    writer: asyncio.StreamWriter
    gpus: list[int]
    node: int


class Controller:
    """Runs jobs on the GPUs of agents, under a policy.

    specs: the jobs. policy: for rigid jobs, non-preemptive ones by choice. nodes, gpus_per_node, gpu_memory: what the
    agents bring; the work begins when all have come. interference: what is believed about sharing; a prediction is
    corrected by what is seen. retries: a job that crashes is queued again so often, with its resume flag.

    Raises:
        ValueError: a gang is larger than a node.
    """

    def __init__(
        self,
        specs: Sequence[JobSpec],
        policy: Policy,
        nodes: int = 1,
        gpus_per_node: int = 1,
        gpu_memory: float = 16_384.0,
        interference: Interference | None = None,
        retries: int = 2,
        on_change: Callable[[str, Outcome], object] | None = None,
    ) -> None:
        for spec in specs:
            if spec.gpus > gpus_per_node:
                raise ValueError(f"job {spec.name}: a gang of {spec.gpus} needs a node with as many GPUs")
        self._specs = {spec.name: spec for spec in specs}
        self.outcomes = {spec.name: Outcome(spec.name, spec.submit) for spec in specs}
        self.secret = secrets.token_hex(16)
        self._policy, self._retries = policy, retries
        self._cluster = Cluster(nodes, gpus_per_node, gpu_memory)
        self.belief = interference or PredictedInterference(math.log(0.5), {}, {})
        self._on_change = on_change or (lambda what, outcome: None)
        self._clock = Simulation()
        self._state = _LiveState(
            self._cluster, self._clock, self.belief, 0.0, 0.0, policy.order, lambda run: None, self._launch
        )
        self._workers: list[_Worker] = []
        self._runs: dict[str, Run] = {}
        self._profiles: dict[tuple[str, int, bool], asyncio.Future[dict[str, Any]]] = {}
        self._all_here, self._finished = asyncio.Event(), asyncio.Event()
        self._began = 0.0

    async def run(
        self, host: str = "127.0.0.1", port: int = 0, on_ready: Callable[[int], object] | None = None
    ) -> None:
        """Take agents, profile what needs it, run everything, and let the agents go.

        on_ready: called with the port once agents can connect.
        """
        server = await asyncio.start_server(self._connection, host, port)
        if on_ready is not None:
            on_ready(server.sockets[0].getsockname()[1])
        try:
            await self._all_here.wait()
            steps = {spec.name: await self._step_time(spec) for spec in self._specs.values()}
            self._began = time.monotonic()
            arrivals = [asyncio.create_task(self._submit(spec, steps[spec.name])) for spec in self._specs.values()]
            await asyncio.gather(*arrivals)
            await self._finished.wait()
        finally:
            for worker in self._workers:
                worker.writer.close()
            server.close()

    # -- agents ----------------------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await receive(reader)
            if hello is None or not secrets.compare_digest(str(hello.get("secret", "")), self.secret):
                return
            if len(hello["gpus"]) != self._cluster.gpus_per_node or len(self._workers) == self._cluster.nodes:
                send(writer, kind="refused", why="another number of agents or GPUs was expected")
                return
            worker = _Worker(writer, hello["gpus"], len(self._workers))
            self._workers.append(worker)
            if len(self._workers) == self._cluster.nodes:
                self._all_here.set()
            while (message := await receive(reader)) is not None:
                self._hear(message)
            self._lost(worker)
        finally:
            writer.close()

    def _hear(self, message: dict[str, Any]) -> None:
        waiting = next((future for key, future in self._profiles.items() if key[0] == message["job"]), None)
        if waiting is not None:
            if message["kind"] == "progress":
                waiting.seconds = message["seconds"]  # type: ignore[attr-defined]
            elif message["kind"] == "ended" and not waiting.done():
                waiting.set_result({"code": message["code"], "seconds": getattr(waiting, "seconds", math.nan)})
            return
        run = self._runs.get(message["job"])
        if run is None:
            return
        self._tick()
        if message["kind"] == "progress":
            self._progress(run, message)
        elif message["kind"] == "ended" and run.gpus:
            self._ended(run, message["code"])

    def _lost(self, worker: _Worker) -> None:
        """An agent has gone: its jobs have crashed."""
        self._tick()
        for run in list(self._state.running):
            if self._cluster.node(run.gpus[0]) == worker.node:
                self._ended(run, -1)

    # -- jobs ------------------------------------------------------------------------------------------------------

    async def _step_time(self, spec: JobSpec) -> StepTime:
        """Given, or a line through two measurements, alone: full batch and half of it."""
        if spec.seconds:
            return StepTime(0.0, spec.seconds / spec.batch)
        whole = await self._measure(spec, spec.batch)
        half = Profile("", StepTime(0, 1), spec.batch).sub_batches()[1:2]
        if not half or not spec.accumulates:
            return StepTime(0.0, whole / spec.batch)
        part = await self._measure(spec, half[0]) / (spec.batch // half[0])
        slope = min(max(0.0, (whole - part) / (spec.batch - half[0])), whole / spec.batch)
        return StepTime(whole - slope * spec.batch, slope)

    async def _measure(self, spec: JobSpec, sub_batch: int) -> float:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        key = (spec.name, sub_batch, True)
        self._profiles[key] = future
        worker = self._workers[0]
        steps = min(_PROFILE_STEPS, spec.iterations)
        self._tell(worker, spec, worker.gpus[: spec.gpus], sub_batch, steps, resume=False, profile=True)
        result = await future
        del self._profiles[key]
        if result["code"] != 0 or not result["seconds"] > 0:
            raise ValueError(
                f"job {spec.name} ended with code {result['code']} while its step time was measured; see its log.txt"
            )
        return float(result["seconds"])

    async def _submit(self, spec: JobSpec, step: StepTime) -> None:
        await asyncio.sleep(max(0.0, self._began + spec.submit - time.monotonic()))
        profile = Profile(spec.model or spec.name, step, spec.batch, spec.memory_fixed, spec.memory_per_sample)
        alone = spec.iterations * step.seconds(spec.batch)
        self._tick()
        job = Job(spec.name, self._state.now, spec.gpus, alone, profile)
        run = self._runs[spec.name] = Run(job, len(self._runs), FixedTrainer(job, self._cluster.packed(job.gpus)))
        self.outcomes[spec.name].alone = alone
        self._state.submit(run)
        self._schedule()

    def _schedule(self) -> None:
        self._tick()
        if self._state.pending:
            self._policy.schedule(self._state)

    def _launch(self, run: Run) -> None:
        """A policy has started a run."""
        spec, outcome = self._specs[run.job.id], self.outcomes[run.job.id]
        outcome.start = self._state.now if math.isnan(outcome.start) else outcome.start
        outcome.sub_batch = min(outcome.sub_batch or run.sub_batch, run.sub_batch)
        for partner in run.partners:
            outcome.partners.append(partner.job.id)
            self.outcomes[partner.job.id].partners.append(run.job.id)
        worker = self._workers[self._cluster.node(run.gpus[0])]
        devices = [worker.gpus[gpu % self._cluster.gpus_per_node] for gpu in run.gpus]
        self._tell(worker, spec, devices, run.sub_batch, spec.iterations, resume=outcome.crashes > 0, profile=False)
        self._on_change("started", outcome)

    @staticmethod
    def _tell(
        worker: _Worker,
        spec: JobSpec,
        gpus: Sequence[int],
        sub_batch: int,
        iterations: int,
        resume: bool,
        profile: bool,
    ) -> None:
        send(
            worker.writer, kind="launch", job=spec.name, command=list(spec.command), env=dict(spec.env), gpus=list(gpus),
            iterations=iterations, batch=spec.batch, sub_batch=sub_batch, resume=resume, profile=profile,
        )  # fmt: skip

    def _progress(self, run: Run, message: dict[str, Any]) -> None:
        """Believe what a process says of itself, and learn from it when it shares."""
        spec = self._specs[run.job.id]
        run.done, run.since = run.job.duration * message["iteration"] / spec.iterations, self._state.now
        profile = run.job.profile
        assert profile is not None
        if len(run.partners) == 1 and isinstance(self.belief, PredictedInterference):
            partner = next(iter(run.partners))
            if self._state.now - max(run.held, partner.held) > 2 * message["seconds"]:
                alone = profile.step.seconds(run.sub_batch, profile.batch // run.sub_batch)
                self.belief.observe(load_of(run), load_of(partner), max(1.0, message["seconds"] / alone))

    def _ended(self, run: Run, code: int) -> None:
        outcome = self.outcomes[run.job.id]
        outcome.code = code
        if code != 0 and outcome.crashes < self._retries:
            outcome.crashes += 1
            self._state.preempt(run)
            self._on_change("crashed", outcome)
        else:
            self._state.retire(run)
            outcome.finish = self._state.now
            self._on_change("finished" if code == 0 else "failed", outcome)
        self._schedule()
        if len(self._runs) == len(self._specs) and not self._state.pending and not self._state.running:
            self._finished.set()

    def _tick(self) -> None:
        self._clock.now = time.monotonic() - self._began


class _LiveState(ClusterState):
    """The simulator's state with a real clock: nothing ends until an agent says so."""

    def __init__(self, *arguments: Any) -> None:
        *rest, self._launched = arguments
        super().__init__(*rest)

    def start(self, run: Run, gpus: Sequence[int], sub_batch: int = 0, substrate: str = "time-slice") -> None:
        """Launch the process as well."""
        if len({self.cluster.node(gpu) for gpu in gpus}) > 1:
            raise ValueError(f"job {run.job.id!r} would span machines, which the runner does not do")
        super().start(run, gpus, sub_batch, substrate)
        self._launched(run)

    def retire(self, run: Run) -> None:
        """A process has ended for good."""
        run.finished = self.now
        self._leave(run)
