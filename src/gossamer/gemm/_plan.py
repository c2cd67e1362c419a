"""Products planned once and run many times: ``C = activation(alpha A B + beta C + bias)``."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.codegen import BASES, Program, Target, Tiling, fixed_tile, host_target, tile
from gossamer.core.jit import aligned_bytes
from gossamer.gemm._blocking import (
    A_COPY,
    B_COPY,
    BIAS,
    LATER_SCALES,
    SCALES,
    A,
    B,
    Blocking,
    C,
    Form,
    Share,
    Strides,
    takes_inner,
)  # fmt: skip
from gossamer.gemm._pack import pack

EPILOGUES = ("none", "bias", "relu", "elu", "bias_relu", "bias_elu")
_DTYPES: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16)}


@dataclass(frozen=True)
class _Part:
    """One thread's program and its scratch memory."""

    program: Program
    scratch: tuple[np.ndarray, np.ndarray]


_Operands = tuple[np.ndarray, np.ndarray | None, np.ndarray | None, np.ndarray | None]


@dataclass(frozen=True)
class _Bound:
    """A plan's calls on certain arrays, which it keeps alive: running on the same arrays again costs no checks."""

    given: _Operands
    strides: tuple[tuple[int, ...], ...]
    c: np.ndarray
    calls: list[Callable[[], None]]
    pool: ThreadPoolExecutor | None

    def holds(self, given: _Operands) -> bool:
        """Whether these are the same arrays, and nobody has changed their strides in place."""
        same = all(ours is theirs for ours, theirs in zip(self.given, given, strict=True))
        # A result that was made here belongs to the caller of then: it must not be written again.
        return (
            same
            and given[2] is not None
            and self.strides == tuple(array.strides for array in given if array is not None)
        )

    def run(self) -> None:
        """Compute."""
        if self.pool is None:
            self.calls[0]()
            return
        for done in [self.pool.submit(call) for call in self.calls]:
            done.result()


class GemmPlan:
    """A product of fixed sizes. Made by :func:`gemm_plan`; it holds scratch memory: run it from one thread at a time."""

    def __init__(
        self, m: int, n: int, k: int, form: Form, scales: tuple[float, float], threads: int, target: Target,
        packed: np.ndarray | None, tiling: Tiling,
    ) -> None:  # fmt: skip
        self.m, self.n, self.k = m, n, k
        self.tiling = tiling
        self.threads = threads
        self._form, self._target, self._packed = form, target, packed
        self._scales = np.array([*scales, scales[0], 1.0], np.float32)
        self._parts: dict[tuple[int, int, int], list[_Part]] = {}
        self._last: _Bound | None = None
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def run(
        self, a: np.ndarray, b: np.ndarray | None = None, c: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute one product.

        a: ``(m, k)``. b: ``(k, n)``, or ``(n, k)`` with ``transb``; left out where B was packed. c: ``(m, n)`` float32,
        written in place; made if left out. bias: ``(n,)`` float32, for the epilogues that add one. Entries of a row must be
        consecutive; rows may be any distance apart. bfloat16 operands are uint16 arrays of their bits.

        Raises:
            TypeError: an operand is no NumPy array of the right dtype.
            ValueError: a shape differs from the plan's, rows have gaps between entries, or c shares memory with a or b.
        """
        return self._execute((a, b, c, bias), stack=False)

    def run_many(
        self, a: np.ndarray, b: np.ndarray | None = None, c: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute a stack of products in one native call: ``a`` ``(items, m, k)``, ``c`` ``(items, m, n)``.

        b: one for all, or a stack too; the same holds for what was packed. bias: one for all. Raises as :meth:`run`.
        """
        return self._execute((a, b, c, bias), stack=True)

    def explain(self) -> str:
        """The register tiles, the blocks, and what the performance model expects."""
        packed = "packed before" if self._packed is not None else "as it lies" if not self._form.transb else "turned"
        if takes_inner(self._form.dtype, self.n, self.k, self._target):
            return f"{self.m} x {self.n} x {self.k}: sums along the depth, B {packed}, {self.threads} thread(s)"
        return f"{self.tiling.explain()}\n  {self._form.dtype}, B {packed}, {self.threads} thread(s)"

    def _operands(
        self, a: np.ndarray, b: np.ndarray | None, c: np.ndarray | None, bias: np.ndarray | None, stack: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        dtype = _DTYPES[self._form.dtype]
        _check("a", a, dtype, (self.m, self.k), stack, optional=False)
        items = a.shape[:1] if stack else ()
        if self._packed is not None:
            if b is not None:
                raise ValueError("b must be left out: it was packed when the plan was made")
            b = self._packed
            if len(b) not in (1, *items):
                raise ValueError(f"a must be a stack of {len(b)} like the packed b, got {items or 'a single matrix'}")
        else:
            shape = (self.n, self.k) if self._form.transb else (self.k, self.n)
            if b is None:
                raise ValueError(f"b of shape {shape} is missing: it was not packed when the plan was made")
            _check("b", b, dtype, shape, stack, optional=True)
            if b.ndim == 3 and b.shape[:1] != items:
                raise ValueError(f"b must be a stack of {items[0]} like a, got {len(b)}")
        if c is None:
            if self._form.update != "store":
                raise ValueError("c is missing: with beta != 0 it is read")
            c = np.empty((*items, self.m, self.n), np.float32)
        _check("c", c, np.dtype(np.float32), (self.m, self.n), stack, optional=False)
        if stack and len(c) != len(a):
            raise ValueError(f"c must be a stack of {len(a)} like a, got {len(c)}")
        if not c.flags.writeable or np.may_share_memory(a, c) or np.may_share_memory(b, c):
            raise ValueError("c must be writeable and share no memory with a or b")
        if self._form.bias != (bias is not None):
            raise ValueError(
                f"bias must be given exactly where the epilogue adds one; this adds {int(self._form.bias)}"
            )
        if bias is not None:
            _check_vector(bias, self.n)
        return a, b, c, bias

    def _execute(self, given: _Operands, stack: bool) -> np.ndarray:
        if self._last is None or not self._last.holds(given):
            self._last = self._bind(given, stack)
        self._last.run()
        return self._last.c

    def _bind(self, given: _Operands, stack: bool) -> _Bound:
        """Operands checked, and every thread's call prepared."""
        a, b, c, bias = self._operands(*given, stack=stack)
        items = len(a) if stack else 1
        bases, steps = [0] * BASES, [0] * BASES
        bases[A], bases[B], bases[C] = a.ctypes.data, b.ctypes.data, c.ctypes.data
        if items > 1:
            steps[A], steps[C] = a.strides[0], c.strides[0]
            stacked = len(b) > 1 if b is self._packed else b.ndim == 3
            steps[B] = b.strides[0] if stacked else 0
        bases[BIAS] = bias.ctypes.data if bias is not None else 0
        bases[SCALES] = self._scales.ctypes.data
        bases[LATER_SCALES] = bases[SCALES] + 8
        rows = a.strides[-2], 0 if b is self._packed else b.strides[-2], c.strides[-2]
        if rows not in self._parts:
            self._parts[rows] = self._make_parts(Strides(*rows))
        calls = []
        for part in self._parts[rows]:
            own = list(bases)
            own[A_COPY], own[B_COPY] = part.scratch[0].ctypes.data, part.scratch[1].ctypes.data
            calls.append(part.program.bound(own, steps, items))
        return _Bound(given, tuple(array.strides for array in given if array is not None), c, calls, self._pool)

    def _make_parts(self, strides: Strides) -> list[_Part]:
        parts = []
        for share in _shares(self.tiling, self.threads):
            blocking = Blocking(self._form, share, strides, self.k, self._target)
            scratch = aligned_bytes(blocking.a_scratch), aligned_bytes(blocking.b_scratch)
            parts.append(_Part(Program(blocking.jobs, self._target), scratch))
        return parts


def gemm_plan(
    m: int, n: int, k: int, dtype: str = "f32", transb: bool = False, prepack_b: np.ndarray | None = None,
    epilogue: str = "none", threads: int = 1, alpha: float = 1.0, beta: float = 0.0, target: Target | None = None,
    tiling: str = "dynamic",
) -> GemmPlan:  # fmt: skip
    """Plan ``C = activation(alpha A B + beta C + bias)`` for A ``(m, k)``, B ``(k, n)`` and C ``(m, n)``.

    The register tiles are the cheapest cut under a performance model (after autoGEMM, Wu et al., SC 2024). Kernels that the
    plan needs are generated now, some tens of milliseconds each when they are not on disk yet.

    dtype: "f32", or "bf16" (uint16 arrays of bits; sums and C are float32). transb: B comes as ``(n, k)``. prepack_b: B,
    or a stack of them, packed now for all runs. epilogue: "none", "bias", "relu", "elu", "bias_relu" or "bias_elu".
    beta: with 0, C is not read. target: another processor's path, for tests. tiling: "dynamic", or "fixed": one tile size.

    Raises:
        ValueError: a size is below 1, or a name is unknown.
        TypeError: ``prepack_b`` has another dtype.
        RuntimeError: the processor has no vectors that kernels are generated for.

    >>> import numpy as np
    >>> plan = gemm_plan(2, 3, 4, epilogue="bias_relu")
    >>> plan.run(np.ones((2, 4), np.float32), np.ones((4, 3), np.float32), bias=np.array([1, -9, 0], np.float32))
    array([[5., 0., 4.],
           [5., 0., 4.]], dtype=float32)
    """
    for name, size in (("m", m), ("n", n), ("k", k), ("threads", threads)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    for name, value, known in (
        ("dtype", dtype, tuple(_DTYPES)), ("epilogue", epilogue, EPILOGUES), ("tiling", tiling, ("dynamic", "fixed"))
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    machine = target or host_target()
    plain = {(1.0, 0.0): "store", (1.0, 1.0): "accumulate"}
    bias, activation = "bias" in epilogue, re.sub("bias_?", "", epilogue).replace("none", "") or "none"
    form = Form(dtype, transb, prepack_b is not None, plain.get((alpha, beta), "scale"), bias, activation)
    cut = (tile if tiling == "dynamic" else fixed_tile)(m, n, k, machine)
    packed = None if prepack_b is None else _packed(prepack_b, form, cut, machine)
    return GemmPlan(m, n, k, form, (alpha, beta), threads, machine, packed, cut)


def _packed(b: np.ndarray, form: Form, cut: Tiling, target: Target) -> np.ndarray:
    shape = (cut.n, cut.k) if form.transb else (cut.k, cut.n)
    _check("prepack_b", b, _DTYPES[form.dtype], shape, stack=True, optional=True)
    by_columns = b if form.transb else np.swapaxes(b, -1, -2)
    if takes_inner(form.dtype, cut.n, cut.k, target):
        return np.ascontiguousarray(by_columns).reshape(-1, cut.n * cut.k)
    return pack(np.swapaxes(by_columns, -1, -2), cut.strips, target.lanes())


def _shares(tiling: Tiling, threads: int) -> list[Share]:
    """Whole rows of C for each thread, or whole strips where there are more of them."""
    if threads == 1:
        return [Share(0, tiling.m, tiling)]
    size = -(-tiling.m // threads)
    return [
        Share(row, min(size, tiling.m - row), _same_strips(tiling, min(size, tiling.m - row)))
        for row in range(0, tiling.m, size)
    ]


def _same_strips(tiling: Tiling, rows: int) -> Tiling:
    """A tiling of fewer rows with the same strips, because B is packed for those."""
    from dataclasses import replace

    from gossamer.codegen import row_heights

    strips = tuple(
        replace(strip, heights=row_heights(rows, tiling.k, strip.vectors, tiling.target)) for strip in tiling.strips
    )
    return replace(tiling, m=rows, strips=strips)


def _check(name: str, array: Any, dtype: np.dtype, shape: tuple[int, int], stack: bool, optional: bool) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise TypeError(f"{name} must be a NumPy array of {dtype}, got {getattr(array, 'dtype', type(array).__name__)}")
    dimensions = (2, 3) if stack and optional else (3,) if stack else (2,)
    if array.ndim not in dimensions or array.shape[-2:] != shape or 0 in array.shape:
        expected = f"(items, {shape[0]}, {shape[1]})" if stack else str(shape)
        raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    row = array.strides[-1] == array.itemsize or shape[1] == 1
    apart = array.strides[-2] >= array.itemsize * shape[1] or shape[0] == 1
    if not row or not apart or array.strides[-2] % array.itemsize:
        raise ValueError(
            f"{name} must have consecutive entries in its rows, got strides {array.strides} bytes; "
            f"pass np.ascontiguousarray({name})"
        )


def _check_vector(bias: Any, n: int) -> None:
    if not isinstance(bias, np.ndarray) or bias.dtype != np.float32:
        raise TypeError(f"bias must be a NumPy array of float32, got {getattr(bias, 'dtype', type(bias).__name__)}")
    if bias.shape != (n,) or not bias.flags.c_contiguous:
        raise ValueError(f"bias must be contiguous and have shape ({n},), got {bias.shape}")
