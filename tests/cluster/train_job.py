"""A small real training for the tests of the runner: the same data for the same step, whatever happens around it."""

import os
import signal
import sys
import time

import torch
from torch import nn

from gossamer.cluster.runner.training import AccumulatingStep, TrainingSession

torch.set_num_threads(1)
torch.manual_seed(0)
session = TrainingSession(every=0.05)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = AccumulatingStep(model, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y), session.sub_batch)
crash_at = int(os.environ.get("CRASH_AT", "-1"))
marker = os.path.join(os.environ.get("GOSSAMER_JOB_FOLDER", "."), "crashed")
for iteration in session.iterations(model, optimizer):
    generator = torch.Generator().manual_seed(iteration)
    x = torch.randn(session.batch, 16, dtype=torch.float64, generator=generator)
    step(x, torch.randint(0, 4, (session.batch,), generator=generator))
    time.sleep(float(os.environ.get("PAUSE", "0.01")))
    if iteration == crash_at and not session.profiling and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(os.environ.get("CODE", "0")))
