"""What ranks do in the tests of the exchange; functions here are started by name in other processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.core.distributed import Transport
from gossamer.train import GradientExchanger, NativeHooks, NonFiniteGradients, ddp_hook, gtopk_all_reduce, select_topk


def gradient(rank, size, step=0):
    """Heavy-tailed, half of it shared by all ranks."""
    own = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + rank + 1))
    shared = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step))
    return (own + shared) ** 3


def merge_many(cases):
    """For every (topology, d, k): the result and what this rank must keep, and the payload it sent."""
    found = []
    for topology, size, k in cases:
        transport = Transport()
        values, indices = select_topk(gradient(transport.rank, size), k)
        done = gtopk_all_reduce(values, indices, transport, topology)
        lost = (done.lost_values.numpy(), done.lost_indices.numpy())
        found.append((done.values.numpy(), done.indices.numpy(), lost, transport.traffic.payload))
    return found


def average(size, steps, options):
    """Every step's average, and the residual after it."""
    exchanger = GradientExchanger(dense_below=0, **options)
    found = []
    for step in range(steps):
        out = exchanger.exchange(gradient(exchanger.transport.rank, size, step), ["w"], [size])
        found.append((out.clone().numpy(), exchanger.residuals.state()["w"].numpy()))
    return found, exchanger.transport.traffic.payload


def catch(action):
    try:
        return action()
    except (ValueError, NonFiniteGradients) as error:
        return type(error).__name__, str(error)


def bad_gradients(method):
    """NaN on rank 1 only, then a good step: what each rank saw, and what the residual was before and after."""
    exchanger = GradientExchanger(0.1, method, dense_below=0)
    rank = exchanger.transport.rank
    exchanger.exchange(gradient(rank, 100), ["w"], [100])
    before = exchanger.residuals.state()["w"]
    bad = gradient(rank, 100, 1)
    bad[3] = float("nan") if rank == 1 else 1.0
    message = catch(lambda: exchanger.exchange(bad, ["w"], [100]))
    exchanger.on_nonfinite = "propagate"
    spread = exchanger.exchange(bad, ["w"], [100]).isnan().all().item()
    after = exchanger.residuals.state()["w"]
    exchanger.on_nonfinite = "raise"
    good = exchanger.exchange(gradient(rank, 100, 2), ["w"], [100]).isfinite().all().item()
    return message, spread, (before - after).abs().max().item(), good


def scaled_losses():
    """Averages with gradients scaled by 1024 in the second step, unscaled again, and the residuals after them."""
    scale = [1.0]
    exchanger = GradientExchanger(0.1, "gtopk", dense_below=0, loss_scale=lambda: scale[0])
    found = []
    for step, scale[0] in enumerate((1.0, 1024.0, 1.0)):
        mine = gradient(exchanger.transport.rank, 100, step) * scale[0]
        found.append((exchanger.exchange(mine, ["w"], [100]) / scale[0]).numpy())
    return found, exchanger.residuals.state()["w"].numpy()


def different_densities():
    exchanger = GradientExchanger(0.1 * (1 + dist.get_rank()), "gtopk", dense_below=0)
    return catch(lambda: exchanger.exchange(torch.ones(100), ["w"], [100]))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))


def digits(count, seed):
    """Ten noisy prototypes of 8 x 8 pixels; the stand-in where no data folder is."""
    prototypes = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return prototypes[labels] + 1.6 * torch.randn(count, 64, generator=generator), labels


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(wrap, options, data=None, epochs=8, batch=32):
    """Train on this rank's share; returns the accuracy on held-out data and all parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y, test_x, test_y = data or (*digits(2560, 2), *digits(1000, 3))
    model = network()
    exchanger = GradientExchanger(**options)
    wrapped = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.012)
        wrapped.register_comm_hook(exchanger, ddp_hook(exchanger, model))
    else:
        names = [name for name, _ in model.named_parameters()][::-1]
        NativeHooks(model, exchanger, optimizer, groups=[names[:2], names[2:]])
    for epoch in range(epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(y) - batch * size + 1, batch * size):
            mine = order[start + rank * batch : start + (rank + 1) * batch]
            optimizer.zero_grad()
            loss_of(wrapped, (x[mine], y[mine])).backward()
            optimizer.step()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return accuracy, torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


class Forgetful(GradientExchanger):
    """One that drops what it has not sent: training with it has to be worse."""

    def exchange(self, flat, names, sizes):
        self.residuals.load({})
        return super().exchange(flat, names, sizes)


def forget(options, data=None, epochs=8):
    global GradientExchanger
    before, GradientExchanger = GradientExchanger, Forgetful
    try:
        return train("native", options, data, epochs)
    finally:
        GradientExchanger = before


def train_all_ways(data=None, epochs=8):
    """Densely, with sparse exchange in DDP and in hooks of the parameters, and without residuals."""
    sparse = {"density": 0.01, "method": "gtopk", "dense_below": 0}
    ways = [train("native", {"method": "dense"}, data, epochs)]
    ways += [train(wrap, sparse, data, epochs) for wrap in ("ddp", "native")]
    return [*ways, forget(sparse, data, epochs)]


class TwoHeads(nn.Module):
    """One head is not used in every step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x, use_second):
        return (self.second if use_second else self.first)(self.body(x).tanh()).sum()


def unused_and_accumulated():
    """Averages after a step in which only rank 0 uses the second head, and after two accumulated backward passes."""
    rank = dist.get_rank()
    found = []
    for accumulate in (False, True):
        model = TwoHeads()
        exchanger = GradientExchanger(1.0, "dense")
        hooks = NativeHooks(model, exchanger, groups=[["second.weight", "second.bias", "first.weight", "first.bias"],
                                                      ["body.weight", "body.bias"]])  # fmt: skip
        x = torch.full((3, 6), float(rank + 1))
        if accumulate:
            with hooks.no_sync():
                model(x, False).backward()
        model(x, rank == 0).backward()
        hooks.finish()
        found.append({name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None})
    return found


def save_state(size):
    exchanger = GradientExchanger(0.05, "gtopk", dense_below=0)
    exchanger.exchange(gradient(exchanger.transport.rank, size), ["w"], [size])
    return exchanger.state_dict()


def load_state(states, on_other_ranks):
    exchanger = GradientExchanger(0.05, "gtopk", dense_below=0)
    refused = catch(lambda: exchanger.load_state_dict(states))
    exchanger.load_state_dict(states, on_other_ranks)
    return refused, {name: residual.numpy() for name, residual in exchanger.residuals.state().items()}
