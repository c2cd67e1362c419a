"""Waiting jobs by class, and running jobs by how they would take a partner.

Both indexes exist so that a decision costs what changes, not what waits: jobs of one class need the same GPUs and the
same model, so where the first of them cannot start, none of them can.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from gossamer.cluster._jobs import Profile
from gossamer.cluster._run import Run

JobClass = tuple[int, int]
PartnerClass = tuple[int, int, float]


class Pending:
    """Waiting jobs in the order of ``run.order``, with ``run.number`` among equals; iterates in that order."""

    def __init__(self) -> None:
        self._classes: dict[JobClass, list[tuple[float, Run]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Run]:
        """All of them; a job may be started while iterating."""
        return iter([run for _, run in sorted(entry for entries in self._classes.values() for entry in entries)])

    def add(self, run: Run) -> None:
        """Put a job in."""
        insort(self._classes.setdefault(_job_class(run), []), (run.order, run))
        self._count += 1

    def remove(self, run: Run) -> None:
        """Take a job out."""
        entries = self._classes[_job_class(run)]
        del entries[bisect_left(entries, (run.order, run))]
        self._count -= 1

    def first_of_classes(self) -> Iterator[Run]:
        """Jobs in order, but of every class only until one of it is not started by whoever iterates.

        Equivalent to going through all of them where, within a class, a job can start only if the one before could.
        """
        heads = [(*entries[0], entries) for entries in self._classes.values() if entries]
        heapify(heads)
        while heads:
            _, run, entries = heads[0]
            yield run
            if run.gpus and entries:  # it was started, so it is out of the queue
                heapreplace(heads, (*entries[0], entries))
            else:
                heappop(heads)


def _job_class(run: Run) -> JobClass:
    return run.job.gpus, id(run.job.profile)


class Partners:
    """Running jobs with GPUs of their own, by class, each class sorted by expected end.

    A class holds jobs that act alike as partners: same profile, sub-batch and present slow-down.
    """

    def __init__(self) -> None:
        self._classes: dict[PartnerClass, list[tuple[float, Run]]] = {}
        self._profiles: dict[PartnerClass, Profile | None] = {}
        self._place: dict[Run, tuple[PartnerClass, float]] = {}

    def update(self, run: Run, end: float) -> None:
        """File ``run`` under its present state, or take it out where it has no GPU for itself."""
        known = self._place.pop(run, None)
        if known is not None:
            key, old_end = known
            entries = self._classes[key]
            del entries[bisect_left(entries, (old_end, run))]
        if run.alone:
            key = id(run.job.profile), run.sub_batch, run.slowdown
            self._profiles[key] = run.job.profile
            insort(self._classes.setdefault(key, []), (end, run))
            self._place[run] = key, end

    def classes(self) -> Iterator[tuple[Profile | None, int, float, list[tuple[float, Run]]]]:
        """Profile, sub-batch, slow-down, and the ``(expected end, run)`` in order; none of them empty."""
        for key, entries in self._classes.items():
            if entries:
                yield self._profiles[key], key[1], key[2], entries


def ending_after(entries: list[tuple[float, Run]], time: float) -> int:
    """Where in a class the runs begin that end later than ``time``."""
    return bisect_right(entries, time, key=lambda entry: entry[0])
