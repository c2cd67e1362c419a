"""A small real training for the tests of the runner: the same data for the same step, whatever happens around it."""

import os
import signal
import time

import torch
from torch import nn

from gossamer.cluster.runner.training import AccumulatingStep, TrainingSession


def train(session, after_step=lambda iteration: None):
    """Train as the session says; gives the final weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = AccumulatingStep(model, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y), session.sub_batch)
    for iteration in session.iterations(model, optimizer):
        generator = torch.Generator().manual_seed(iteration)
        x = torch.randn(session.batch, 16, dtype=torch.float64, generator=generator)
        step(x, torch.randint(0, 4, (session.batch,), generator=generator))
        after_step(iteration)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def pause_and_crash(iteration):
    """Take some time; be killed once, at the step that CRASH_AT names."""
    time.sleep(float(os.environ["PAUSE"]))
    marker = os.path.join(os.environ["GOSSAMER_JOB_FOLDER"], "crashed")
    if iteration == int(os.environ.get("CRASH_AT", "-1")) and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(TrainingSession(every=0.4), pause_and_crash)
