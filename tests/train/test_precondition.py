"""Preconditioned gradients against dense matrices made from definitions, in float64."""

from __future__ import annotations

import math

import dense_curvature as dense
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossamer.train.precondition import (
    KFAC,
    PSGD,
    SMW,
    Bernoulli,
    Diagonal,
    Gaussian,
    NewtonCG,
    NonFiniteCurvature,
    Settings,
    Shampoo,
    UnitWise,
    inverse_roots,
)

DAMPING = 0.02
PLAIN = Settings(damping=DAMPING)


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def stepped(preconditioner, net, x, y, loss_of=dense.mean_loss):
    """The plain gradient and the preconditioned one, by parameter's name."""
    net.zero_grad()
    output = net(x)
    preconditioner.backward(loss_of(output, y), output)
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    preconditioner.step()
    return before, {name: p.grad.clone() for name, p in net.named_parameters()}


def assert_close(found, expected, tolerance=1e-8):
    assert (found - expected).norm() <= tolerance * expected.norm()


def identity(size):
    return torch.eye(size, dtype=torch.float64)


def spans(net):
    """Where each parameter is in the flat vector, as numbers shaped like it."""
    out, start = {}, 0
    for name, p in net.named_parameters():
        out[name] = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
    return out


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("net_name", dense.NETS)
def test_diagonal_unit_wise_and_smw_solve_with_the_dense_fisher_matrix(net_name, fisher):
    net, x, y = dense.make(net_name)
    matrix = dense.fisher(net, x, y if fisher == "empirical" else None)
    before, found = stepped(Diagonal(net, PLAIN, fisher=fisher), net, x, y)
    g = flat(before.values())
    assert_close(flat(found.values()), g / (matrix.diagonal() + DAMPING))
    _, found = stepped(SMW(net, PLAIN, fisher=fisher), net, x, y)
    eye = identity(len(g))
    assert_close(flat(found.values()), torch.linalg.solve(matrix + DAMPING * eye, g))
    _, found = stepped(UnitWise(net, PLAIN, fisher=fisher), net, x, y)
    where = spans(net)
    for name, module in net.named_modules():
        if isinstance(module, nn.Embedding):
            units = where[f"{name}.weight"].reshape(-1, 1)
        elif hasattr(module, "weight"):
            weight = where[f"{name}.weight"]
            units = weight.reshape(len(weight), -1)
            if getattr(module, "bias", None) is not None:
                units = torch.cat([units, where[f"{name}.bias"][:, None]], 1)
        else:
            continue
        for unit in units:
            block = matrix[unit][:, unit] + DAMPING * identity(len(unit))
            assert_close(flat(found.values())[unit], torch.linalg.solve(block, g[unit]))


def kronecker(net, x, module, sharing):
    """A and B from their definitions, a bias as an input of 1."""
    inputs = dense.layer_inputs(net, module, x)
    if getattr(module, "bias", None) is not None:
        inputs = [torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1) for rows in inputs]
    gradients = dense.output_gradients(net, module, x)
    if sharing == "reduce" and not isinstance(module, nn.Embedding):
        inputs = [rows.mean(0, keepdim=True) for rows in inputs]
        gradients = [rows.sum(0, keepdim=True) for rows in gradients]
    rows = torch.cat(inputs)
    predictions = net(x)[..., 0].numel()
    return rows.T @ rows / len(rows), sum(g.T @ g for g in gradients) / predictions


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("net_name", dense.NETS)
def test_kfac_solves_with_explicit_kronecker_products(net_name, sharing):
    net, x, y = dense.make(net_name)
    before, found = stepped(KFAC(net, PLAIN, fisher="exact", sharing=sharing), net, x, y)
    _, eigen = stepped(KFAC(net, PLAIN, fisher="exact", sharing=sharing, solver="eigen"), net, x, y)
    matrix = dense.fisher(net, x)
    where = spans(net)
    for name, module in net.named_modules():
        names = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
        if not names:
            continue
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            a, b = kronecker(net, x, module, sharing)
            lookup = isinstance(module, nn.Embedding)

            def joined(tensors, names=names, lookup=lookup):
                weight = tensors[names[0]].T if lookup else tensors[names[0]].reshape(len(tensors[names[0]]), -1)
                return weight if len(names) == 1 else torch.cat([weight, tensors[names[1]][:, None]], 1)

            g = joined(before).reshape(-1)  # row-major: B is the outer factor
            pi = math.sqrt((a.trace() / len(a)) / (b.trace() / len(b)))
            damped = torch.kron(b + DAMPING**0.5 / pi * identity(len(b)), a + pi * DAMPING**0.5 * identity(len(a)))
            assert_close(joined(found).reshape(-1), torch.linalg.solve(damped, g))
            exact = torch.kron(b, a) + DAMPING * identity(len(g))
            assert_close(joined(eigen).reshape(-1), torch.linalg.solve(exact, g))
        else:
            units = torch.stack([where[n].reshape(-1) for n in names], 1)
            g = flat(before.values())
            for unit in units:
                block = matrix[unit][:, unit] + DAMPING * identity(len(unit))
                assert_close(flat(found.values())[unit], torch.linalg.solve(block, g[unit]))


def test_kfac_is_exact_for_a_linear_layer_and_one_example():
    net, x = nn.Linear(3, 2).double(), torch.randn(1, 3, dtype=torch.float64)
    y = torch.randn(1, 2, dtype=torch.float64)

    def loss_of(output, y):
        return (output - y).square().mean()  # a Gaussian of variance 1, for two outputs

    before, found = stepped(
        KFAC(net, PLAIN, fisher="exact", likelihood=Gaussian(1.0), solver="eigen"), net, x, y, loss_of
    )
    matrix = dense.gauss_newton(net, x, lambda o: loss_of(o, y)) + DAMPING * identity(8)
    assert_close(flat(found.values()), torch.linalg.solve(matrix, flat(before.values())))


def test_a_separate_bias_is_divided_by_the_gradient_factor_alone():
    net, x, y = dense.make("dense")
    before, found = stepped(KFAC(net, PLAIN, fisher="exact", bias="separate"), net, x, y)
    a, b = kronecker(net, x, net[0], "expand")
    a = a[:-1, :-1]
    pi = math.sqrt((a.trace() / len(a)) / (b.trace() / len(b)))
    damped = b + DAMPING**0.5 / pi * identity(len(b))
    assert_close(found["0.bias"], torch.linalg.solve(damped, before["0.bias"]))


@pytest.mark.parametrize(("likelihood", "loss_of"), [
    (Gaussian(1.5), lambda o, y: F.mse_loss(o, y)),
    (Bernoulli(), lambda o, y: F.binary_cross_entropy_with_logits(o, y.sigmoid(), reduction="sum") / len(o)),
])  # fmt: skip
def test_the_exact_fisher_of_other_likelihoods_is_the_gauss_newton_matrix(likelihood, loss_of):
    net, x, _ = dense.make("dense")
    y = torch.randn(6, 3, dtype=torch.float64)
    before, found = stepped(SMW(net, PLAIN, fisher="exact", likelihood=likelihood), net, x, y, loss_of)
    matrix = dense.gauss_newton(net, x, lambda o: loss_of(o, y))
    matrix += DAMPING * identity(len(matrix))
    assert_close(flat(found.values()), torch.linalg.solve(matrix, flat(before.values())))


def test_the_monte_carlo_fisher_nears_the_exact_one_as_one_over_the_root_of_the_draws():
    net, x, y = dense.make("sequence")
    exact = dense.fisher(net, x).diagonal()

    def error(samples, seed):
        diagonal = Diagonal(net, Settings(damping=DAMPING, decay=0.5), fisher="mc", samples=samples, seed=seed)
        stepped(diagonal, net, x, y)
        diagonal.remove()
        keys = ["embed/weight", "inner/weight", "inner/bias", "norm/weight", "head/weight", "head/bias"]
        return (flat(diagonal._state[key] for key in keys) - exact).norm() / exact.norm()

    few, many = (sum(error(samples, seed) for seed in range(4)) / 4 for samples in (4, 64))
    assert many < 0.25
    assert 2.5 < few / many < 6.5  # 4 in expectation


@pytest.mark.parametrize("make", [
    lambda net, s: KFAC(net, s, fisher="exact"), lambda net, s: KFAC(net, s, fisher="empirical"),
    lambda net, s: UnitWise(net, s, fisher="empirical"), lambda net, s: SMW(net, s, fisher="empirical"),
    lambda net, s: Diagonal(net, s, fisher="exact"),
])  # fmt: skip
def test_micro_batches_with_a_scaled_loss_equal_the_whole_batch(make):
    net, x, y = dense.make("dense")
    whole = make(net, PLAIN)
    _, expected = stepped(whole, net, x, y)
    whole.remove()
    net.zero_grad()
    scaler = 1024.0
    parts = make(net, Settings(damping=DAMPING, loss_scale=lambda: scaler / 2))
    for half in (slice(0, 3), slice(3, 6)):
        output = net(x[half])
        parts.backward(dense.mean_loss(output, y[half]), output)
    for p in net.parameters():
        p.grad /= scaler  # what scaler.unscale_ does
    parts.step()
    assert_close(flat(p.grad for p in net.parameters()), flat(expected.values()))


def test_averages_and_periods_follow_their_rules():
    net, x, y = dense.make("dense")
    settings = Settings(damping=DAMPING, decay=0.75, curvature_every=2, inverse_every=2)
    kfac = KFAC(net, settings, fisher="exact")
    stepped(kfac, net, x, y)
    first = kfac.factors()["0/A"]
    before, between = stepped(kfac, net, 2 * x, y)  # no update: the old inverse
    assert torch.equal(kfac.factors()["0/A"], first)
    inverse = {key: torch.linalg.inv(value) for key, value in damped_pair(first, kfac.factors()["0/B"]).items()}
    g = torch.cat([before["0.weight"], before["0.bias"][:, None]], 1)
    assert_close(torch.cat([between["0.weight"], between["0.bias"][:, None]], 1), inverse["B"] @ g @ inverse["A"])
    stepped(kfac, net, 2 * x, y)
    now, _ = kronecker(net, 2 * x, net[0], "expand")
    assert_close(kfac.factors()["0/A"], 0.75 * first + 0.25 * now)
    with pytest.raises(ValueError, match="nothing was observed"):
        kfac.steps = 4
        kfac.step()


def damped_pair(a, b):
    pi = math.sqrt((a.trace() / len(a)) / (b.trace() / len(b)))
    return {"A": a + pi * DAMPING**0.5 * identity(len(a)), "B": b + DAMPING**0.5 / pi * identity(len(b))}


def test_clipping_bounds_what_the_step_does_to_the_distribution():
    net, x, y = dense.make("dense")
    _, free = stepped(SMW(net, PLAIN), net, x, y)
    before, clipped = stepped(SMW(net, Settings(damping=DAMPING, kl_clip=1e-3, learning_rate=lambda: 0.5)), net, x, y)
    g, free, clipped = flat(before.values()), flat(free.values()), flat(clipped.values())
    assert 0.25 * g.dot(free) > 1e-3
    assert_close(clipped, free * math.sqrt(1e-3 / (0.25 * g.dot(free))))


@pytest.mark.parametrize("make", [
    lambda net: KFAC(net, Settings(decay=0.9, inverse_every=2), fisher="mc"), lambda net: Shampoo(net),
    lambda net: PSGD(net, kind="lowrank", rank=2), lambda net: NewtonCG(net, warm_start=0.9, max_iterations=5),
    lambda net: UnitWise(net, Settings(decay=0.5)),
])  # fmt: skip
def test_training_continues_from_a_saved_state(make):
    def run(steps, state=None):
        net, x, y = dense.make("dense")
        preconditioner = make(net)
        if state:
            net.load_state_dict(state[0])
            preconditioner.load_state_dict(state[1])
        for _ in range(steps):
            stepped(preconditioner, net, x, y)
            torch.optim.SGD(net.parameters(), lr=0.05).step()
        return net.state_dict(), preconditioner.state_dict()

    whole, resumed = run(4)[0], run(1, run(3))[0]
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    with pytest.raises(ValueError, match="this is a"):
        NewtonCG(dense.make("dense")[0]).load_state_dict({"method": "Adam"})


def test_shampoo_multiplies_with_powers_of_its_statistics():
    net, x, y = dense.make("conv")
    shampoo = Shampoo(net, Settings(damping=1e-6), block_size=20)
    first, _ = stepped(shampoo, net, x, y)
    second, found = stepped(shampoo, net, x * 0.5, y)

    def power(statistic, exponent):
        values, vectors = torch.linalg.eigh(statistic)
        return vectors @ torch.diag((values.clamp(min=0) + 1e-6 * values[-1] + 1e-12) ** exponent) @ vectors.T

    for name in ("0.weight", "5.weight"):  # (3, 2, 3, 2) merges to (3, 12); (3, 27) is cut into 13 and 14 columns
        for cut in [slice(0, 12)] if name == "0.weight" else [slice(0, 13), slice(13, 27)]:
            g1, g2 = (g[name].reshape(3, -1)[:, cut] for g in (first, second))
            left, right = g1 @ g1.T + g2 @ g2.T, g1.T @ g1 + g2.T @ g2
            assert_close(found[name].reshape(3, -1)[:, cut], power(left, -0.25) @ g2 @ power(right, -0.25), 1e-6)
    statistic = torch.outer(first["5.bias"], first["5.bias"]) + torch.outer(second["5.bias"], second["5.bias"])
    assert_close(found["5.bias"], power(statistic, -0.5) @ second["5.bias"], 1e-6)
    before, grafted = stepped(Shampoo(net, graft=True), net, x, y)
    assert math.isclose(grafted["0.weight"].norm(), before["0.weight"].norm(), rel_tol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-2)])
@pytest.mark.parametrize("root", [2, 4, 6])
def test_both_ways_to_a_root_agree_with_eigenvalues_in_float64(root, dtype, tolerance):
    rows = torch.randn(3, 40, 12, dtype=torch.float64) * torch.logspace(0, -2, 12, dtype=torch.float64)
    matrices = rows.mT @ rows
    matrices[1] = 0  # the statistic of a parameter that never had a gradient
    values, vectors = torch.linalg.eigh(matrices)
    damped = values.clamp(min=0) + 1e-4 * values[:, -1:] + 1e-12
    expected = vectors @ torch.diag_embed(damped ** (-1 / root)) @ vectors.mT
    for method in ("eigen", "newton"):
        found = inverse_roots(matrices.to(dtype).tril(), root, 1e-4, method).double()
        # power iteration finds the largest eigenvalue to about a percent, and damping is a ten-thousandth of it
        for one, exact in zip(found, expected, strict=True):
            assert_close(one, exact, tolerance if method == "eigen" else 2e-2)


@pytest.mark.parametrize("kind", ["kron", "affine", "lowrank"])
def test_psgd_finds_the_inverse_of_the_curvature(kind):
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=kind == "affine").double()
    wide = 4 if kind == "affine" else 3
    a, b = (torch.randn(n, 2 * n, dtype=torch.float64) for n in (wide, 2))
    a, b = a @ a.T / 8 + 0.3 * identity(wide), b @ b.T / 4 + 0.3 * identity(2)

    def matrix():
        return net.weight if net.bias is None else torch.cat([net.weight, net.bias[:, None]], 1)

    psgd = PSGD(net, Settings(damping=1e-12), kind=kind, rate=0.1, rank=4)
    for step in range(200):
        psgd.rate = 0.3 * (1 - step / 200) + 1e-3
        m = matrix()
        net.zero_grad()
        psgd.backward(0.5 * (m * (b @ m @ a)).sum())
        g = (b @ matrix() @ a).detach()
        psgd.step()
    found = net.weight.grad if net.bias is None else torch.cat([net.weight.grad, net.bias.grad[:, None]], 1)
    assert_close(found, torch.linalg.solve(b, torch.linalg.solve(a, g.T).T), 0.1)  # |H|^-1 g


def test_psgd_whitens_gradients():
    torch.manual_seed(0)
    net = nn.Linear(3, 2, bias=False).double()
    psgd = PSGD(net, Settings(damping=1e-12), criterion="whitening", rate=0.1)
    spread = torch.diag(torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64))
    white = []
    for step in range(400):
        psgd.rate = 0.1 * (1 - step / 400) + 1e-3
        net.weight.grad = torch.randn(2, 3, dtype=torch.float64) @ spread
        psgd.step()
        white.append(net.weight.grad.reshape(-1))
    covariance = torch.stack(white[-200:]).T.cov()
    assert_close(covariance, identity(6), 0.5)


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("net_name", ["dense", "sequence"])
def test_newton_solves_with_the_dense_matrix(net_name, curvature):
    net, x, y = dense.make(net_name)
    output = net(x)
    if curvature == "ggn":
        matrix = dense.gauss_newton(net, x, lambda o: dense.mean_loss(o, y))
        assert_close(matrix, dense.fisher(net, x), 1e-8)  # they are one for cross-entropy
    else:
        matrix = dense.hessian(net, dense.mean_loss(output, y))
    damping = 0.05 - min(0.0, float(torch.linalg.eigvalsh(matrix)[0]))
    newton = NewtonCG(net, Settings(damping=damping), curvature=curvature, max_iterations=120)
    newton._conjugate_gradients.__func__.__globals__["_PROGRESS"] = 0.0  # to the end
    try:
        before, found = stepped(newton, net, x, y)
    finally:
        newton._conjugate_gradients.__func__.__globals__["_PROGRESS"] = 5e-4
    matrix = matrix + damping * identity(len(matrix))
    assert_close(flat(found.values()), torch.linalg.solve(matrix, flat(before.values())), 1e-6)


def test_newton_adapts_its_damping_and_never_takes_a_worse_iterate():
    net, x, y = dense.make("dense")
    newton = NewtonCG(net, Settings(damping=1e-3), warm_start=0.95, max_iterations=15)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    losses, dampings = [], set()
    for _ in range(15):
        optimizer.zero_grad()
        output = net(x)
        loss = dense.mean_loss(output, y)
        newton.backward(loss, output)
        newton.step(lambda: dense.mean_loss(net(x), y))
        optimizer.step()
        losses.append(loss.item())
        dampings.add(newton.damping)
    assert losses[-1] < 0.1 * losses[0]
    assert len(dampings) > 3


def test_what_has_no_known_curvature_is_named():
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"1\.weight is also 0\.weight"):
        KFAC(tied)
    attention = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 1, groups=2), nn.GRU(4, 4))
    with pytest.raises(ValueError, match=r"1 \(Conv2d: 2 groups\); 2 \(GRU"):
        Diagonal(attention)
    kfac = KFAC(attention, Settings(ignore=["2", nn.Conv2d]))
    assert [layer.name for layer in kfac.layers] == ["0"]
    twice = nn.Linear(4, 4)
    KFAC(nn.Sequential(twice))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(self.inner(x))

    net = Twice()
    kfac = KFAC(net)
    with pytest.raises(ValueError, match="'inner' is called more than once"):
        net(torch.randn(2, 4))
    kfac.remove()
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    kfac = KFAC(net, fisher="mc")
    with pytest.raises(ValueError, match="needs the model's output"):
        kfac.backward(net(torch.tensor([[0, 1]])).sum())


def test_ignored_layers_keep_their_gradient_and_bare_steps_work_with_an_optimizer():
    net, x, y = dense.make("dense")
    kfac = KFAC(net, Settings(ignore=[net[0]]), fisher="empirical")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = kfac.attach(optimizer)
    dense.mean_loss(net(x), y).backward()
    before = {name: p.grad.clone() for name, p in net.named_parameters()}
    optimizer.step()
    assert torch.equal(net[0].weight.grad, before["0.weight"])
    assert not torch.equal(net[5].weight.grad, before["5.weight"])
    handle.remove()


@pytest.mark.parametrize(
    "make", [lambda net, s: KFAC(net, s, fisher="exact"), lambda net, s: SMW(net, s), lambda net, s: Shampoo(net, s)]
)
def test_nan_stops_or_skips_the_step_and_leaves_the_curvature_alone(make):
    net, x, y = dense.make("dense")
    bad = x.clone()
    bad[2, 1] = float("nan")
    with pytest.raises(NonFiniteCurvature, match="NaN or Inf"):
        stepped(make(net, PLAIN), net, bad, y)
    net, x, y = dense.make("dense")
    careful = make(net, Settings(damping=DAMPING, on_nonfinite="skip"))
    stepped(careful, net, bad, y)
    _, found = stepped(careful, net, x, y)
    net, x, y = dense.make("dense")
    _, expected = stepped(make(net, PLAIN), net, x, y)
    assert_close(flat(found.values()), flat(expected.values()))


def test_mixed_precision_and_stored_bfloat16_stay_near_the_float32_result():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(64, 32), torch.arange(64) % 4
    _, expected = stepped(KFAC(net, Settings(damping=0.1), fisher="empirical"), net, x, y)
    stored = KFAC(net, Settings(damping=0.1, factor_dtype=torch.bfloat16, decay=0.5), fisher="empirical")
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = net(x)
        loss = F.cross_entropy(output, y)
    stored.backward(loss, output)
    stored.step()
    assert_close(flat(p.grad for p in net.parameters()), flat(expected.values()), 0.05)
    assert stored.factors()["0/A"].dtype == torch.bfloat16
    assert stored.costs().nbytes["A"] == 2 * (33**2 + 17**2)


def test_settings_refuse_what_cannot_be_meant():
    for wrong in (
        {"damping": 0.0},
        {"decay": 1.0},
        {"inverse_every": 0},
        {"kl_clip": -1.0},
        {"on_nonfinite": "ignore"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings(**wrong)
