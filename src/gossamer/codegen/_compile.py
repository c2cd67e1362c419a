"""From IR to machine code: text, assembly, object files; objects kept on disk; addresses of functions on the host.

An object file is found again by a digest of the IR, the processor's name and features, and the versions of llvmlite and
LLVM, so that a home shared by different machines or a new version never runs another's code. A damaged file is
compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from functools import cache
from typing import Any, Literal

from gossamer.codegen._targets import Target
from gossamer.core.files import atomic_write
from gossamer.core.hardware import cache_dir

Kind = Literal["ir", "asm", "obj"]
KINDS = ("ir", "asm", "obj")
_lock = threading.Lock()
_engines: list[Any] = []


def render(module: Any, target: Target, kind: Kind) -> str | bytes:
    """``module`` as text ("ir"), assembly ("asm") or an object file ("obj") for ``target``.

    Raises:
        ValueError: ``kind`` is none of these.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    text = str(module)
    if kind == "ir":
        return text
    machine = _machine(target)
    parsed = _parsed(text)
    return machine.emit_assembly(parsed) if kind == "asm" else machine.emit_object(parsed)


def addresses(module: Any, target: Target) -> dict[str, int]:
    """Compile ``module`` for the host and load it: the address of every function that it defines."""
    from llvmlite import binding

    names = [function.name for function in module.functions if not function.is_declaration]
    with _lock:
        engine = binding.create_mcjit_compiler(_parsed(""), _machine(target))
        engine.add_object_file(binding.ObjectFileRef.from_data(_object(module, target)))
        engine.finalize_object()
        _engines.append(engine)  # owns the code: kept as long as the process
        return {name: engine.get_function_address(name) for name in names}


def _object(module: Any, target: Target) -> bytes:
    path = cache_dir() / "kernels" / f"{_digest(str(module), target)}.o"
    with contextlib.suppress(OSError, ValueError):
        stored = path.read_bytes()
        if int(stored[:8], 16) == zlib.crc32(stored[8:]):
            return stored[8:]
    made = render(module, target, "obj")
    assert isinstance(made, bytes)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"%08x" % zlib.crc32(made) + made)
    return made


def _digest(text: str, target: Target) -> str:
    import llvmlite
    from llvmlite import binding

    versions = f"{llvmlite.__version__} {binding.llvm_version_info}"
    parts = [text, target.triple, target.cpu, target.features, versions]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _parsed(text: str) -> Any:
    from llvmlite import binding

    parsed = binding.parse_assembly(text)
    parsed.verify()
    return parsed


@cache
def _machine(target: Target) -> Any:
    from llvmlite import binding

    _initialise()
    found = binding.Target.from_triple(target.triple)
    return found.create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="default"
    )


@cache
def _initialise() -> None:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
