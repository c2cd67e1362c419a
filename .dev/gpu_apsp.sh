#!/bin/bash
# Run on a machine with an NVIDIA GPU from the root of the checkout: bash .dev/gpu_apsp.sh
set -u
unset PYTHONDONTWRITEBYTECODE
PYTHON=${PYTHON:-python3}
$PYTHON -m pip install --quiet pymetis cuda-core cuda-bindings nvidia-cuda-nvrtc scipy hypothesis pytest typer rich safetensors numba llvmlite || true
export PYTHONPATH=$PWD/src
$PYTHON -m pytest tests/graphs/test_apsp_gpu.py -q -m "gpu or not gpu"
for claim in h200-minplus-peak h200-apsp-luxembourg h200-rome-peak; do
  timeout 240 $PYTHON -m gossamer.cli bench $claim
done
[ -n "${OUT:-}" ] && tar czf "$OUT/records.tgz" benchmarks/records
