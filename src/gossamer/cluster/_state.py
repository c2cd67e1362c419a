"""What a policy sees and does: jobs that wait and run, GPUs, and the three moves start, preempt and move.

Moves take effect at once and are checked: gangs whole, memory respected, at most two jobs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gossamer.cluster._cluster import Cluster
from gossamer.cluster._interference import Interference
from gossamer.cluster._queues import Partners, Pending
from gossamer.cluster._run import Run, nodes_of
from gossamer.core.events import Simulation


class ClusterState:
    """The cluster at one moment.

    pending: jobs that wait, in the policy's order. running: jobs that run, in order of their last start.
    partners: running jobs by class, for policies that share. empty, single: GPUs without a job, and with one.
    residents: the jobs on each GPU. restarts: how often jobs were resumed.
    changed: running jobs that started, gained a GPU for themselves or changed pace; whoever uses it clears it.
    """

    def __init__(
        self,
        cluster: Cluster,
        simulation: Simulation,
        interference: Interference | None,
        restart_seconds: float,
        start_seconds: float,
        order: Callable[[Run], float],
        on_finish: Callable[[Run], None],
    ) -> None:
        self.cluster = cluster
        self.interference = interference
        self.pending = Pending()
        self.running: dict[Run, None] = {}
        self.partners = Partners()
        self.residents: list[list[Run]] = [[] for _ in range(cluster.gpus)]
        self.empty = cluster.gpus
        self.single = 0
        self.restarts = 0
        self._turns = 0
        self.changed: dict[Run, None] = {}
        self.segments: list[tuple[Run, tuple[int, ...], float, float]] = []
        self._simulation = simulation
        self._restart_seconds, self._start_seconds = restart_seconds, start_seconds
        self._order, self._on_finish = order, on_finish
        per_node = cluster.gpus_per_node
        self._free = [dict.fromkeys(range(node * per_node, (node + 1) * per_node)) for node in range(cluster.nodes)]
        self._by_free: list[dict[int, None]] = [{} for _ in range(per_node + 1)]
        self._by_free[per_node] = dict.fromkeys(range(cluster.nodes))

    @property
    def now(self) -> float:
        """The present time in seconds."""
        return self._simulation.now

    def free_on(self, node: int) -> int:
        """GPUs of a node without a job."""
        return len(self._free[node])

    def empty_on(self, node: int) -> Iterable[int]:
        """Those GPUs themselves."""
        return self._free[node]

    def packed(self, count: int) -> tuple[int, ...] | None:
        """``count`` empty GPUs on as few nodes as possible, fitting tightly; None where there are not so many."""
        if count > self.empty:
            return None
        for free in range(count, len(self._by_free)):  # one node that it fits best
            if self._by_free[free]:
                return tuple(self._some(next(iter(self._by_free[free])), count))
        taken: list[int] = []
        for free in range(len(self._by_free) - 1, 0, -1):  # the emptiest nodes, and a tight fit for what is left
            for node in self._by_free[free]:
                left = count - len(taken)
                if left <= free:
                    fitting = next(size for size in range(left, len(self._by_free)) if self._left(size, taken))
                    return (*taken, *self._some(self._left(fitting, taken)[0], left))
                taken += self._free[node]
        raise AssertionError("there are enough empty GPUs, and yet they were not found")

    def spread(self, count: int) -> tuple[int, ...] | None:
        """``count`` empty GPUs from the emptiest nodes first; None where there are not so many."""
        if count > self.empty:
            return None
        taken: list[int] = []
        for free in range(len(self._by_free) - 1, 0, -1):
            for node in sorted(self._by_free[free]):
                taken += self._some(node, count - len(taken))
                if len(taken) == count:
                    return tuple(taken)
        raise AssertionError("there are enough empty GPUs, and yet they were not found")

    def on_nodes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """So many empty GPUs of each node; ``ValueError`` where a node has not so many."""
        taken: list[int] = []
        for node, count in enumerate(counts):
            if count > len(self._free[node]):
                raise ValueError(f"node {node} has {len(self._free[node])} empty GPUs, and {count} were asked of it")
            taken += self._some(node, count)
        return tuple(taken)

    def _left(self, free: int, taken: Sequence[int]) -> list[int]:
        """Nodes with ``free`` empty GPUs of which none is taken."""
        used = {self.cluster.node(gpu) for gpu in taken}
        return [node for node in self._by_free[free] if node not in used]

    def _some(self, node: int, count: int) -> list[int]:
        free = self._free[node]
        return list(free) if len(free) <= count else [gpu for gpu, _ in zip(free, range(count), strict=False)]

    # -- moves ---------------------------------------------------------------------------------------------------

    def start(self, run: Run, gpus: Sequence[int], sub_batch: int = 0, substrate: str = "time-slice") -> None:
        """Start (or resume) a waiting job on ``gpus``, with ``sub_batch`` samples in flight (the full batch where 0).

        Raises:
            ValueError: the job runs already, the number of GPUs is not its gang's (elastic jobs take any), a GPU is
                given twice or has two jobs, the memory or the pair does not fit, or ``sub_batch`` does not divide
                the batch.
        """
        self._check(run, gpus, sub_batch)
        now, job = self.now, run.job
        self.pending.remove(run)
        self.running[run] = None
        profile = job.profile
        run.sub_batch = sub_batch or (profile.batch if profile is not None else 1)
        self._turns += 1
        run.substrate, run.turn = substrate, self._turns
        run.gpus, run.held, run.since = tuple(gpus), now, now
        run.placement = nodes_of(run.gpus, self.cluster.gpus_per_node)
        if run.started is None:
            run.started, run.ready = now, now + self._start_seconds
        else:
            run.restarts += 1
            self.restarts += 1
            run.ready = now + self._restart_seconds
        touched: dict[Run, None] = {}
        for gpu in run.gpus:
            residents = self.residents[gpu]
            if residents:
                partner = residents[0]
                del partner.alone[gpu]
                self.single -= 1
                touched[partner] = None
                partner.partners[run] = partner.partners.get(run, 0) + 1
                run.partners[partner] = run.partners.get(partner, 0) + 1
            else:
                self._take(gpu)
                run.alone[gpu] = None
                self.single += 1
            residents.append(run)
        run.trainer.place(run.placement, run.sub_batch)
        self._pace(run)
        for partner in touched:
            self._pace(partner)

    def preempt(self, run: Run) -> None:
        """Stop a running job, keep its progress, and let it wait again; resuming costs the restart time."""
        self._leave(run)
        run.order = self._order(run)
        self.pending.add(run)

    def move(self, run: Run, gpus: Sequence[int], sub_batch: int = 0) -> None:
        """Stop a running job and resume it on other GPUs at once, for the price of a restart."""
        self.preempt(run)
        self.start(run, gpus, sub_batch)

    def submit(self, run: Run) -> None:
        """A new job arrives (the simulator calls this)."""
        run.order = self._order(run)
        self.pending.add(run)

    # -- the rest is the engine's --------------------------------------------------------------------------------

    def _check(self, run: Run, gpus: Sequence[int], sub_batch: int) -> None:
        job = run.job
        if run.gpus or run.finished is not None:
            raise ValueError(f"job {job.id!r} does not wait, so it cannot be started")
        if job.application is None and len(gpus) != job.gpus:
            raise ValueError(f"job {job.id!r} is a gang of {job.gpus} and cannot run on {len(gpus)} GPUs")
        if len(set(gpus)) != len(gpus) or not gpus:
            raise ValueError(f"gpus of job {job.id!r} must be different and at least one, got {list(gpus)}")
        profile = job.profile
        if sub_batch and profile is not None and profile.batch % sub_batch:
            raise ValueError(f"sub_batch must divide the batch {profile.batch} of job {job.id!r}, got {sub_batch}")
        for gpu in gpus:
            residents = self.residents[gpu]
            if len(residents) > 1:
                raise ValueError(f"GPU {gpu} has two jobs already; job {job.id!r} cannot be the third")
            if residents and not self.fits(run, residents[0], sub_batch):
                raise ValueError(f"jobs {job.id!r} and {residents[0].job.id!r} do not fit on one GPU")

    def fits(self, run: Run, partner: Run, sub_batch: int = 0) -> bool:
        """Whether both jobs' memory fits on one GPU."""
        ours, theirs = run.job.profile, partner.job.profile
        if ours is None or theirs is None:
            return True
        return ours.memory(sub_batch or ours.batch) + theirs.memory(partner.sub_batch) <= self.cluster.gpu_memory

    def _take(self, gpu: int) -> None:
        node = gpu // self.cluster.gpus_per_node
        free, by_free = self._free[node], self._by_free
        count = len(free)
        del by_free[count][node]
        del free[gpu]
        by_free[count - 1][node] = None
        self.empty -= 1

    def _give(self, gpu: int) -> None:
        node = gpu // self.cluster.gpus_per_node
        free, by_free = self._free[node], self._by_free
        count = len(free)
        del by_free[count][node]
        free[gpu] = None
        by_free[count + 1][node] = None
        self.empty += 1

    def _leave(self, run: Run) -> None:
        """Take a run off its GPUs."""
        now = self.now
        run.done = run.work_done(now)
        run.service = run.gpu_seconds(now)
        self.segments.append((run, run.gpus, run.held, now))
        del self.running[run]
        for gpu in run.gpus:
            residents = self.residents[gpu]
            residents.remove(run)
            if residents:
                residents[0].alone[gpu] = None
                self.single += 1
            else:
                self._give(gpu)
                self.single -= 1
        partners, run.partners = run.partners, {}
        self.changed.pop(run, None)
        run.gpus, run.placement, run.alone, run.speed = (), (), {}, 0.0
        if self.interference is not None:
            self.partners.update(run, 0.0)
        if run.event is not None:
            run.event.cancel()
            run.event = None
        for partner in partners:
            del partner.partners[run]
            self._pace(partner)

    def _pace(self, run: Run) -> None:
        """Bring a run's progress up to now and plan its next milestone at its new speed."""
        now = self.now
        run.done = run.work_done(now)
        run.since = now
        run.slowdown = max(self._factor(run, partner) for partner in run.partners) if run.partners else 1.0
        run.speed = run.trainer.speed(run.done) / run.slowdown
        if run.event is not None:
            run.event.cancel()
        ahead = run.trainer.milestone(run.done) - run.done
        due = max(now, run.ready) + max(0.0, ahead) / run.speed
        run.event = self._simulation.at(due, lambda: self._milestone(run))
        if self.interference is not None:  # without it nobody shares
            self.partners.update(run, run.expected_end(now))
            self.changed[run] = None

    def _factor(self, run: Run, partner: Run) -> float:
        if self.interference is None:
            return 1.0
        ours, theirs = load_of(run), load_of(partner)
        later = run if run.turn > partner.turn else partner
        factors = self.interference.factors(ours, theirs, later.substrate)
        if factors is None:
            raise ValueError(f"jobs {run.job.id!r} and {partner.job.id!r} are known not to work on one GPU")
        return factors[0]

    def _milestone(self, run: Run) -> None:
        run.event = None
        reached = run.trainer.milestone(run.done)
        run.done, run.since = reached, self.now
        if reached >= run.trainer.work:
            run.finished = self.now
            self._leave(run)
            self._on_finish(run)
        else:
            self._pace(run)


def load_of(run: Run) -> tuple[str, float]:
    """A run's load, as interference tables know it."""
    profile = run.job.profile
    return profile.load(run.sub_batch or profile.batch) if profile is not None else ("", 1.0)
