"""What ranks do in the tests of preconditioning; functions here are started by name in other processes."""

from __future__ import annotations

import dense_curvature as dense
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gossamer.train.precondition import (
    KFAC,
    PSGD,
    SMW,
    Diagonal,
    NewtonCG,
    NonFiniteCurvature,
    Settings,
    Shampoo,
    UnitWise,
)

METHODS = {
    "kfac": lambda net, s: KFAC(net, s, fisher="exact"),
    "kfac-eigen": lambda net, s: KFAC(net, s, fisher="empirical", solver="eigen"),
    "diagonal": lambda net, s: Diagonal(net, s, fisher="exact"),
    "unit-wise": lambda net, s: UnitWise(net, s, fisher="exact"),
    "smw": lambda net, s: SMW(net, s, fisher="empirical"),
    "shampoo": lambda net, s: Shampoo(net, s),
    "psgd": lambda net, s: PSGD(net, s),
    "psgd-lowrank": lambda net, s: PSGD(net, s, kind="lowrank", rank=2),
    "newton": lambda net, s: NewtonCG(net, s),
}


def train(method, net_name, ranks, rank, ddp):
    """Three steps on this rank's share of the batch; the last gradients and the parameters."""
    net, x, y = dense.make(net_name)
    x, y = torch.cat([x, x.roll(1, 0)]), torch.cat([y, y])
    share = len(x) // ranks
    mine = slice(rank * share, (rank + 1) * share)
    settings = Settings(damping=0.05, decay=0.0 if method == "smw" else 0.5)
    preconditioner = METHODS[method](net, settings)
    model = DistributedDataParallel(net) if ddp else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x[mine])
        loss = dense.mean_loss(output, y[mine])
        preconditioner.backward(loss, output)
        preconditioner.step(lambda: dense.mean_loss(net(x[mine]), y[mine]))
        optimizer.step()
    gradients = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
    return torch.cat([gradients, *(p.detach().reshape(-1) for p in net.parameters())]).numpy()


def train_all(cases):
    """Every case on this rank, in DDP."""
    return [train(method, net_name, dist.get_world_size(), dist.get_rank(), True) for method, net_name in cases]


def one_bad_rank():
    """NaN in the batch of rank 1 only: what every rank saw, by method; then a rank that observes nothing."""
    seen = []
    for method in ("kfac", "smw", "shampoo"):
        net, x, y = dense.make("dense")
        preconditioner = METHODS[method](net, Settings(damping=0.05))
        if dist.get_rank() == 1:
            x[0, 0] = float("nan")
        output = net(x)
        preconditioner.backward(dense.mean_loss(output, y), output)
        try:
            preconditioner.step()
            seen.append("")
        except NonFiniteCurvature as error:
            seen.append(str(error))
    net, x, y = dense.make("dense")
    kfac = METHODS["kfac"](net, Settings(damping=0.05))
    if dist.get_rank() == 0:
        output = net(x)
        kfac.backward(dense.mean_loss(output, y), output)
    try:
        kfac.step()
        seen.append("")
    except ValueError as error:
        seen.append(str(error))
    return seen
