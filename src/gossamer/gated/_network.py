"""Phase-functioned and gated networks for many characters at once."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gossamer.gated._basis import CONTROL_POINTS, catmull_rom
from gossamer.gated._fused import FusedNetwork, Layer
from gossamer.gated._pfnn_files import read_pfnn_folder

Basis = Callable[[np.ndarray], np.ndarray]
FORMULATIONS = ("A", "B")


class PhaseFunctionedMLP:
    """A multi-layer perceptron whose weights are mixtures of control points, with coefficients per row of the batch.

    The mixture is never formed: see the formulations of Li et al. (PFNN acceleration; the page of the system says what is
    known). ELU stands between layers. The first batch of a size packs the weights for it (formulation A keeps one copy
    for each batch size met); one object runs in one thread at a time.

    weights: per layer float32 ``(p, in, out)``. biases: per layer ``(p, out)``. basis: "catmull_rom" (p must be 4), or
    a function from phases ``(b,)`` to coefficients ``(b, p)``. weights_dtype: "f32", or "bf16" to stream half the bytes.

    Raises:
        ValueError: shapes of consecutive layers do not fit, or a name is unknown.

    >>> net = PhaseFunctionedMLP.random([6, 8, 3], seed=0)
    >>> net.forward(np.ones((2, 6), np.float32), np.array([0.0, 3.0])).shape
    (2, 3)
    """

    def __init__(
        self,
        weights: Sequence[np.ndarray],
        biases: Sequence[np.ndarray],
        basis: str | Basis = "catmull_rom",
        weights_dtype: str = "f32",
    ) -> None:
        if weights_dtype not in ("f32", "bf16"):
            raise ValueError(f"weights_dtype must be f32 or bf16, got {weights_dtype!r}")
        if not callable(basis) and basis != "catmull_rom":
            raise ValueError(f"basis must be 'catmull_rom' or a function, got {basis!r}")
        self.layers = _checked_layers(weights, biases)
        self.points = self.layers[0].sizes[0]
        if not callable(basis) and self.points != CONTROL_POINTS:
            raise ValueError(f"basis catmull_rom has {CONTROL_POINTS} control points, the weights have {self.points}")
        self._basis: Basis = basis if callable(basis) else catmull_rom
        self.basis = "callable" if callable(basis) else basis
        self.weights_dtype = weights_dtype
        self._fused: dict[tuple[int, str], FusedNetwork] = {}

    @classmethod
    def random(
        cls, sizes: Sequence[int], points: int = CONTROL_POINTS, seed: int = 0, **options: Any
    ) -> PhaseFunctionedMLP:
        """A network with uniform weights in ``+- sqrt(6 / (in + out))``-like bounds of the original recipe, biases zero."""
        generator = np.random.default_rng(seed)
        weights, biases = [], []
        for inputs, outputs in itertools.pairwise(sizes):
            bound = np.sqrt(6 / (inputs + outputs))
            weights.append(generator.uniform(-bound, bound, (points, inputs, outputs)).astype(np.float32))
            biases.append(np.zeros((points, outputs), np.float32))
        return cls(weights, biases, **options)

    @classmethod
    def from_pfnn_dir(cls, folder: str | os.PathLike[str], weights_dtype: str = "f32") -> PhaseFunctionedMLP:
        """The network of a 50-sample folder of the original demo, with its control points recovered by least squares.

        Normalisation of inputs and outputs is folded into the first and last layer: ``forward`` takes and gives raw values.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: sizes do not fit, the samples lie on no cubic, or an input's deviation is zero.
        """
        weights, biases, known = read_pfnn_folder(folder)
        constant = np.nonzero(known["Xstd"] == 0)[0]
        if len(constant):
            raise ValueError(f"{folder}: Xstd is zero for inputs {constant[:8].tolist()}: they cannot be normalised")
        scale, shift = 1 / known["Xstd"].astype(np.float64), known["Xmean"].astype(np.float64)
        first = weights[0].astype(np.float64) * scale[:, None]
        biases[0] = (biases[0] - shift @ first).astype(np.float32)
        weights[0] = first.astype(np.float32)
        weights[-1] = weights[-1] * known["Ystd"]
        biases[-1] = biases[-1] * known["Ystd"] + known["Ymean"]
        return cls(weights, biases, weights_dtype=weights_dtype)

    @property
    def inputs(self) -> int:
        """Width of a row of x."""
        return self.layers[0].sizes[1]

    @property
    def outputs(self) -> int:
        """Width of a row of the result."""
        return self.layers[-1].sizes[2]

    def forward(
        self, x: np.ndarray, phase: np.ndarray | float, formulation: str = "A", out: np.ndarray | None = None
    ) -> np.ndarray:
        """Outputs ``(b, out)`` of inputs ``(b, in)`` at phases ``(b,)`` in radians; one phase may serve all rows.

        Raises:
            ValueError: a width differs, or a phase is not finite.
        """
        x = self._checked_input(x)
        phases = np.broadcast_to(np.asarray(phase, np.float64), (len(x),))
        return self.forward_gated(x, self._basis(phases), formulation, out)

    def forward_gated(
        self, x: np.ndarray, coefficients: np.ndarray, formulation: str = "A", out: np.ndarray | None = None
    ) -> np.ndarray:
        """The same with coefficients ``(b, p)`` from anywhere: a gating network, for instance.

        formulation: "A" mixes activations, one product for the whole batch; "B" mixes weights in registers, row by row.
        """
        x = self._checked_input(x)
        gates = np.ascontiguousarray(coefficients, np.float32)
        if gates.shape != (len(x), self.points):
            raise ValueError(f"coefficients must have shape ({len(x)}, {self.points}), got {gates.shape}")
        if formulation not in FORMULATIONS:
            raise ValueError(f"formulation must be one of {', '.join(FORMULATIONS)}, got {formulation!r}")
        y = np.empty((len(x), self.outputs), np.float32) if out is None else out
        if y.shape != (len(x), self.outputs) or y.dtype != np.float32 or not y.flags.c_contiguous:
            raise ValueError(
                f"out must be contiguous float32 of shape ({len(x)}, {self.outputs}), got {y.dtype} {y.shape}"
            )
        if len(x):
            self._fused_for(len(x), formulation).run(x, gates, y)
        return y

    def nbytes(self, batch: int = 1) -> int:
        """Bytes of weights that a batch reads in formulation A."""
        return self._fused_for(batch, "A").nbytes

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the network as an ONNX model: inputs ``x`` and ``phase`` (``coefficients``, for a basis of one's own)."""
        from gossamer.gated._onnx import write_onnx

        write_onnx(path, self.layers, self.basis == "catmull_rom")

    def _fused_for(self, batch: int, formulation: str) -> FusedNetwork:
        key = batch, formulation
        if key not in self._fused:
            bfloat16 = self.weights_dtype == "bf16" and formulation == "A"
            self._fused[key] = FusedNetwork(self.layers, batch, formulation, bfloat16)
        return self._fused[key]

    def _checked_input(self, x: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(x, np.float32)
        if array.ndim != 2 or array.shape[1] != self.inputs:
            raise ValueError(f"x must have shape (batch, {self.inputs}), got {np.shape(x)}")
        return array


def _checked_layers(weights: Sequence[np.ndarray], biases: Sequence[np.ndarray]) -> list[Layer]:
    if not len(weights) or len(weights) != len(biases):
        raise ValueError(f"weights and biases must be of one length, at least 1, got {len(weights)} and {len(biases)}")
    layers: list[Layer] = []
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        w, b = np.ascontiguousarray(weight, np.float32), np.ascontiguousarray(bias, np.float32)
        if w.ndim != 3 or 0 in w.shape or b.shape != (w.shape[0], w.shape[2]):
            raise ValueError(
                f"layer {number}: weights must be (p, in, out) and bias (p, out), got {w.shape} and {b.shape}"
            )
        if layers and (w.shape[0] != layers[-1].sizes[0] or w.shape[1] != layers[-1].sizes[2]):
            raise ValueError(
                f"layer {number} must take ({layers[-1].sizes[0]}, {layers[-1].sizes[2]}, out), got {w.shape}"
            )
        layers.append(Layer(w, b))
    return layers
