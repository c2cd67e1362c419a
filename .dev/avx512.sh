#!/bin/bash
# Run on a machine with AVX-512 from the root of the checkout: bash .dev/avx512.sh
# Tests of the generated kernels, then their claims (records are written below benchmarks/records).
set -u
export OMP_NUM_THREADS=1
unset OPENBLAS_CORETYPE PYTHONDONTWRITEBYTECODE
PYTHON=${PYTHON:-python3}
$PYTHON -m pip install --quiet pymetis unicorn scipy hypothesis pytest typer rich safetensors numba llvmlite onnx || true
export PYTHONPATH=$PWD/src
$PYTHON -c "
from gossamer.codegen import host_target, tile_shapes, tile
t = host_target(); print(t); print(tile_shapes(t)); print(tile(128, 128, 128, t).explain())"
$PYTHON -m pytest tests/codegen tests/gemm tests/graphs tests/gated src/gossamer/codegen src/gossamer/gemm src/gossamer/graphs src/gossamer/gated -q
$PYTHON -m pytest tests/codegen tests/gemm -q -m slow
for claim in gemm-peak gemm-small gemm-irregular gemm-regular gemm-tiling minplus-peak minplus-scipy \
  apsp-lu-chicago apsp-lu-sydney pfnn-b1 pfnn-b8 pfnn-b64 pfnn-torch apsp-auto; do
  $PYTHON -m gossamer.cli bench $claim
done
[ -n "${OUT:-}" ] && tar czf "$OUT/records.tgz" benchmarks/records
