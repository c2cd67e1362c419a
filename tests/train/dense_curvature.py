"""Fisher, Gauss-Newton and Kronecker matrices from their definitions: one example, one label, one position at a time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Sequences(nn.Module):
    """Indices (n, T) to class scores (n, T, 5)."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.norm, self.head = (
            nn.Embedding(7, 4),
            nn.Linear(4, 4),
            nn.RMSNorm(4),
            nn.Linear(4, 5),
        )

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.norm(torch.cumsum(self.inner(h).tanh(), 1)))


def dense_net():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3, bias=False), nn.ReLU(inplace=True),
                        nn.Linear(3, 3))  # fmt: skip
    return net, torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3


def conv_net():
    conv = nn.Conv2d(2, 3, (3, 2), stride=2, padding=1, dilation=(1, 2))
    net = nn.Sequential(conv, nn.BatchNorm2d(3).eval(), nn.Tanh(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 3))
    nn.init.uniform_(net[1].running_var, 0.5, 2.0)
    return net, torch.randn(4, 2, 6, 6, dtype=torch.float64), torch.arange(4) % 3


def sequence_net():
    return Sequences(), torch.randint(0, 7, (3, 4)), torch.randint(0, 5, (3, 4))


NETS = {"dense": dense_net, "conv": conv_net, "sequence": sequence_net}


def make(name, seed=0):
    """A net in float64 whose every parameter differs from its neutral value, a batch and labels."""
    torch.manual_seed(seed)
    net, x, y = NETS[name]()
    net = net.double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return net, x, y


def mean_loss(output, y):
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), y.reshape(-1))


def flat_gradient(net, loss):
    found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([torch.zeros_like(p).reshape(-1) if g is None else g.reshape(-1)
                      for g, p in zip(found, net.parameters(), strict=True)])  # fmt: skip


def fisher(net, x, y=None):
    """The exact Fisher matrix; with labels the empirical one. Mean over predictions."""
    total, predictions = 0.0, 0
    for n in range(len(x)):
        scores = net(x[n : n + 1])[0]
        scores = scores.reshape(-1, scores.shape[-1]).log_softmax(-1)
        predictions += len(scores)
        if y is not None:
            g = flat_gradient(net, -sum(row[label] for row, label in zip(scores, y[n].reshape(-1), strict=True)))
            total = total + torch.outer(g, g)
            continue
        for row in scores:
            for c in range(len(row)):
                g = flat_gradient(net, row[c])
                total = total + row[c].exp().detach() * torch.outer(g, g)
    return total / predictions


def gauss_newton(net, x, loss_of):
    """J^T H J of a loss of the outputs, with both as dense matrices."""
    output = net(x)
    jacobian = torch.stack([flat_gradient(net, entry) for entry in output.reshape(-1)])
    hessian = torch.autograd.functional.hessian(lambda o: loss_of(o.view(output.shape)), output.detach().reshape(-1))
    return jacobian.T @ hessian @ jacobian


def hessian(net, loss):
    g = torch.autograd.grad(loss, list(net.parameters()), create_graph=True, allow_unused=True)
    g = torch.cat([part.reshape(-1) for part in g if part is not None])
    return torch.stack([flat_gradient(net, entry) for entry in g])


def positions_of(entry):
    """(positions, channels) of one example's layer output, of a convolution or of anything else."""
    return entry.flatten(1).T if entry.dim() == 3 else entry.reshape(-1, entry.shape[-1])


def output_gradients(net, module, x):
    """For every example, label (weighted by its probability) and prediction: gradients (positions, channels) of a layer."""
    found = []
    for n in range(len(x)):
        caught = []
        handle = module.register_forward_hook(lambda _m, _i, out, caught=caught: caught.append(out) or out.clone())
        scores = net(x[n : n + 1])[0]
        handle.remove()
        scores = scores.reshape(-1, scores.shape[-1]).log_softmax(-1)
        for row in scores:
            for c in range(len(row)):
                (g,) = torch.autograd.grad(row[c], caught[0], retain_graph=True)
                found.append((row[c].exp().detach().sqrt() * positions_of(g[0])).detach())
    return found


def layer_inputs(net, module, x):
    """For every example (positions, inputs) as a weight meets them; a convolution's by slicing, an embedding's one-hot."""
    caught = []
    handle = module.register_forward_hook(lambda _m, args, _out: caught.append(args[0].detach()))
    net(x)
    handle.remove()
    if isinstance(module, nn.Embedding):
        return list(F.one_hot(caught[0], module.num_embeddings).double())
    if isinstance(module, nn.Linear):
        return [positions_of(entry) if entry.dim() > 1 else entry[None] for entry in caught[0]]
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = module.kernel_size, module.stride, module.padding, module.dilation
    out = []
    for entry in F.pad(caught[0], (pw, pw, ph, ph)):
        rows = [entry[:, i : i + (kh - 1) * dh + 1 : dh, j : j + (kw - 1) * dw + 1 : dw].reshape(-1)
                for i in range(0, entry.shape[1] - (kh - 1) * dh, sh)
                for j in range(0, entry.shape[2] - (kw - 1) * dw, sw)]  # fmt: skip
        out.append(torch.stack(rows))
    return out
