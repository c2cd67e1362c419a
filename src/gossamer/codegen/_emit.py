"""The generated code itself, to look at or to link elsewhere."""

from __future__ import annotations

from gossamer.codegen._compile import Kind, render
from gossamer.codegen._program import AnyKernel, kernel_ir
from gossamer.codegen._targets import Target, named_target


def emit(kernel: AnyKernel, target: str | Target = "host", kind: Kind = "asm") -> str | bytes:
    """``kernel`` for ``target`` as LLVM IR ("ir"), assembly ("asm") or a linkable object file ("obj", bytes).

    target: "x86-avx2", "x86-avx512", "aarch64-neon", "aarch64-sve", "host", or a :class:`Target`. The function follows the
    C calling convention; its parameters are those of the module text of ``_micro_ir``: pointers, strides in bytes,
    depth and tiles.

    Raises:
        ValueError: a name is unknown, or the tile does not fit the target's registers.

    >>> from gossamer.codegen import MicroKernel, inner_loop
    >>> loop = inner_loop(emit(MicroKernel(6, 3), "aarch64-neon"))
    >>> loop.multiply_adds, loop.stack_references  # 6 x 3 for each of four steps
    (72, 0)
    """
    machine = named_target(target) if isinstance(target, str) else target
    return render(kernel_ir(kernel, machine), machine, kind)
