"""One product on both engines of a GPU: dense spots on tensor cores, the rest on CUDA cores, at once.

A tensor-core tile costs the same however few entries it holds; a scalar kernel pays for each entry. So every 8x1 vector
of the matrix goes where it is cheaper (Shi et al., "Libra", arXiv 2506.22714): with at least ``theta`` entries to the
tensor cores, otherwise, entry by entry, to the CUDA cores. For sampled products (SDDMM) the unit is an 8x16 block::

    8-row window:   vectors with >= theta entries   ->  blocks of 4 or 16 columns, a bitmap and packed values each
                    all other entries, row by row   ->  parts of 32 (long), rows and remainders of <= 3 (short)

``theta`` = 1 sends everything to tensor cores, ``theta`` = 9 (for SDDMM: 129) everything to CUDA cores. It is chosen from
a count of the vectors by a cost model. Two units that write one row say so by their ``atomic`` flags, exactly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from gossamer.core.files import load_arrays, save_arrays
from gossamer.sparse import _hybrid_kernel as loops
from gossamer.sparse._gpu_costs import H200, EngineCosts
from gossamer.sparse._hybrid_parts import (
    RowParts,
    TensorPart,
    kept_by_blocks,
    kept_by_vectors,
    row_parts,
    tensor_part,
    with_exact_flags,
)
from gossamer.sparse._matrix import SparseMatrix
from gossamer.sparse._windows import Windows, find_windows

Op = Literal["spmm", "sddmm"]
THETAS = {"spmm": tuple(range(1, 10)), "sddmm": (1, 4, 8, 14, 16, 18, 22, 24, 30, 32, 38, 40, 48, 50, 56, 64, 129)}
WIDTHS = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 4}
_FILE_VERSION = 1


@dataclass(frozen=True, eq=False)
class HybridPlan:
    """A partition of the entries of a matrix ``shape`` for one operation.

    theta: the threshold. width: columns of a tensor-core block (SpMM: 4 for float32 as tf32, 16 for half types;
    SDDMM: 16). tensor, long, short: tensors by the names of :class:`TensorPart` and :class:`RowParts`, with ``value``
    beside them (SpMM). seconds: predicted by theta. Together the three ``entry`` arrays are a permutation of all entries.
    """

    op: Op
    shape: tuple[int, int]
    n: int
    theta: int
    width: int
    dtype: torch.dtype
    tensor: Mapping[str, Tensor]
    long: Mapping[str, Tensor]
    short: Mapping[str, Tensor]
    seconds: Mapping[int, float]
    costs: EngineCosts = H200

    @classmethod
    def build(
        cls, matrix: SparseMatrix, n: int, op: Op = "spmm", theta: int | Literal["auto"] = "auto",
        dtype: torch.dtype | None = None, costs: EngineCosts = H200,
    ) -> Self:  # fmt: skip
        """Partition ``matrix`` on the CPU for products with ``n`` dense columns (SDDMM: features).

        theta: 1 to 9 (SDDMM: 1 to 129), or "auto". dtype: of the values, float16, bfloat16 or float32.

        Raises:
            ValueError: ``op`` or ``theta`` is none of these, ``n`` is negative, or int32 cannot count the entries.
            TypeError: tensor cores do not multiply ``dtype``.
        """
        kind = dtype or matrix.dtype
        if op not in THETAS:
            raise ValueError(f"op must be spmm or sddmm, got {op!r}")
        if kind not in WIDTHS:
            raise TypeError(f"dtype must be float16, bfloat16 or float32, got {kind}")
        largest = THETAS[op][-1]
        if theta != "auto" and theta not in range(1, largest + 1):
            raise ValueError(f"theta must be 'auto' or from 1 to {largest} for {op}, got {theta!r}")
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if matrix.nnz > torch.iinfo(torch.int32).max // 16:
            raise ValueError(f"matrix must have fewer than 2^27 entries for int32 offsets, got {matrix.nnz}")
        width = WIDTHS[kind] if op == "spmm" else 16
        windows = find_windows(matrix)
        seconds = predicted_seconds(windows, matrix, n, op, width, costs)
        chosen = min(seconds, key=seconds.__getitem__) if theta == "auto" else theta
        keep = kept_by_vectors if op == "spmm" else kept_by_blocks
        block_of, place_of = keep(windows, chosen, width)
        tensor = tensor_part(windows, block_of, place_of, width)
        left = np.flatnonzero(block_of[windows.vector] < 0)
        rows = matrix.rows.cpu().numpy()
        long, short = row_parts(left, rows[left], matrix.indices.cpu().numpy()[left], matrix.shape[0])
        if op == "spmm":
            tensor, long, short = with_exact_flags(tensor, long, short, matrix.shape[0])
        else:
            tensor, long, short = (_without_flags(part) for part in (tensor, long, short))
        plan = cls(
            op, matrix.shape, n, chosen, width, kind, _tensors(tensor), _tensors(long), _tensors(short), seconds, costs
        )  # fmt: skip
        return (plan if op == "sddmm" else plan.with_values(matrix.values.cpu())).to(matrix.device)

    def with_values(self, values: Tensor) -> Self:
        """The same partition with other values ``(nnz,)`` in CSR order; differentiable."""
        if self.op != "spmm":
            raise ValueError(f"values must not be given to a plan for {self.op}: it computes them")
        if tuple(values.shape) != (self.nnz,):
            raise ValueError(f"values must be of shape ({self.nnz},), got {tuple(values.shape)}")
        valued = ({**part, "value": values.to(self.dtype)[part["entry"]]} for part in self._parts())
        return self._with(*valued)

    def to(self, device: str | torch.device) -> Self:
        """The same plan with its arrays on another device."""
        return self._with(*({name: array.to(device) for name, array in part.items()} for part in self._parts()))

    def spmm(self, dense: Tensor) -> Tensor:
        """``matrix @ dense`` on the CPU, ``(m, n)``, summed in float32: the plain reading of the format."""
        self._check("spmm", dense, self.shape[1])
        wide = dense.detach().float().contiguous().numpy()
        out = np.zeros((self.shape[0], dense.shape[1]), np.float32)
        arrays = self._arrays(self.tensor, "row_offset", "window", "block", "column")
        loops.blocks_spmm(*arrays, self._words(), _floats(self.tensor["value"]), self.width, wide, out)
        for part in (self.long, self.short):
            loops.parts_spmm(*self._arrays(part, "row_offset", "row", "column"), _floats(part["value"]), wide, out)
        return torch.from_numpy(out).to(self.dtype)

    def sddmm(self, x: Tensor, y: Tensor) -> Tensor:
        """``x[row] . y[column]`` of every entry in CSR order ``(nnz,)``, on the CPU, summed in float32."""
        self._check("sddmm", x, self.shape[0])
        self._check("sddmm", y, self.shape[1])
        if x.shape[1] != y.shape[1]:
            raise ValueError(f"x and y must have as many features, got {x.shape[1]} and {y.shape[1]}")
        operands = x.detach().float().contiguous().numpy(), y.detach().float().contiguous().numpy()
        out = np.zeros(self.nnz, np.float32)
        arrays = self._arrays(self.tensor, "row_offset", "window", "block", "column")
        loops.blocks_sddmm(*arrays, self._words(), self.tensor["entry"].numpy(), self.width, *operands, out)
        for part in (self.long, self.short):
            loops.parts_sddmm(*self._arrays(part, "row_offset", "row", "column", "entry"), *operands, out)
        return torch.from_numpy(out).to(self.dtype)

    @property
    def nnz(self) -> int:
        """All entries."""
        return sum(part["entry"].shape[0] for part in self._parts())

    def stats(self) -> dict[str, Any]:
        """Counts of the partition, and what the cost model says of it, as JSON scalars."""
        blocks, groups = self.tensor["block"].shape[0] - 1, self.tensor["window"].shape[0]
        return {
            "op": self.op, "theta": self.theta, "n": self.n, "width": self.width, "nnz": self.nnz,
            "nnz_tensor": self.tensor["entry"].shape[0],
            "nnz_long": self.long["entry"].shape[0],
            "nnz_short": self.short["entry"].shape[0],
            "vectors": int((self.tensor["column"] >= 0).sum()),
            "blocks": blocks, "groups": groups,
            "long_parts": self.long["row"].shape[0], "short_parts": self.short["row"].shape[0],
            "predicted_seconds": self.seconds.get(self.theta),
            "costs": self.costs.device, "costs_calibrated": self.costs.calibrated,
        }  # fmt: skip

    def explain(self) -> str:
        """Predicted times of all thresholds, the chosen one first, and where the entries go."""
        counts = self.stats()
        source = "calibrated" if self.costs.calibrated else "NOT calibrated for these kernels"
        lines = [
            f"theta {self.theta}: {counts['nnz_tensor']} of {self.nnz} entries on tensor cores in {counts['blocks']} "
            f"blocks, {counts['nnz_long']} in long and {counts['nnz_short']} in short parts",
            f"predicted for {self.costs.device} ({source}), n = {self.n}:",
        ]
        others = sorted((theta for theta in self.seconds if theta != self.theta), key=self.seconds.__getitem__)
        for theta in (self.theta, *others):
            if theta in self.seconds:
                lines.append(f"  theta {theta:3} {self.seconds[theta] * 1e3:10.4f} ms")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one checksummed safetensors file, atomically."""
        names = ("tensor", "long", "short")
        arrays = {
            f"{name}.{key}": array.cpu()
            for name, part in zip(names, self._parts(), strict=True)
            for key, array in part.items()
        }
        about = {
            "version": _FILE_VERSION, "op": self.op, "shape": self.shape, "n": self.n, "theta": self.theta,
            "width": self.width, "dtype": str(self.dtype).removeprefix("torch."), "costs": vars(self.costs),
            "seconds": {str(theta): seconds for theta, seconds in self.seconds.items()},
        }  # fmt: skip
        save_arrays(path, arrays, {"gossamer_hybrid_plan": json.dumps(about)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; ``ValueError`` if the file is damaged, something else, or newer."""
        arrays, metadata = load_arrays(path)
        if "gossamer_hybrid_plan" not in metadata:
            raise ValueError(f"{os.fspath(path)} holds no hybrid plan")
        about = json.loads(metadata["gossamer_hybrid_plan"])
        if about["version"] > _FILE_VERSION:
            raise ValueError(
                f"{os.fspath(path)} is of version {about['version']}, newer than this Gossamer: upgrade it"
            )
        parts: dict[str, dict[str, Tensor]] = {"tensor": {}, "long": {}, "short": {}}
        for name, array in arrays.items():
            part, _, key = name.partition(".")
            parts[part][key] = array
        rows, columns = about["shape"]
        seconds = {int(theta): value for theta, value in about["seconds"].items()}
        kind = getattr(torch, about["dtype"])
        return cls(
            about["op"], (rows, columns), about["n"], about["theta"], about["width"], kind, parts["tensor"],
            parts["long"], parts["short"], seconds, EngineCosts(**about["costs"]),
        )  # fmt: skip

    def _parts(self) -> tuple[Mapping[str, Tensor], ...]:
        return self.tensor, self.long, self.short

    def _with(self, tensor: Mapping[str, Tensor], long: Mapping[str, Tensor], short: Mapping[str, Tensor]) -> Self:
        return type(self)(
            self.op,
            self.shape,
            self.n,
            self.theta,
            self.width,
            self.dtype,
            tensor,
            long,
            short,
            self.seconds,
            self.costs,
        )

    def _words(self) -> np.ndarray:
        words = self.tensor["bitmap"].numpy()
        return (words.view(np.uint32) if words.dtype == np.int32 else words.view(np.uint64)).astype(np.uint64)

    @staticmethod
    def _arrays(part: Mapping[str, Tensor], *names: str) -> list[np.ndarray]:
        return [part[name].numpy() for name in names]

    def _check(self, op: Op, dense: Tensor, rows: int) -> None:
        if op != self.op:
            raise ValueError(f"op must be {self.op}, for which the plan was built, got {op}")
        if dense.dtype != self.dtype:
            raise TypeError(f"operands must be {self.dtype} like the plan, got {dense.dtype}")
        if dense.ndim != 2 or dense.shape[0] != rows:
            raise ValueError(f"operand must be a matrix of {rows} rows, got shape {tuple(dense.shape)}")
        if {dense.device.type, self.tensor["entry"].device.type} != {"cpu"}:
            raise ValueError("operand and plan must be on the CPU: the GPU kernels are not here yet")


def predicted_seconds(
    windows: Windows, matrix: SparseMatrix, n: int, op: Op, width: int, costs: EngineCosts
) -> dict[int, float]:
    """The cost model's time of every threshold: one count of the vectors per threshold, nothing is built."""
    out = {}
    keep = kept_by_vectors if op == "spmm" else kept_by_blocks
    for theta in THETAS[op]:
        block_of, _ = keep(windows, theta, width)
        kept = block_of >= 0
        entries = int(windows.count[~kept].sum())
        blocks = int(block_of.max(initial=-1)) + 1
        tensor = costs.tensor(blocks, int(kept.sum()), n)
        parts = min(entries, matrix.shape[0]) + entries // 32
        out[theta] = costs.together(tensor, costs.scalar(entries, parts, n))
    return out


def _without_flags(part: TensorPart | RowParts) -> Any:
    """Sampled products write every output once: nothing is added up."""
    return type(part)(**{**vars(part), "atomic": np.zeros_like(part.atomic)})


def _tensors(part: TensorPart | RowParts) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in vars(part).items()}


def _floats(values: Tensor) -> np.ndarray:
    return values.detach().float().contiguous().numpy()
