"""Gated networks against the sentence that defines them: per row, mix the weights, then a plain network in float64."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.gated import PhaseFunctionedMLP, TorchTwin, catmull_rom, fit_control_points

SIZES = [37, 48, 32, 51]


def network(sizes: list[int] = SIZES, seed: int = 0, points: int = 4, **options: object) -> PhaseFunctionedMLP:
    generator = np.random.default_rng(seed)
    weights = [generator.standard_normal((points, a, b)) / np.sqrt(a) for a, b in itertools.pairwise(sizes)]
    biases = [generator.standard_normal((points, b)) for b in sizes[1:]]
    return PhaseFunctionedMLP(weights, biases, **options)  # type: ignore[arg-type]


def naive(net: PhaseFunctionedMLP, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
    rows = []
    for row, gate in zip(x.astype(np.float64), gates.astype(np.float64), strict=True):
        for number, layer in enumerate(net.layers):
            row = row @ np.tensordot(gate, layer.weights.astype(np.float64), 1) + gate @ layer.bias.astype(np.float64)
            if number < len(net.layers) - 1:
                row = np.where(row > 0, row, np.expm1(np.minimum(row, 0)))
        rows.append(row)
    return np.array(rows)


def published(phase: float) -> np.ndarray:
    """The coefficients as the paper writes them, with its index arithmetic."""
    t = 4 * (phase % (2 * np.pi)) / (2 * np.pi)
    k1, mu = int(np.floor(t)) % 4, t - np.floor(t)
    cubic = [
        -0.5 * mu**3 + mu**2 - 0.5 * mu,
        1.5 * mu**3 - 2.5 * mu**2 + 1,
        -1.5 * mu**3 + 2 * mu**2 + 0.5 * mu,
        0.5 * mu**3 - 0.5 * mu**2,
    ]
    row = np.zeros(4)
    for shift, value in zip((-1, 0, 1, 2), cubic, strict=True):
        row[(k1 + shift) % 4] += value
    return row


def test_coefficients_are_the_published_cubic_at_any_turn() -> None:
    phases = np.array([0, np.pi / 2, np.pi, 2 * np.pi, 2 * np.pi - 1e-9, -1.3, -9.0, 40.0, *np.linspace(0, 7, 50)])
    found = catmull_rom(phases)
    np.testing.assert_allclose(found, [published(phase) for phase in phases], atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    near = catmull_rom(np.array([2 * np.pi - 1e-7, 0.0, 1e-7]))
    assert abs(near[0] - near[1]).max() < 1e-6 and abs(near[2] - near[1]).max() < 1e-6


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 13, 64])
@pytest.mark.parametrize("formulation", ["A", "B"])
def test_both_formulations_are_the_naive_mixture(batch: int, formulation: str) -> None:
    net = network()
    generator = np.random.default_rng(batch)
    x = generator.standard_normal((batch, SIZES[0])).astype(np.float32)
    phase = generator.uniform(0, 2 * np.pi, batch)
    phase[:1] = 0
    expected = naive(net, x, catmull_rom(phase))
    np.testing.assert_allclose(net.forward(x, phase, formulation), expected, rtol=1e-5, atol=1e-5 * abs(expected).max())


def test_large_batches_and_long_inputs_are_cut_into_blocks() -> None:
    net = network([1100, 20, 9])
    generator = np.random.default_rng(1)
    x, gates = (generator.standard_normal((210, width)).astype(np.float32) for width in (1100, 4))
    expected = naive(net, x, gates)
    out = np.empty((210, 9), np.float32)
    assert net.forward_gated(x, gates, out=out) is out
    np.testing.assert_allclose(out, expected, atol=2e-5 * abs(expected).max())


def test_any_number_of_experts_can_be_gated() -> None:
    net = network([10, 12, 7], points=6, basis=lambda phase: np.ones((len(phase), 6)))
    generator = np.random.default_rng(2)
    x, gates = generator.standard_normal((5, 10)).astype(np.float32), generator.random((5, 6)).astype(np.float32)
    for formulation in ("A", "B"):
        np.testing.assert_allclose(net.forward_gated(x, gates, formulation), naive(net, x, gates), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(net.forward(x, 0.0), naive(net, x, np.ones((5, 6))), rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_are_within_a_hundredth() -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((3, SIZES[0])).astype(np.float32)
    net, half = network(), network(weights_dtype="bf16")
    expected = net.forward(x, [0.1, 2, 4])
    assert abs(half.forward(x, [0.1, 2, 4]) - expected).max() < 1e-2 * abs(expected).max()
    assert half.nbytes() * 2 == net.nbytes()


def write_folder(root: Path, net: PhaseFunctionedMLP, statistics: dict[str, np.ndarray]) -> None:
    phases = np.arange(50) * (2 * np.pi / 50)
    for number, layer in enumerate(net.layers):
        for sample, gate in enumerate(np.array([published(phase) for phase in phases])):
            np.tensordot(gate, layer.weights, 1).T.astype(np.float32).tofile(root / f"W{number}_{sample:03d}.bin")
            (gate @ layer.bias).astype(np.float32).tofile(root / f"b{number}_{sample:03d}.bin")
    for name, values in statistics.items():
        values.astype(np.float32).tofile(root / f"{name}.bin")


def test_a_folder_of_samples_gives_its_control_points_back(tmp_path: Path) -> None:
    net = network([6, 8, 7, 5])
    generator = np.random.default_rng(4)
    known = {
        "Xmean": generator.random(6),
        "Xstd": generator.random(6) + 0.5,
        "Ymean": generator.random(5),
        "Ystd": generator.random(5) + 1,
    }
    write_folder(tmp_path, net, known)
    read = PhaseFunctionedMLP.from_pfnn_dir(tmp_path)
    np.testing.assert_allclose(read.layers[1].weights, net.layers[1].weights, atol=2e-6)
    x = generator.standard_normal((50, 6)).astype(np.float32)
    phases = np.arange(50) * (2 * np.pi / 50)
    inside = naive(net, (x - known["Xmean"]) / known["Xstd"], np.array([published(phase) for phase in phases]))
    np.testing.assert_allclose(read.forward(x, phases), inside * known["Ystd"] + known["Ymean"], rtol=1e-4, atol=1e-4)
    np.zeros(6, np.float32).tofile(tmp_path / "Xstd.bin")
    with pytest.raises(ValueError, match="Xstd is zero"):
        PhaseFunctionedMLP.from_pfnn_dir(tmp_path)
    generator.random(8).astype(np.float32).tofile(tmp_path / "b0_003.bin")
    with pytest.raises(ValueError, match="off a cubic"):
        PhaseFunctionedMLP.from_pfnn_dir(tmp_path)
    (tmp_path / "b0_003.bin").unlink()
    with pytest.raises(FileNotFoundError, match="b0_003"):
        PhaseFunctionedMLP.from_pfnn_dir(tmp_path)
    with pytest.raises(FileNotFoundError, match="W0_000"):
        PhaseFunctionedMLP.from_pfnn_dir(tmp_path / "nowhere")


def test_control_points_come_back_from_any_number_of_samples() -> None:
    points = np.random.default_rng(5).standard_normal((4, 3))
    for count in (4, 10, 50):
        samples = np.array([published(2 * np.pi * number / count) for number in range(count)]) @ points
        found, residual = fit_control_points(samples)
        np.testing.assert_allclose(found, points, atol=1e-6)
        assert residual < 1e-6
    with pytest.raises(ValueError, match="at least 4"):
        fit_control_points(samples[:3])


def test_the_torch_twin_trains_and_comes_back() -> None:
    net = network([5, 9, 2])
    twin = TorchTwin(net, dropout=0.0)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 5, generator=generator), torch.randn(64, 2, generator=generator)
    gates = twin.coefficients(torch.rand(64, generator=generator) * 6)
    optimiser = torch.optim.Adam(twin.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = twin.loss(x, gates, y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    trained = twin.to_network().forward_gated(x.numpy(), gates.numpy())
    np.testing.assert_allclose(trained, twin(x, gates).detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_phase", [True, False])
def test_the_onnx_file_computes_the_same(tmp_path: Path, with_phase: bool) -> None:
    reference = pytest.importorskip("onnx.reference")
    net = (
        network([6, 8, 5]) if with_phase else network([6, 8, 5], points=3, basis=lambda phase: np.ones((len(phase), 3)))
    )
    net.export_onnx(tmp_path / "net.onnx")
    import onnx

    model = onnx.load(tmp_path / "net.onnx")
    onnx.checker.check_model(model)
    generator = np.random.default_rng(6)
    x = generator.standard_normal((4, 6)).astype(np.float32)
    if with_phase:
        phase = np.array([0, 1.5, 6.28, -2], np.float32)
        (found,) = reference.ReferenceEvaluator(model).run(None, {"x": x, "phase": phase})
        expected = net.forward(x, phase)
    else:
        gates = generator.random((4, 3)).astype(np.float32)
        (found,) = reference.ReferenceEvaluator(model).run(None, {"x": x, "coefficients": gates})
        expected = net.forward_gated(x, gates)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_bad_input_is_named() -> None:
    net = network()
    x = np.ones((2, SIZES[0]), np.float32)
    with pytest.raises(ValueError, match="phase must be finite"):
        net.forward(x, [0.0, np.nan])
    with pytest.raises(ValueError, match=r"x must have shape \(batch, 37\)"):
        net.forward(x[:, 1:], [0.0, 1.0])
    with pytest.raises(ValueError, match="coefficients must have shape"):
        net.forward_gated(x, np.ones((2, 3)))
    with pytest.raises(ValueError, match="formulation must be"):
        net.forward(x, 0.0, "C")
    with pytest.raises(ValueError, match="out must be"):
        net.forward(x, 0.0, out=np.empty((2, 51)))
    with pytest.raises(ValueError, match="layer 1 must take"):
        PhaseFunctionedMLP([np.ones((4, 2, 3)), np.ones((4, 2, 3))], [np.ones((4, 3)), np.ones((4, 3))])
    with pytest.raises(ValueError, match="4 control points"):
        PhaseFunctionedMLP([np.ones((3, 2, 3))], [np.ones((3, 3))])
    assert net.forward(x[:0], 0.0).shape == (0, 51)
