"""Which scheduler for this cluster? The same generated trace under four policies, with a page to look at.

Run it with `python examples/cluster_policies.py`; it writes policies.html where it is started.
"""

import numpy as np

from gossamer.cluster import (
    FIFO,
    BestSharingBenefit,
    Cluster,
    ConstantInterference,
    FirstFitSharing,
    Job,
    Tiresias,
    sweep,
    write_report,
)

rng = np.random.default_rng(0)
submit = np.sort(rng.uniform(0, 8 * 3600, 120))
gangs, lengths = rng.choice([1, 1, 2, 4, 8], 120), rng.lognormal(7.5, 1.2, 120)
jobs = [Job(f"job-{row}", float(submit[row]), int(gangs[row]), float(lengths[row])) for row in range(120)]

policies = [FIFO, Tiresias, FirstFitSharing, BestSharingBenefit]
results = sweep([jobs], policies, Cluster(nodes=4, gpus_per_node=4), ConstantInterference(1.25))[0]
for result in results:
    s = result.summary()
    print(
        f"{s['policy']:10} mean completion {s['mean_jct'] / 3600:.2f} h, {s['restarts']} restarts, {s['shared']} shared"
    )
print("wrote", write_report(results, "policies.html", "Four policies on one trace"))
