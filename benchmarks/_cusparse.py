"""cuSPARSE with a choice of algorithm, which torch does not give: the peer of the GPU measurements of sparse products.

The library that torch has loaded is called directly. Preprocessing, where an algorithm has some, is done once beforehand.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALGORITHMS = {"ALG1": 4, "ALG2": 6, "ALG3": 12}
_DATA = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_INDEX_32, _ROW_MAJOR, _FLOAT32 = 2, 2, 0
_i64, _pointer = ctypes.c_int64, ctypes.c_void_p


class Spmm:
    """``A @ B`` for ``A`` in CSR (int32) and row-major ``B`` ``(k, n)``, by one algorithm.

    Raises:
        RuntimeError: cuSPARSE refuses.
    """

    def __init__(
        self, indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int], n: int, algorithm: str
    ) -> None:
        self._arrays = indptr, indices, values
        self._rows, self._n = shape[0], n
        self._matrix = _csr(indptr, indices, values, shape)
        sample, out = values.new_zeros(shape[1], n), values.new_zeros(shape[0], n)
        self._dense, self._out = _dense(sample), _dense(out)
        self._tail = ctypes.c_int(_FLOAT32), ctypes.c_int(ALGORITHMS[algorithm])
        size = ctypes.c_size_t()
        _call("cusparseSpMM_bufferSize", *self._head(), *self._tail, ctypes.byref(size))
        self._buffer = torch.empty(max(16, size.value), dtype=torch.uint8, device=values.device)
        _call("cusparseSpMM_preprocess", *self._head(), *self._tail, _pointer(self._buffer.data_ptr()))

    def __call__(self, dense: Tensor) -> Tensor:
        """The product, on torch's current stream."""
        out = torch.empty(self._rows, self._n, dtype=dense.dtype, device=dense.device)
        _call("cusparseDnMatSetValues", self._dense, _pointer(dense.data_ptr()))
        _call("cusparseDnMatSetValues", self._out, _pointer(out.data_ptr()))
        _call("cusparseSpMM", *self._head(), *self._tail, _pointer(self._buffer.data_ptr()))
        return out

    def _head(self) -> tuple[Any, ...]:
        return _handle(), 0, 0, _ONE, self._matrix, self._dense, _ZERO, self._out


class Sddmm:
    """``x[row] . y[column]`` of every entry, for row-major ``x`` ``(m, d)`` and ``y`` ``(k, d)``."""

    def __init__(self, indptr: Tensor, indices: Tensor, shape: tuple[int, int], d: int, dtype: torch.dtype) -> None:
        self._arrays = indptr, indices
        self._dtype, self._count = dtype, len(indices)
        values = torch.zeros(len(indices), dtype=dtype, device=indices.device)
        self._matrix = _csr(indptr, indices, values, shape)
        x, y = values.new_zeros(shape[0], d), values.new_zeros(shape[1], d)
        self._x, self._y = _dense(x), _dense(y)
        size = ctypes.c_size_t()
        _call("cusparseSDDMM_bufferSize", *self._head(), _FLOAT32, 0, ctypes.byref(size))
        self._buffer = torch.empty(max(16, size.value), dtype=torch.uint8, device=indices.device)
        _call("cusparseSDDMM_preprocess", *self._head(), _FLOAT32, 0, _pointer(self._buffer.data_ptr()))

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The dot products, on torch's current stream."""
        out = torch.empty(self._count, dtype=self._dtype, device=x.device)
        _call("cusparseDnMatSetValues", self._x, _pointer(x.data_ptr()))
        _call("cusparseDnMatSetValues", self._y, _pointer(y.data_ptr()))
        _call("cusparseSpMatSetValues", self._matrix, _pointer(out.data_ptr()))
        _call("cusparseSDDMM", *self._head(), _FLOAT32, 0, _pointer(self._buffer.data_ptr()))
        return out

    def _head(self) -> tuple[Any, ...]:
        return _handle(), 0, 1, _ONE, self._x, self._y, _ZERO, self._matrix


_ONE, _ZERO = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))


@cache
def _library() -> ctypes.CDLL:
    torch.sparse.mm(torch.eye(2, device="cuda").to_sparse_csr(), torch.eye(2, device="cuda"))  # loads the library
    mapped = Path("/proc/self/maps").read_text().split()
    return ctypes.CDLL(next(path for path in mapped if "libcusparse.so" in path))


@cache
def _created() -> ctypes.c_void_p:
    handle = _pointer()
    _call("cusparseCreate", ctypes.byref(handle))
    return handle


def _handle() -> ctypes.c_void_p:
    handle = _created()
    _call("cusparseSetStream", handle, _pointer(torch.cuda.current_stream().cuda_stream))
    return handle


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> ctypes.c_void_p:
    made = _pointer()
    pointers = (_pointer(array.data_ptr()) for array in (indptr, indices, values))
    sizes = _i64(shape[0]), _i64(shape[1]), _i64(len(indices))
    kinds = _INDEX_32, _INDEX_32, 0, _DATA[values.dtype]
    _call("cusparseCreateCsr", ctypes.byref(made), *sizes, *pointers, *kinds)
    return made


def _dense(tensor: Tensor) -> ctypes.c_void_p:
    made = _pointer()
    rows, columns = tensor.shape
    pointer = _pointer(tensor.data_ptr())
    sizes = _i64(rows), _i64(columns), _i64(columns)
    _call("cusparseCreateDnMat", ctypes.byref(made), *sizes, pointer, _DATA[tensor.dtype], _ROW_MAJOR)
    return made
