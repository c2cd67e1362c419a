"""Writing ONNX files: the few messages that a gated network needs, in protobuf's own encoding, without another library.

Fields and their numbers are those of ``onnx.proto`` (ONNX IR version 8, operators of set 17).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import numpy as np

from gossamer.core.files import atomic_write
from gossamer.gated._basis import CONTROL_POINTS
from gossamer.gated._fused import Layer

_FLOAT, _INT64 = 1, 7


def write_onnx(path: str | os.PathLike[str], layers: list[Layer], with_phase: bool) -> None:
    """The network as ``y(x, phase)``, or ``y(x, coefficients)`` where coefficients come from outside."""
    points, inputs, _ = layers[0].sizes
    outputs = layers[-1].sizes[2]
    graph = _Graph()
    graph.constant("one_axis", np.array([1], np.int64))
    gates = graph.phase_to_coefficients() if with_phase else "coefficients"
    shares = [f"gate_{point}" for point in range(points)]
    graph.constant("gate_sizes", np.ones(points, np.int64))
    graph.node("Split", [gates, "gate_sizes"], shares, axis=1)
    x = "x"
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1
        x = graph.layer(number, layer, x, shares, "y" if last else f"hidden_{number}", last)
    second = _value("phase", ["batch"]) if with_phase else _value("coefficients", ["batch", points])
    body = graph.finished([_value("x", ["batch", inputs]), second], [_value("y", ["batch", outputs])])
    opset = _bytes(8, _text(1, "") + _number(2, 17))
    model = _number(1, 8) + _text(2, "gossamer") + _bytes(7, body) + opset
    with atomic_write(path) as temporary:
        temporary.write_bytes(model)


class _Graph:
    """Nodes and constants, in order."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []

    def node(self, kind: str, inputs: Iterable[str], outputs: Iterable[str], **integers: int) -> None:
        """One operator, with integer attributes."""
        named = b"".join(_text(1, name) for name in inputs) + b"".join(_text(2, name) for name in outputs)
        attributes = b"".join(
            _bytes(5, _text(1, name) + _number(3, value) + _number(20, 2)) for name, value in integers.items()
        )
        self._nodes.append(named + _text(4, kind) + attributes)

    def constant(self, name: str, array: np.ndarray) -> str:
        """A tensor that the model holds."""
        kind = _INT64 if array.dtype == np.int64 else _FLOAT
        shape = b"".join(_number(1, size) for size in array.shape)
        self._constants.append(shape + _number(2, kind) + _text(8, name) + _bytes(9, array.tobytes()))
        return name

    def scalar(self, name: str, value: float) -> str:
        """A float constant."""
        return self.constant(name, np.array(value, np.float32))

    def chain(self, start: str, prefix: str, *steps: tuple[str, float | str]) -> str:
        """Binary operators one behind the other, each with a number or the name of another value on the right."""
        for number, (kind, right) in enumerate(steps):
            name = f"{prefix}_{number}"
            other = right if isinstance(right, str) else self.scalar(f"{name}_constant", right)
            self.node(kind, [start, other], [name])
            start = name
        return start

    def phase_to_coefficients(self) -> str:
        """The cyclic Catmull-Rom weights, by distance on the circle of control points."""
        self.node("Unsqueeze", ["phase", "one_axis"], ["angle"])
        self.constant("places", np.arange(CONTROL_POINTS, dtype=np.float32)[None] - 2)
        shifted = self.chain("angle", "turns", ("Mul", CONTROL_POINTS / (2 * math.pi)), ("Sub", "places"))
        scaled = self.chain(shifted, "quarter", ("Div", float(CONTROL_POINTS)))
        self.node("Floor", [scaled], ["whole_turns"])
        back = self.chain("whole_turns", "back", ("Mul", float(CONTROL_POINTS)))
        centred = self.chain(shifted, "centred", ("Sub", back), ("Sub", 2.0))
        self.node("Abs", [centred], ["distance"])
        near = self.chain(
            "distance", "near", ("Mul", 1.5), ("Sub", 2.5), ("Mul", "distance"), ("Mul", "distance"), ("Add", 1.0)
        )
        far = self.chain(
            "distance",
            "far",
            ("Mul", -0.5),
            ("Add", 2.5),
            ("Mul", "distance"),
            ("Sub", 4.0),
            ("Mul", "distance"),
            ("Add", 2.0),
        )
        self.node("Less", ["distance", self.scalar("unit", 1.0)], ["is_near"])
        self.node("Where", ["is_near", near, far], ["gates"])
        return "gates"

    def layer(self, number: int, layer: Layer, x: str, shares: list[str], result: str, last: bool) -> str:
        """One product for each control point, weighed and summed; ELU unless it is the last."""
        weighed = []
        for point, share in enumerate(shares):
            label = f"{number}_{point}"
            weight = self.constant(f"w_{label}", layer.weights[point])
            bias = self.constant(f"b_{label}", layer.bias[point])
            self.node("Gemm", [x, weight, bias], [f"product_{label}"])
            self.node("Mul", [f"product_{label}", share], [f"weighed_{label}"])
            weighed.append(f"weighed_{label}")
        self.node("Sum", weighed, [result if last else f"sum_{number}"])
        if not last:
            self.node("Elu", [f"sum_{number}"], [result])
        return result

    def finished(self, inputs: list[bytes], outputs: list[bytes]) -> bytes:
        """The graph's message."""
        parts = [_bytes(1, node) for node in self._nodes]
        parts += [_text(2, "gated"), *(_bytes(5, constant) for constant in self._constants)]
        parts += [_bytes(11, value) for value in inputs] + [_bytes(12, value) for value in outputs]
        return b"".join(parts)


def _value(name: str, shape: list[int | str]) -> bytes:
    """A named float tensor; sizes that are names are free."""
    sizes = b"".join(_bytes(1, _text(2, size) if isinstance(size, str) else _number(1, size)) for size in shape)
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, _FLOAT) + _bytes(2, sizes)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while True:
        byte, value = value & 0x7F, value >> 7
        if not value:
            out.append(byte)
            return bytes(out)
        out.append(byte | 0x80)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, content: str) -> bytes:
    return _bytes(field, content.encode())
