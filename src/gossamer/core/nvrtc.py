"""CUDA C++ text to machine code to launch, without a CUDA toolkit.

NVRTC compiles on machines without a GPU too, so that a test can hold every source to every architecture. Machine code
is kept on disk under a digest of the source, its macros, the architecture and the compiler's version. Sources include
no headers and give their kernels as ``extern "C"``; what would be a template parameter is a macro.

Needs the extra ``gossamer[gpu]``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from gossamer.core.files import atomic_write
from gossamer.core.hardware import cache_dir

if TYPE_CHECKING:
    from torch import Tensor

Macros = Mapping[str, int | str]
Extent = int | tuple[int, ...]

_OPTIONS = ("-std=c++17", "-default-device")


def compile_cubin(source: str, arch: str, macros: Macros | None = None) -> bytes:
    """Machine code of ``source`` for ``arch`` (like ``"sm_90"``), from the disk cache where it is there.

    Raises:
        ValueError: this compiler does not know ``arch``.
        RuntimeError: the source does not compile; the message holds the compiler's log.
    """
    known = supported_architectures()
    if arch.removesuffix("a") not in known:
        raise ValueError(f"arch must be one of {', '.join(known)} for {compiler_version()}, got {arch!r}")
    options = [*_OPTIONS, *(f"-D{name}={value}" for name, value in sorted((macros or {}).items()))]
    key = hashlib.sha256("\0".join([source, arch, compiler_version(), *options]).encode()).hexdigest()[:32]
    path = cache_dir() / "cubin" / f"{key}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = _compile(source.encode(), [f"-arch={arch}", *options])
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(cubin)
    return cubin


@dataclass(frozen=True)
class Kernel:
    """A kernel on one GPU, launched on torch's current stream. Made by :func:`load_kernel`."""

    name: str
    handle: Any

    def launch(
        self, grid: Extent, block: Extent, *arguments: Tensor | Any, shared_bytes: int = 0, early: bool = False
    ) -> None:
        """Run ``grid`` blocks of ``block`` threads with ``shared_bytes`` of dynamic shared memory.

        early: begin while the kernel before on this stream ends, if that one allows it (``griddepcontrol``, compute
            capability 9.0); what others wrote may be read only after ``griddepcontrol.wait``.

        Tensors are passed as pointers, int and bool as they are; every other number must be a NumPy scalar of the
        parameter's own type, because a Python float would be passed as a double.

        Raises:
            TypeError: an argument is a Python float or of a kind that has no C counterpart.
            ValueError: a tensor is not on a CUDA device.
        """
        import torch
        from cuda.core import Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = _launch_config(grid, block, shared_bytes, early)
        launch(stream, config, self.handle, *(self._passed(argument) for argument in arguments))

    def _passed(self, argument: Any) -> Any:
        import numpy as np
        import torch

        if isinstance(argument, torch.Tensor):
            if not argument.is_cuda:
                raise ValueError(f"kernel {self.name} takes tensors on a CUDA device, got one on {argument.device}")
            return argument.data_ptr()
        if isinstance(argument, bool | int | np.generic):
            return argument
        raise TypeError(
            f"kernel {self.name} takes tensors, ints and NumPy scalars, got {type(argument).__name__}; "
            "write np.float32(x) for a float parameter"
        )


@cache
def load_kernel(source: str, name: str, macros: tuple[tuple[str, int | str], ...] = (), device: int = 0) -> Kernel:
    """The kernel ``name`` of ``source`` for CUDA device ``device``, compiled for its architecture; kept once loaded.

    macros: pairs of name and value.

    Raises:
        RuntimeError: there is no such GPU, or the source does not compile.
    """
    import torch

    if device >= torch.cuda.device_count():
        raise RuntimeError(f"kernel {name} needs CUDA device {device}; this machine has {torch.cuda.device_count()}")
    from cuda.core import Device, ObjectCode

    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cubin(source, f"sm_{major}{minor}", dict(macros))
    with torch.cuda.device(device):
        Device(device).set_current()
        handle = ObjectCode.from_cubin(cubin, name=name).get_kernel(name)
        _allow_all_shared_memory(handle, device)
        return Kernel(name, handle)


@cache
def compiler_version() -> str:
    """The compiler, like ``"NVRTC 13.0"``."""
    from cuda.bindings import nvrtc

    _, major, minor = _checked(nvrtc.nvrtcVersion())
    return f"NVRTC {major}.{minor}"


@cache
def supported_architectures() -> tuple[str, ...]:
    """What the compiler can compile for, oldest first: ``("sm_75", "sm_80", ...)``."""
    from cuda.bindings import nvrtc

    _, numbers = _checked(nvrtc.nvrtcGetSupportedArchs())
    return tuple(f"sm_{number}" for number in sorted(numbers))


@lru_cache(maxsize=1024)
def _launch_config(grid: Extent, block: Extent, shared_bytes: int, early: bool) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=early)


def _allow_all_shared_memory(handle: Any, device: int) -> None:
    """Let launches ask for as much dynamic shared memory as the GPU has; 48 KiB is the limit otherwise."""
    from cuda.bindings import driver

    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    status, most = driver.cuDeviceGetAttribute(limit, driver.CUdevice(device))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    dynamic = most - handle.attributes.shared_size_bytes
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuKernelSetAttribute(attribute, dynamic, handle.handle, driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the GPU refuses {dynamic} bytes of shared memory: {status.name}")


def _compile(source: bytes, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    _, program = _checked(nvrtc.nvrtcCreateProgram(source, b"kernel.cu", 0, None, None))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, length = _checked(nvrtc.nvrtcGetProgramLogSize(program))
            log = bytearray(length)
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            text = log.decode(errors="replace").rstrip("\0\n")
            raise RuntimeError(f"{compiler_version()} with {' '.join(options)} refuses the source:\n{text}")
        _, length = _checked(nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytearray(length)
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call of the compiler's library returned, its status checked."""
    from cuda.bindings import nvrtc

    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC failed: {result[0].name}")
    return result
