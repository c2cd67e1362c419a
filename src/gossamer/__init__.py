"""Gossamer: efficient AI computing that works only on what the data need.

Rooms are loaded when first touched, so that ``import gossamer`` costs next to nothing:

- ``gossamer.weights``: compressed formats of one weight matrix, and layers that multiply without unpacking it;
- ``gossamer.compress``: whole language models pruned, encoded, checked, served;
- ``gossamer.graphs``: layers of graph networks on those products, and their training;
- ``gossamer.sparse``: products of sparse with dense matrices, with gradients;
- ``gossamer.cluster``: schedulers of GPU clusters on real traces, sharing, energy, load;
- ``gossamer.train``: data-parallel training that sends less;
- ``gossamer.core``: what rooms share: hardware facts, measuring, files, reports.

>>> import gossamer
>>> gossamer.weights.__name__
'gossamer.weights'
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_ROOMS = ("cluster", "codegen", "compress", "core", "gated", "gemm", "graphs", "sparse", "train", "weights")


def __getattr__(name: str) -> ModuleType:
    if name in _ROOMS:
        return import_module(f"gossamer.{name}")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}; its rooms are {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return ["__version__", *_ROOMS]
