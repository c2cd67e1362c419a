"""Vector-wise N:M sparse weights: of every M inputs, N are kept, the same ones for 32, 64 or 128 outputs.

Bytes and arithmetic shrink by exactly N/M, at any N and M up to 256, and one byte of position serves a whole vector of
weights, so that nothing has to be decoded (Ma et al., "NM-SpMM", IPDPS 2025). The price is a coarser choice of
what to prune than :class:`~gossamer.weights.BitmapWeight` allows.

With the transposed matrix ``B = W.T`` of shape ``(in, out)``, padded to whole windows and groups:
``B[w // n * m + index[w, j // vector], j] = values[w, j]``, for kept rows ``w`` and outputs ``j``; all other entries
of ``B`` are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gossamer.core.hardware import cpu_features
from gossamer.core.jit import row_shares
from gossamer.weights._dense import bit_type, kernel_view
from gossamer.weights._format import FLOAT_TYPES, Matvec, Scalar, WeightFormat, check_matrix
from gossamer.weights._nm_gpu import COMPUTE_CAPABILITY, NMOnGpu
from gossamer.weights._nm_loops import TOKENS, nm_matmul, nm_matvec, nm_matvec_threaded, nm_plain
from gossamer.weights._nm_pattern import NMPattern, kept_inputs, magnitudes


@dataclass(frozen=True, eq=False)
class NMWeight(WeightFormat):
    """An N:M sparse matrix of shape ``(out, in)``, float16, bfloat16 or float32.

    values: int16 or int32 bit patterns of ``(kept, padded)``, row by row: ``kept = ceil(in / m) * n`` inputs,
        ``padded = ceil(out / vector) * vector`` outputs, zeros beyond the matrix.
    index: uint8 ``(kept, groups)``, row by row: the position of a kept input in its window, ascending in each window.
    """

    name: ClassVar[str] = "nm"
    version: ClassVar[int] = 1

    shape: tuple[int, int]
    dtype: torch.dtype
    pattern: NMPattern
    values: Tensor
    index: Tensor

    @classmethod
    def from_dense(  # type: ignore[override]
        cls, weight: Tensor, pattern: NMPattern | str = "16:32", scores: Tensor | None = None
    ) -> Self:
        """Keep the ``n`` strongest vectors of every window of ``weight``; exact if no window has more non-zero ones.

        pattern: an :class:`NMPattern`, or its text like "8:32" or "8:32:64". scores: ``(out, in)``, what ranks the
        weights; ``|weight|`` by default.

        Raises:
            TypeError: ``weight`` is no tensor of one of the three types.
            ValueError: ``weight`` is not a matrix, the pattern is none, or the scores do not fit it.

        >>> NMWeight.from_dense(torch.ones(32, 64), "2:32").density
        0.0625
        """
        check_matrix(weight, tuple(FLOAT_TYPES.values()), anywhere=True)
        pattern = NMPattern.parse(pattern) if isinstance(pattern, str) else pattern
        scores = magnitudes(weight) if scores is None else scores
        if scores.shape != weight.shape:
            raise ValueError(f"scores must have the shape of weight, {tuple(weight.shape)}, got {tuple(scores.shape)}")
        inputs = kept_inputs(scores, pattern)
        groups, kept = inputs.shape
        rows, columns = weight.shape
        bits = weight.new_zeros(groups * pattern.vector, pattern.windows(columns) * pattern.m)
        bits[:rows, :columns] = weight.detach()
        vectors = bits.view(bit_type(weight.dtype)).view(groups, pattern.vector, -1)
        values = vectors.gather(2, inputs[:, None, :].expand(groups, pattern.vector, kept))
        index = (inputs % pattern.m).to(torch.uint8)
        return cls((rows, columns), weight.dtype, pattern, _flat(values.permute(2, 0, 1)), _flat(index.t()))

    @property
    def kept(self) -> int:
        """Inputs that are kept for every group."""
        return self.pattern.kept(self.shape[1])

    @property
    def groups(self) -> int:
        """Groups of ``vector`` outputs."""
        return self.pattern.groups(self.shape[0])

    @property
    def value_matrix(self) -> Tensor:
        """``values`` as numbers, ``(kept, padded)``: a view."""
        return self.values.view(self.dtype).view(self.kept, self.groups * self.pattern.vector)

    @property
    def index_matrix(self) -> Tensor:
        """``index`` as ``(kept, groups)``: a view."""
        return self.index.view(self.kept, self.groups)

    @property
    def inputs(self) -> Tensor:
        """The kept inputs themselves, int64 ``(kept, groups)``; imaginary ones are ``in`` and above."""
        window = torch.arange(self.kept, device=self.index.device) // self.pattern.n
        return self.pattern.m * window[:, None] + self.index_matrix.long()

    @property
    def density(self) -> float:
        """Share of entries that are not zero."""
        return int((self.value_matrix != 0).sum()) / (self.shape[0] * self.shape[1])

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """The dense ``(out, in)`` matrix, written into ``out`` (same type and shape) if given."""
        rows, columns = self.shape
        groups, vector = self.groups, self.pattern.vector
        dense = self.values.new_zeros(groups, vector, self.pattern.windows(columns) * self.pattern.m)
        where = self.inputs.t()[:, None, :].expand(groups, vector, self.kept)
        dense.scatter_(2, where, self.values.view(self.kept, groups, vector).permute(1, 2, 0))
        dense = dense.view(groups * vector, -1)[:rows, :columns].contiguous().view(self.dtype)
        if out is None:
            return dense
        if tuple(out.shape) != self.shape or out.dtype != self.dtype:
            raise ValueError(f"out must be {self.dtype} of shape {self.shape}, got {out.dtype} {tuple(out.shape)}")
        return out.copy_(dense)

    def arrays(self) -> dict[str, Tensor]:
        """``values`` and ``index``."""
        return {"values": self.values, "index": self.index}

    def meta(self) -> dict[str, Scalar]:
        """The pattern's ``n``, ``m`` and ``vector``."""
        return {"n": self.pattern.n, "m": self.pattern.m, "vector": self.pattern.vector}

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, meta: Mapping[str, Scalar]
    ) -> Self:
        """Wrap stored arrays, on any device, without a copy; ``ValueError`` unless they are a matrix of ``shape``."""
        pattern = NMPattern(*(int(meta.get(name, 0)) for name in ("n", "m", "vector")))
        if set(arrays) != {"values", "index"}:
            raise ValueError(f"an N:M weight has values and index; got {', '.join(sorted(arrays)) or 'no arrays'}")
        kept, groups = pattern.kept(shape[1]), pattern.groups(shape[0])
        sizes = {"values": (bit_type(dtype), kept * groups * pattern.vector), "index": (torch.uint8, kept * groups)}
        for name, (kind, size) in sizes.items():
            array = arrays[name]
            if array.dtype != kind or array.shape != (size,) or not array.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous {kind} of shape ({size},) for a {pattern} matrix {shape}, "
                    f"got {array.dtype} of shape {tuple(array.shape)}"
                )
        weight = cls(shape, dtype, pattern, arrays["values"], arrays["index"])
        windows = weight.index_matrix.view(-1, pattern.n, groups).int()
        if bool((windows >= pattern.m).any()) or bool((windows.diff(dim=1) <= 0).any()):
            raise ValueError(f"index must ascend in every window and stay below {pattern.m}")
        imaginary = weight.inputs >= shape[1]
        vectors = weight.values.view(kept, groups, pattern.vector)
        if bool(vectors[imaginary].any()) or bool(weight.values.view(kept, -1)[:, shape[0] :].any()):
            raise ValueError(f"values must be zero outside of the matrix {shape}")
        return weight

    def to(self, device: str | torch.device, copy: bool = False) -> Self:
        """The same weight on another device, or ``copy`` of it on the same."""
        values, index = (array.to(device, copy=copy) for array in (self.values, self.index))
        return type(self)(self.shape, self.dtype, self.pattern, values, index)

    @cached_property
    def on_gpu(self) -> NMOnGpu:
        """The products on the weight's GPU."""
        return NMOnGpu(self)

    def kernel_runs(self, rows: int) -> bool:
        """Whether :meth:`linear` multiplies so many rows on a GPU without making the matrix dense."""
        device = self.values.device
        return device.type == "cuda" and rows > 0 and torch.cuda.get_device_capability(device) >= COMPUTE_CAPABILITY

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``(..., in)`` on the weight's device; the result has the dtype of ``x``.

        On a GPU of compute capability 8.0 or newer every product is computed on the kept weights alone, 16-bit ones on
        tensor cores with float32 sums, float32 ones on the ordinary units. Float32 activations are read without a copy
        where they are the transpose of a contiguous matrix. Gradients use the dense matrix. On a CPU as any format.

        Raises:
            ValueError: the last dimension of ``x`` is not ``in``, or ``x`` is on another device.
            TypeError: ``x`` is not floating point.
        """
        if not self.values.is_cuda:
            return super().linear(x, bias)
        self.check_input(x, bias)
        rows = x.numel() // self.shape[1]
        if x.requires_grad and torch.is_grad_enabled() or not self.kernel_runs(rows):
            return F.linear(x, self.to_dense().to(x.dtype), bias)
        flat = x.detach() if x.ndim == 2 else x.detach().reshape(rows, self.shape[1])
        y = self.on_gpu.multiply(flat.to(self.dtype)).to(x.dtype).reshape(*x.shape[:-1], self.shape[0])
        return y if bias is None else y + bias

    def bind(self, threads: int = 1, features: frozenset[str] | None = None) -> Matvec:
        """``f(x, out)`` for ``out = W @ x``; ``features`` masks the processor's, for tests."""
        values, index, shares, pattern = self._operands(threads)
        kernel = nm_plain if not self._wide(features) else nm_matvec if threads == 1 else nm_matvec_threaded
        rows, columns = self.shape
        inputs, outputs = pattern.windows(columns) * pattern.m, self.groups * pattern.vector

        def matvec(x: np.ndarray, out: np.ndarray) -> None:
            padded = x if inputs == columns else np.concatenate([x, np.zeros(inputs - columns, np.float32)])
            sums = out if outputs == rows else np.empty(outputs, np.float32)
            kernel(values, index, padded, sums, pattern.n, pattern.m, pattern.vector, shares)
            if outputs != rows:
                out[:] = sums[:rows]

        return matvec

    def matmul_small(
        self, x: np.ndarray, out: np.ndarray, threads: int = 1, features: frozenset[str] | None = None
    ) -> None:
        """``out = x @ W.T`` for some rows: ``x`` float32 ``(count, in)``, ``out`` float32 ``(count, out)``."""
        if len(x) == 1 or not self._wide(features):
            matvec = self.bind(threads, features)
            for row in range(len(x)):
                matvec(x[row], out[row])
            return
        values, index, shares, pattern = self._operands(threads)
        quads = -(-len(x) // TOKENS)
        padded = np.zeros((quads * TOKENS, pattern.windows(self.shape[1]) * pattern.m), np.float32)
        padded[: len(x), : self.shape[1]] = x
        ordered = np.ascontiguousarray(padded.reshape(quads, TOKENS, -1).transpose(0, 2, 1))
        sums = np.empty((quads, TOKENS, self.groups * pattern.vector), np.float32)
        nm_matmul(values, index, ordered, sums, pattern.n, pattern.m, pattern.vector, shares)
        out[:] = sums.reshape(quads * TOKENS, -1)[: len(x), : self.shape[0]]

    def _operands(self, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, NMPattern]:
        shares = row_shares(np.arange(self.groups + 1), threads)
        return kernel_view(self.values.cpu(), self.dtype), self.index.cpu().numpy(), shares, self.pattern

    def _wide(self, features: frozenset[str] | None) -> bool:
        present = cpu_features() if features is None else features
        return self.dtype != torch.float16 or "f16c" in present or "neon" in present


def _flat(matrix: Tensor) -> Tensor:
    """The entries in order, in memory of their own that numpy asked for: it asks the system for large pages."""
    if matrix.device.type != "cpu":
        return matrix.contiguous().view(-1)
    array = np.empty(matrix.numel(), matrix.numpy().dtype)
    array.reshape(matrix.shape)[:] = matrix.numpy()
    return torch.from_numpy(array)
