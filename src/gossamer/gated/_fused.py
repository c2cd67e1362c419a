"""A gated network as one program: every layer, its bias and activation, in one native call.

Formulation A (interpolate activations): with coefficients c and control points W_p, b_p, a layer is

    y = [c_0 x, c_0, c_1 x, c_1, ...] [W_0; b_0; W_1; b_1; ...]

a product with a constant matrix that is packed once; biases are rows of it. The scaled input of one block of the depth
is made in the caches right before its use. Formulation B (interpolate weights): the control points of a tile of W are
combined in registers and multiplied, one character at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gossamer.codegen import BlendKernel, CopyKernel, Job, MicroKernel, Program, Strip, host_target, row_heights, tile
from gossamer.core.jit import aligned_bytes

X, COEFFICIENTS, WEIGHTS, Y, SCRATCH = range(5)
_DEPTH = 520
_ROWS = 96
_PREFETCH = 1024
_BLEND_VECTORS = 4


@dataclass(frozen=True)
class Layer:
    """weights: ``(p, in, out)``. bias: ``(p, out)``."""

    weights: np.ndarray
    bias: np.ndarray

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Control points, inputs, outputs."""
        points, inputs, outputs = self.weights.shape
        return points, inputs, outputs


class FusedNetwork:
    """The program for one batch size. Holds packed weights and scratch memory: run it from one thread at a time."""

    def __init__(self, layers: list[Layer], batch: int, formulation: str, bfloat16: bool) -> None:
        self._target = host_target()
        self._lanes = self._target.lanes()
        self._bfloat16 = bfloat16
        self._packed: list[np.ndarray] = []
        self._weight_bytes = 0
        self._scratch_bytes = 0
        widest = max(layer.sizes[2] for layer in layers)
        # Two buffers for hidden layers, taken in turn; what they hold is padded to whole vectors.
        self._hidden_row = 4 * (-(-widest // self._lanes) * self._lanes)
        self._hidden = (0, self._hidden_row * batch)
        self._scaled = 2 * self._hidden_row * batch
        make = self._interpolating_activations if formulation == "A" else self._interpolating_weights
        jobs: list[Job] = []
        for number, layer in enumerate(layers):
            source = (
                (X, 0, 4 * layer.sizes[1]) if number == 0 else (SCRATCH, self._hidden[number % 2], self._hidden_row)
            )
            last = number == len(layers) - 1
            target = (Y, 0, 4 * layer.sizes[2]) if last else (SCRATCH, self._hidden[(number + 1) % 2], self._hidden_row)
            jobs += make(layer, batch, source, target, "none" if last else "elu")
        self._weights = np.concatenate([part.ravel().view(np.uint8) for part in self._packed])
        self._memory = aligned_bytes(self._weights.nbytes)
        self._memory[:] = self._weights
        del self._weights, self._packed
        self._scratch = aligned_bytes(self._scaled + self._scratch_bytes)
        self._program = Program(jobs, self._target)

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, all of which are read for every batch."""
        return self._memory.nbytes

    def run(self, x: np.ndarray, coefficients: np.ndarray, y: np.ndarray) -> None:
        """``x`` ``(batch, in)``, ``coefficients`` ``(batch, p)``, ``y`` ``(batch, out)``, contiguous float32."""
        arrays = x, coefficients, self._memory, y, self._scratch
        self._program.run([array.ctypes.data for array in arrays])

    def _interpolating_activations(
        self, layer: Layer, batch: int, source: tuple[int, int, int], target: tuple[int, int, int], activation: str
    ) -> Iterator[Job]:
        points, inputs, outputs = layer.sizes
        rows = min(batch, _ROWS)
        cut = tile(rows, outputs, min(inputs + 1, _DEPTH), self._target)
        matrix = np.concatenate([layer.weights, layer.bias[:, None]], axis=1).reshape(points * (inputs + 1), outputs)
        starts = self._pack(matrix, cut.strips)
        blocks = [(p, *block) for p in range(points) for block in _blocks(inputs + 1)]
        for first in range(0, batch, _ROWS):
            now = min(_ROWS, batch - first)
            depth = min(inputs + 1, _DEPTH)
            strips = tuple(
                replace(strip, heights=row_heights(now, depth, strip.vectors, self._target)) for strip in cut.strips
            )
            for block in blocks:
                ends = block == blocks[0], block == blocks[-1]
                yield from self._block(layer, block, (first, now), source, target, strips, starts, activation, ends)

    def _block(
        self, layer: Layer, block: tuple[int, int, int], span: tuple[int, int], source: tuple[int, int, int],
        target: tuple[int, int, int], strips: tuple[Strip, ...], starts: list[int], activation: str,
        ends: tuple[bool, bool],
    ) -> Iterator[Job]:  # fmt: skip
        """One block of the depth within a control point: scale the input, then go through the strips."""
        points, inputs, _ = layer.sizes
        p, low, high = block
        first_row, rows = span
        first, last = ends
        with_bias = high == inputs + 1
        row_bytes = 4 * (high - low) + 64
        self._scratch_bytes = max(self._scratch_bytes, rows * row_bytes)
        yield Job(
            CopyKernel(scaled=True, ones=with_bias), (source[0], source[1] + first_row * source[2] + 4 * low), source[2],
            (COEFFICIENTS, 4 * (first_row * points + p)), 4 * points, (SCRATCH, self._scaled), row_bytes,
            high - low - with_bias, rows,
        )  # fmt: skip
        for strip, start in zip(strips, starts, strict=True):
            width_bytes = strip.vectors * self._lanes * (2 if self._bfloat16 else 4)
            row = 0
            for height, count in strip.heights:
                edge = strip.columns % self._lanes
                edge = -1 if edge and self._target.masks else edge
                kernel = MicroKernel(
                    height, strip.vectors, edge=edge, update="store" if first else "accumulate",
                    activation=activation if last else "none",  # type: ignore[arg-type]
                    prefetch=_PREFETCH, padded_b=bool(edge) or self._bfloat16, b_element="bf16" if self._bfloat16 else "",
                )  # fmt: skip
                yield Job(
                    kernel, (SCRATCH, self._scaled + row * row_bytes), row_bytes,
                    (WEIGHTS, start + (p * (inputs + 1) + low) * width_bytes), width_bytes,
                    (target[0], target[1] + (first_row + row) * target[2] + 4 * strip.start), target[2],
                    high - low, count, columns=strip.columns,
                )  # fmt: skip
                row += height * count

    def _interpolating_weights(
        self, layer: Layer, batch: int, source: tuple[int, int, int], target: tuple[int, int, int], activation: str
    ) -> Iterator[Job]:
        points, inputs, outputs = layer.sizes
        matrix = np.concatenate([layer.weights, layer.bias[:, None]], axis=1)
        width = _BLEND_VECTORS * self._lanes
        row_bytes = 4 * points * width
        strips = range(0, outputs, width)
        packed = np.zeros((len(strips), inputs + 1, points, width), np.float32)
        for number, start in enumerate(strips):
            columns = min(width, outputs - start)
            packed[number, :, :, :columns] = matrix[:, :, start : start + columns].transpose(1, 0, 2)
        base = self._add(packed)
        for character in range(batch):
            place = source[1] + character * source[2]
            for number, start in enumerate(strips):
                columns = min(width, outputs - start)
                kernel = BlendKernel(
                    points, -(-columns // self._lanes), _BLEND_VECTORS, columns % self._lanes, activation == "elu"
                )
                yield Job(
                    kernel, (source[0], place), 0, (WEIGHTS, base + number * packed[0].nbytes), row_bytes,
                    (target[0], target[1] + character * target[2] + 4 * start), target[2], inputs, 1,
                    (COEFFICIENTS, 4 * points * character), columns=columns,
                )  # fmt: skip

    def _pack(self, matrix: np.ndarray, strips: tuple[Strip, ...]) -> list[int]:
        """Append the strips of ``matrix`` to the weights; where each begins, in bytes."""
        starts = []
        for strip in strips:
            part = np.zeros((len(matrix), strip.vectors * self._lanes), np.float32)
            part[:, : strip.columns] = matrix[:, strip.start : strip.start + strip.columns]
            starts.append(self._add(to_bfloat16(part) if self._bfloat16 else part))
        return starts

    def _add(self, part: np.ndarray) -> int:
        start = self._weight_bytes
        self._packed.append(part)
        self._weight_bytes += part.nbytes
        return start


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even, uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _blocks(depth: int) -> list[tuple[int, int]]:
    count = -(-depth // _DEPTH)
    size = -(-depth // count)
    return [(start, min(depth, start + size)) for start in range(0, depth, size)]
