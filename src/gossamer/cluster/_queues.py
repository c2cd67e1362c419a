"""Waiting jobs by class, and running jobs by how they would take a partner.

Both indexes exist so that a decision costs what changes, not what waits: jobs of one class need the same GPUs and the
same model, so where the first of them cannot start, none of them can.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from gossamer.cluster._jobs import Profile
from gossamer.cluster._run import Run

JobClass = tuple[int, int]
PartnerClass = tuple[int, int, float]


class Pending:
    """Waiting jobs in the order of ``run.order``, with ``run.number`` among equals; iterates in that order."""

    def __init__(self) -> None:
        self._classes: dict[JobClass, list[tuple[float, Run]]] = {}
        self._heads: list[tuple[float, Run]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Run]:
        """All of them; a job may be started while iterating."""
        return iter([run for _, run in sorted(entry for entries in self._classes.values() for entry in entries)])

    def add(self, run: Run) -> None:
        """Put a job in."""
        entries, entry = self._classes.setdefault(_job_class(run), []), (run.order, run)
        old = entries[0] if entries else None
        insort(entries, entry)
        self._count += 1
        if entries[0] is entry:
            if old is not None:
                del self._heads[bisect_left(self._heads, old)]
            insort(self._heads, entry)

    def remove(self, run: Run) -> None:
        """Take a job out."""
        entries, entry = self._classes[_job_class(run)], (run.order, run)
        place = bisect_left(entries, entry)
        del entries[place]
        self._count -= 1
        if place == 0:
            del self._heads[bisect_left(self._heads, entry)]
            if entries:
                insort(self._heads, entries[0])

    def first_of_classes(self) -> Iterator[Run]:
        """Jobs in order, but of every class only until one of it is not started by whoever iterates.

        Equivalent to going through all of them where, within a class, a job can start only if the one before could.
        """
        place = 0
        while place < len(self._heads):
            run = self._heads[place][1]
            yield run
            if not run.gpus:  # where it was started, the next of its class has taken this place or a later one
                place += 1


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
