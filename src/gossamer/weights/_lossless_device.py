"""A lossless matrix whose arrays lie on a GPU: what :class:`~gossamer.weights.LosslessWeight` holds there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.weights._decompress_gpu import decompress_nib12, decompress_tbe


@dataclass(frozen=True, eq=False)
class OnDevice:
    """A bf16 matrix of shape ``(rows, columns)``: the tensors and the scalars of one of the layouts."""

    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, str | int]

    @property
    def layout(self) -> str:
        """The layout's name."""
        return str(self.scalars["layout"])

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return next(iter(self.tensors.values())).device

    def arrays(self) -> dict[str, Tensor]:
        """The arrays by name."""
        return dict(self.tensors)

    def meta(self) -> dict[str, str | int]:
        """The layout's name and its scalars."""
        return dict(self.scalars)

    def to_dense(self, out: Tensor) -> None:
        """Write the matrix into ``out``, contiguous bf16 on the same GPU, without waiting for it."""
        bits = out.view(torch.int16)
        with torch.cuda.device(self.device):
            if self.layout == "tbe":
                decompress_tbe(self.tensors, self.scalars, bits)
            elif self.layout == "nib12":
                decompress_nib12(self.tensors, self.scalars, bits)
            else:
                bits.copy_(self.tensors["bits"].view(self.shape))


@torch.library.custom_op("gossamer::decompress", mutates_args=())
def decompress(
    tensors: list[Tensor], names: str, layout: str, numbers: str, values: list[int], rows: int, columns: int
) -> Tensor:
    """The dense matrix as an operator that ``torch.compile`` and CUDA graphs can hold."""
    scalars: dict[str, str | int] = dict(zip(numbers.split(","), values, strict=True)) if numbers else {}
    scalars["layout"] = layout
    stored = OnDevice((rows, columns), dict(zip(names.split(","), tensors, strict=True)), scalars)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=stored.device)
    stored.to_dense(out)
    return out


@decompress.register_fake
def _decompress_shape(
    tensors: list[Tensor], names: str, layout: str, numbers: str, values: list[int], rows: int, columns: int
) -> Tensor:
    return tensors[0].new_empty(rows, columns, dtype=torch.bfloat16)


def dense_of(stored: OnDevice) -> Tensor:
    """The dense matrix, through the operator."""
    numbers = {name: int(value) for name, value in stored.scalars.items() if name != "layout"}
    return decompress(
        list(stored.tensors.values()), ",".join(stored.tensors), stored.layout,
        ",".join(numbers), list(numbers.values()), *stored.shape,
    )  # fmt: skip
