"""Agreement with other libraries, where they are installed; neither is a dependency."""

from __future__ import annotations

import pytest
import torch
from test_precondition import DAMPING, PLAIN, assert_close, flat, stepped
from torch import nn
from torch.nn import functional as F

from gossamer.train.precondition import KFAC, Diagonal, Gaussian


def case(name):
    torch.manual_seed(0)
    if name == "conv":
        net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
        x = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    else:
        net, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4, dtype=torch.float64)
    return net.double(), x, torch.arange(5) % 3


@pytest.mark.parametrize("solver", ["cholesky", "eigen"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
@pytest.mark.parametrize(("net_name", "loss"), [("mlp", "ce"), ("mlp", "mse"), ("conv", "ce")])
def test_kfac_agrees_with_curvlinops(net_name, loss, bias, solver):
    curvlinops = pytest.importorskip("curvlinops", reason="needs curvlinops-for-pytorch")
    if bias == "separate" and solver == "cholesky":
        pytest.skip("curvlinops damps the bias alone by another rule")
    net, x, y = case(net_name)
    loss_of = nn.CrossEntropyLoss()
    likelihood = "categorical"
    if loss == "mse":
        loss_of, likelihood = nn.MSELoss(), Gaussian(3 / 2)
        y = torch.randn(5, 3, dtype=torch.float64)
    kfac = KFAC(net, PLAIN, fisher="exact", likelihood=likelihood, bias=bias, solver=solver)
    before, found = stepped(kfac, net, x, y, loss_of)
    parameters = [p for p in net.parameters() if p.requires_grad]
    theirs = curvlinops.KFACLinearOperator(
        net, loss_of, parameters, [(x, y)], fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=bias == "separate", check_deterministic=False,
    )  # fmt: skip
    inverse = curvlinops.KFACInverseLinearOperator(
        theirs, damping=DAMPING, use_heuristic_damping=solver == "cholesky", use_exact_damping=solver == "eigen"
    )
    assert_close(flat(found.values()), flat(inverse @ list(before.values())), 1e-6)


def test_kfac_and_the_diagonal_agree_with_asdfghjkl():
    asdl = pytest.importorskip("asdl", reason="needs asdfghjkl")
    if not hasattr(asdl, "KfacGradientMaker"):
        pytest.skip("the installed asdl is another package; needs asdfghjkl")
    for maker, ours in (
        (asdl.KfacGradientMaker, lambda net: KFAC(net, PLAIN, fisher="exact", bias="separate")),
        (asdl.DiagNaturalGradientMaker, lambda net: Diagonal(net, PLAIN, fisher="exact")),
    ):
        net, x, y = case("mlp")
        preconditioner = ours(net)
        _, found = stepped(preconditioner, net, x, y)
        preconditioner.remove()
        net.zero_grad()
        theirs = maker(net, asdl.PreconditioningConfig(data_size=len(x), damping=DAMPING), fisher_type="fisher_exact")
        dummy = theirs.setup_model_call(net, x)
        theirs.setup_loss_call(F.cross_entropy, dummy, y)
        theirs.forward_and_backward()
        assert_close(flat(found.values()), flat(p.grad for p in net.parameters()), 1e-6)
