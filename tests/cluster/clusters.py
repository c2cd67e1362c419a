"""Jobs, tables and checks that the tests of this room share."""

import numpy as np

from gossamer.cluster import InterferenceTable, Job, Profile, StepTime

MODELS = ("vision", "text", "speech")
PROFILES = [
    Profile(model, StepTime(0.02, 0.001 * (1 + index)), batch, memory_fixed=2000, memory_per_sample=40 * (1 + index))
    for index, model in enumerate(MODELS)
    for batch in (32, 64)
]


def table(seed=0, lowest=1.05, highest=2.5):
    """Factors for all pairs of loads; smaller batches disturb less."""
    rng = np.random.default_rng(seed)
    loads = [(model, float(batch)) for model in MODELS for batch in (1, 4, 16, 64)]
    entries = {}
    for i, a in enumerate(loads):
        for b in loads[i:]:
            weight = (a[1] * b[1]) ** 0.25 / 8
            low, high = lowest, 1 + (highest - 1) * weight + lowest - 1
            entries[a, b] = tuple(rng.uniform(low, max(low, high), 2))
            if a == b:
                entries[a, b] = (entries[a, b][0],) * 2
    return InterferenceTable(entries)


def random_jobs(count, seed, span=4000.0, gangs=(1, 1, 1, 2, 4), profiles=True, mean=5.0):
    rng = np.random.default_rng(seed)
    submit = np.sort(rng.uniform(0, span, count))
    return [
        Job(
            f"job-{index}",
            float(submit[index]),
            int(rng.choice(gangs)),
            float(rng.lognormal(mean, 1.0)),
            profile=PROFILES[rng.integers(len(PROFILES))] if profiles else None,
        )
        for index in range(count)
    ]


def occupancy(result):
    """For every GPU the stretches ``(begin, end, row)`` of the jobs on it."""
    stretches = [[] for _ in range(result.cluster.gpus)]
    for row, gpus, begin, end in result.segments:
        for gpu in gpus:
            stretches[gpu].append((begin, end, row))
    return stretches


def most_at_once(stretches):
    """The largest number of jobs on a GPU at one time."""
    changes = sorted(
        (time, step) for begin, end, _ in stretches for time, step in ((begin, 1), (end, -1)) if end > begin
    )
    level = most = 0
    for _, step in changes:
        level += step
        most = max(most, level)
    return most
