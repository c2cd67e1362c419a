"""Register-tiled CPU kernels, generated when they are needed; no compiler at the user's.

In: a small description (:class:`MicroKernel`: rows, vectors, semiring, edge, update, epilogue). Out: machine code.

- :func:`emit`: LLVM IR, assembly or an object file, for AVX2, AVX-512, AArch64 NEON and SVE, on any machine.
- :func:`kernel_address`: the function itself, on this machine; objects are kept on disk.
- :class:`Program`, :class:`Job`: lists of kernel calls that run in one native call, also over a stack.
- :func:`block_product`: semiring products of blocks of any size; :class:`Sweeps`: triangular sweeps over rows.
- :func:`tile`: the cheapest cut of a result into register tiles under a performance model; ``.explain()``.
- :func:`inner_loop`: what an emitted loop holds: instructions, multiply-adds, references to the stack.
- :func:`fma_chains`, :func:`min_plus_chains`: arithmetic on registers alone, the ceiling of a kernel.
- :func:`named_target`, :func:`host_target`: processors.
"""

from gossamer.codegen._assembly import InnerLoop, inner_loop
from gossamer.codegen._blend_ir import BlendKernel
from gossamer.codegen._block_ir import BlockProduct, block_product
from gossamer.codegen._ceilings import fma_chains, min_plus_chains
from gossamer.codegen._copy_ir import CopyKernel
from gossamer.codegen._emit import emit
from gossamer.codegen._inner_ir import InnerKernel
from gossamer.codegen._kernel import DYNAMIC_EDGE, MicroKernel
from gossamer.codegen._program import BASES, Job, Program, kernel_address
from gossamer.codegen._sweep_ir import Sweeps, sweeps
from gossamer.codegen._targets import ELEMENT_BYTES, TARGET_NAMES, Target, host_target, named_target
from gossamer.codegen._tiling import Strip, Tiling, fixed_tile, row_heights, tile, tile_cycles, tile_shapes

__all__ = [
    "BASES",
    "DYNAMIC_EDGE",
    "ELEMENT_BYTES",
    "TARGET_NAMES",
    "BlendKernel",
    "BlockProduct",
    "CopyKernel",
    "InnerKernel",
    "InnerLoop",
    "Job",
    "MicroKernel",
    "Program",
    "Strip",
    "Sweeps",
    "Target",
    "Tiling",
    "block_product",
    "emit",
    "fixed_tile",
    "fma_chains",
    "host_target",
    "inner_loop",
    "kernel_address",
    "min_plus_chains",
    "named_target",
    "row_heights",
    "sweeps",
    "tile",
    "tile_cycles",
    "tile_shapes",
]
