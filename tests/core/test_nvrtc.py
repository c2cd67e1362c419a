import numpy as np
import pytest
import torch

from gossamer.core import nvrtc
from gossamer.core.nvrtc import compile_cubin, compiler_version, load_kernel, supported_architectures


def has_compiler():
    try:
        return bool(compiler_version())
    except (ImportError, RuntimeError):  # the bindings are missing, or the library that they bind
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs the CUDA compiler: pip install 'gossamer[gpu]'")

SCALE = """
extern "C" __global__ void scale(float* x, float by, int n) {
  int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) x[i] *= by;
}
"""
ELF = b"\x7fELF"


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "cache_dir", lambda: tmp_path)
    return tmp_path / "cubin"


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_compiles_without_a_gpu(empty_cache, arch):
    assert compile_cubin(SCALE, arch, {"THREADS": 128}).startswith(ELF)


@needs_compiler
def test_second_time_comes_from_the_disk(empty_cache, monkeypatch):
    first = compile_cubin(SCALE, "sm_90", {"THREADS": 128})
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_cubin(SCALE, "sm_90", {"THREADS": 128}) == first


@needs_compiler
def test_source_macros_and_architecture_each_make_another_entry(empty_cache):
    compile_cubin(SCALE, "sm_90", {"THREADS": 128})
    compile_cubin(SCALE, "sm_90", {"THREADS": 256})
    compile_cubin(SCALE, "sm_80", {"THREADS": 128})
    compile_cubin(SCALE + "\n", "sm_90", {"THREADS": 128})
    assert len(list(empty_cache.iterdir())) == 4


@needs_compiler
def test_refused_source_tells_the_line(empty_cache):
    with pytest.raises(RuntimeError, match=r'kernel\.cu\(3\): error: identifier "THREADS" is undefined'):
        compile_cubin(SCALE, "sm_90")
    assert not empty_cache.exists()


@needs_compiler
def test_unknown_architecture_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=f"sm_90.*{compiler_version()}.*got 'sm_35'"):
        compile_cubin(SCALE, "sm_35")
    assert "sm_90" in supported_architectures()


@needs_compiler
def test_a_missing_gpu_is_named():
    with pytest.raises(RuntimeError, match="needs CUDA device 99"):
        load_kernel(SCALE, "scale", device=99)


def test_only_what_has_a_c_counterpart_is_passed():
    kernel = nvrtc.Kernel("scale", None)
    assert kernel._passed(7) == 7
    assert kernel._passed(np.float32(0.5)) == np.float32(0.5)
    with pytest.raises(TypeError, match=r"np\.float32"):
        kernel._passed(0.5)
    with pytest.raises(ValueError, match="on a CUDA device, got one on cpu"):
        kernel._passed(torch.zeros(1))


@pytest.mark.gpu
@needs_compiler
def test_launch_runs_on_the_current_stream(empty_cache):
    kernel = load_kernel(SCALE, "scale", (("THREADS", 128),))
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x += 1
        kernel.launch(8, 128, x, np.float32(2), 1000)
        x += 1
    stream.synchronize()
    assert torch.equal(x.cpu(), (torch.arange(1000) + 1.0) * 2 + 1)


@pytest.mark.gpu
@needs_compiler
def test_launch_is_captured_by_a_cuda_graph(empty_cache):
    kernel = load_kernel(SCALE, "scale", (("THREADS", 128),))
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(8, 128, x, np.float32(2), 1000)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [4.0]
