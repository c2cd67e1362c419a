"""Data-parallel training that sends less: sparse gradient exchange for PyTorch.

In: a model under ``torch.distributed`` (plain or in DDP). Out: the same training with a fraction of the traffic.

- :class:`GradientExchanger`: averages gradients by gTop-k, Top-k or densely, whichever a cost model says is fastest; with
  residuals, so that what is not sent today is sent later.
- :class:`NativeHooks`, :func:`ddp_hook`, :func:`fsdp_hook`: catch the gradients of a plain, DDP or FSDP model for it.
- :func:`gtopk_all_reduce`, :func:`topk_all_reduce`: the sparse all-reduces themselves (Shi et al., ICDCS 2019).
- :func:`plan_merge`: which neighbouring layers to exchange together (OMGS-SGD, MG-WFBP), by the optimum or as published.
- :func:`select_topk`, :func:`merge_topk`: the k largest magnitudes, and the sum of two such lists.
"""

from gossamer.train._exchanger import GradientExchanger, warm_up
from gossamer.train._gtopk import NonFiniteGradients, Reduced, gtopk_all_reduce, topk_all_reduce
from gossamer.train._hooks import NativeHooks, ddp_hook, fsdp_hook
from gossamer.train._merging import Layers, MergePlan, merge_schedule, plan_buckets, plan_merge
from gossamer.train._select import merge_topk, select_topk

__all__ = [
    "GradientExchanger",
    "Layers",
    "MergePlan",
    "NativeHooks",
    "NonFiniteGradients",
    "Reduced",
    "ddp_hook",
    "fsdp_hook",
    "gtopk_all_reduce",
    "merge_schedule",
    "merge_topk",
    "plan_buckets",
    "plan_merge",
    "select_topk",
    "topk_all_reduce",
    "warm_up",
]
