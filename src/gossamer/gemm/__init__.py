"""Dense products that vendor libraries are slow at: small, skinny, irregular; planned once, run many times.

In: sizes, and B where it is known before. Out: :class:`GemmPlan`, whose ``run(a, b, c)`` computes one product and
whose ``run_many`` computes a stack in one native call.

- :func:`gemm_plan`: register tiles chosen by a performance model; float32, or bfloat16 with float32 sums; bias, ReLU and
  ELU fused; alpha and beta; a B that is packed once.
"""

from gossamer.gemm._plan import EPILOGUES, GemmPlan, gemm_plan

__all__ = ["EPILOGUES", "GemmPlan", "gemm_plan"]
