"""Compressed formats of one weight matrix, and linear layers that multiply without unpacking it.

In: a dense ``(out, in)`` matrix of a linear layer. Out: a frozen value that takes fewer bytes and multiplies.

- :class:`BitmapWeight`: pruned weights; one bit per entry and the kept values (SpInfer, EuroSys 2025).
- :class:`FragmentBitmapWeight`, :class:`FragmentLosslessWeight`, :class:`FragmentSTBWeight`: these for tensor cores,
  decoded in registers on a GPU; :func:`stack_fragments` and :func:`fragment_rows` join and part their rows.
- :class:`LosslessWeight`: bfloat16 weights, bit-exact, with their exponents coded (ZipServ, ASPLOS 2026).
- :class:`SparseLosslessWeight`: pruned bfloat16 weights, bit-exact, by a bitmap and coded exponents together.
- :class:`NMWeight`: N of every M inputs, the same for 32 or more outputs (NM-SpMM, IPDPS 2025); :class:`NMPattern`,
  :func:`nm_mask` and :func:`nm_prune` choose them, :func:`nm_pack` and :func:`nm_spmm_model` plan GPU products.
- :class:`STBWeight`: signs and regions on an N:8 structure (STBLLM, ICLR 2025), with its real bits;
  :func:`stb_quantize` makes the :class:`STBLevels` that it packs.
- :class:`DenseWeight`: the plain matrix with our own matrix-vector kernel, what the others are measured against.
- :func:`pack_checkpoint` and :class:`PackedCheckpoint`: whole safetensors checkpoints in fewer bytes, bit for bit.
- :func:`save_bitmask` and :func:`load_bitmask`: bitmap weights in the format of the package compressed-tensors.
- :class:`CompressedLinear`: a drop-in for ``torch.nn.Linear`` on any of them.
- :class:`WeightFormat`: the contract; :func:`format_named` finds a format by its name, :func:`describe` and
  :func:`from_description` take one apart and put it together again.
- :func:`speed_over_dense`: what a format gains over the dense matrix on this machine, measured once;
  :func:`fastest_way`: whether a GPU should multiply a weight as it is stored, or dense.
"""

from gossamer.weights._auto import speed_over_dense
from gossamer.weights._bitmap import BitmapWeight
from gossamer.weights._bitmap_fragments import FragmentBitmapWeight
from gossamer.weights._bitmask import from_bitmask, load_bitmask, save_bitmask, to_bitmask
from gossamer.weights._dense import DenseWeight
from gossamer.weights._format import WeightFormat, describe, format_named, from_description
from gossamer.weights._fragments_gpu import fastest_way
from gossamer.weights._linear import CompressedLinear
from gossamer.weights._lossless import LosslessWeight
from gossamer.weights._lossless_fragments import FragmentLosslessWeight
from gossamer.weights._nm import NMWeight
from gossamer.weights._nm_model import A100, H200, NMDevice, NMPlan, nm_spmm_model
from gossamer.weights._nm_packed import NMPacked, nm_pack
from gossamer.weights._nm_pattern import NMPattern, nm_mask, nm_prune
from gossamer.weights._pack import pack_checkpoint
from gossamer.weights._packed import PackedCheckpoint, PackedTensor
from gossamer.weights._sparse_lossless import SparseLosslessWeight
from gossamer.weights._stacked import fragment_rows, stack_fragments
from gossamer.weights._stb import STBWeight
from gossamer.weights._stb_fragments import FragmentSTBWeight
from gossamer.weights._stb_quantise import STBLevels, stb_quantize

__all__ = [
    "A100",
    "H200",
    "BitmapWeight",
    "CompressedLinear",
    "DenseWeight",
    "FragmentBitmapWeight",
    "FragmentLosslessWeight",
    "FragmentSTBWeight",
    "LosslessWeight",
    "NMDevice",
    "NMPacked",
    "NMPattern",
    "NMPlan",
    "NMWeight",
    "PackedCheckpoint",
    "PackedTensor",
    "STBLevels",
    "STBWeight",
    "SparseLosslessWeight",
    "WeightFormat",
    "describe",
    "fastest_way",
    "format_named",
    "fragment_rows",
    "from_bitmask",
    "from_description",
    "load_bitmask",
    "nm_mask",
    "nm_pack",
    "nm_prune",
    "nm_spmm_model",
    "pack_checkpoint",
    "save_bitmask",
    "speed_over_dense",
    "stack_fragments",
    "stb_quantize",
    "to_bitmask",
]
