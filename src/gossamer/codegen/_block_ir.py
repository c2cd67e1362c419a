"""A product of blocks whose sizes are known only when it is called: ``C = C (+) A (x) B``, in one native call.

Planned products (:mod:`gossamer.gemm`) choose their tiles per shape. Elimination algorithms meet thousands of shapes
once each; for them one tile size with all its remainders is compiled, and a driver walks strips and tiles::

    block(table, a, lda, b, strip_bytes, ldb, c, ldc, m, n, k)

B is packed in strips or read as it lies: ``strip_bytes`` lead from strip to strip, ``ldb`` from row to row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from gossamer.codegen._compile import addresses
from gossamer.codegen._kernel import DYNAMIC_EDGE, MicroKernel, Semiring
from gossamer.codegen._loops import counted
from gossamer.codegen._micro_ir import KERNEL_TYPE
from gossamer.codegen._program import kernel_address
from gossamer.codegen._targets import Target, host_target
from gossamer.codegen._tiling import tile_shapes
from gossamer.codegen._vector_ops import LONG, PTR, offset

_TALLEST = 12


@dataclass(frozen=True)
class BlockProduct:
    """A semiring product for blocks of any size. Made by :func:`block_product`.

    columns: of one strip of B. rows: of the main register tile.
    """

    columns: int
    rows: int
    _table: np.ndarray
    _call: Any

    def __call__(
        self, a: int, lda: int, b: int, strip_bytes: int, ldb: int, c: int, ldc: int, m: int, n: int, k: int
    ) -> None:
        """``C (m, n) = C (+) A (m, k) (x) B (k, n)``; addresses and strides in bytes, nothing is checked."""
        if m > 0 and n > 0 and k > 0:
            self._call(self._table.ctypes.data, a, lda, b, strip_bytes, ldb, c, ldc, m, n, k)


@cache
def block_product(semiring: Semiring, element: str = "f32", padded_b: bool = True) -> BlockProduct:
    """The block product of a semiring. padded_b: strips of B may be read to their full width.

    >>> import numpy as np
    >>> product = block_product("min_plus")
    >>> a, b = np.array([[1.0, 5.0]], np.float32), np.zeros((2, product.columns), np.float32)
    >>> c = np.full((1, 3), np.inf, np.float32)
    >>> product(a.ctypes.data, 8, b.ctypes.data, 0, b.strides[0], c.ctypes.data, 12, 1, 3, 2)
    >>> c
    array([[1., 1., 1.]], dtype=float32)
    """
    target = host_target()
    lanes = target.lanes(element)
    # With 16 registers the squarer tile reads least; with 32 the taller one does (both measured best).
    width = 2 if target.registers > 16 or semiring == "plus_times" else 3
    rows = min(_TALLEST, max(tile_shapes(target, semiring, element)[width]))
    # Two lines for each number of vectors: full, and cut by a mask that the call gives, one kernel for all edges.
    table = np.zeros((2 * width, rows), np.int64)
    for line in range(2 * width):
        edge = DYNAMIC_EDGE if line % 2 else 0
        for height in range(1, rows + 1):
            kernel = MicroKernel(
                height,
                line // 2 + 1,
                element,
                semiring,
                edge=edge,
                update="accumulate",
                padded_b=padded_b and edge != 0,
            )
            table[line, height - 1] = kernel_address(kernel, target)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 11)(
        addresses(_driver_ir(target, width, rows, lanes), target)["block"]
    )
    return BlockProduct(width * lanes, rows, table, call)


def _driver_ir(target: Target, vectors: int, rows: int, lanes: int) -> ir.Module:
    """Strips of columns, and in each the main tiles and one remainder."""
    module = ir.Module(name="block")
    module.triple = target.triple
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [PTR, PTR, LONG, PTR, *[LONG] * 2, PTR, *[LONG] * 4]), "block"
    )
    table, a, lda, b, strip_bytes, ldb, c, ldc, m, n, k = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    element_bytes = LONG(target.vector_bytes // lanes)
    width = LONG(vectors * lanes)
    tiles, rest = builder.udiv(m, LONG(rows)), builder.urem(m, LONG(rows))
    strips = builder.udiv(builder.add(n, LONG(vectors * lanes - 1)), width)
    with counted(builder, 0, strips) as strip:
        start = builder.mul(strip, width)
        left = builder.sub(n, start)
        columns = builder.select(builder.icmp_signed("<", left, width), left, width)
        used = builder.udiv(builder.add(columns, LONG(lanes - 1)), LONG(lanes))
        cut = builder.select(builder.icmp_signed("==", builder.urem(columns, LONG(lanes)), LONG(0)), LONG(0), LONG(1))
        line = builder.add(builder.mul(builder.sub(used, LONG(1)), LONG(2)), cut)
        kernels = builder.gep(table, [builder.mul(line, LONG(rows))], source_etype=LONG)
        b_strip = offset(builder, b, builder.mul(strip, strip_bytes))
        c_strip = offset(builder, c, builder.mul(start, element_bytes))

        def run(height: ir.Value, count: ir.Value, first: ir.Value) -> None:
            place = builder.gep(kernels, [builder.sub(height, LONG(1))], source_etype=LONG)
            kernel = builder.inttoptr(builder.load(place, align=8, typ=LONG), KERNEL_TYPE.as_pointer())
            nothing = ir.Constant(PTR, None)
            rows_a, rows_c = (
                offset(builder, base, builder.mul(first, stride)) for base, stride in ((a, lda), (c_strip, ldc))
            )
            builder.call(kernel, [rows_a, lda, b_strip, ldb, rows_c, ldc, k, count, nothing, nothing, columns])

        with builder.if_then(builder.icmp_signed(">", tiles, LONG(0))):
            run(LONG(rows), tiles, LONG(0))
        with builder.if_then(builder.icmp_signed(">", rest, LONG(0))):
            run(rest, LONG(1), builder.mul(tiles, LONG(rows)))
    builder.ret_void()
    return module
