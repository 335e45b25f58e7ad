"""Products by the algorithm of NVIDIA's library that takes the least time, timed in front of a capture.

torch calls the library with the algorithm that this expects to be best. For 33 to 512 rows, where whole weights are
fetched for few operations, another one that it offers is often faster: up to a fifth under weights of 8B. All that it
offers for a shape run once in front of the capture of that shape, over a cold cache, and the graph holds the fastest.
Steps that are not captured stay torch's: their numbers of rows have no end.

The library is what torch loads itself, so it is called through `ctypes`, as the interface has been since CUDA 10.1
(NVIDIA, "cuBLASLt API", docs.nvidia.com/cuda/cublas).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen

from slotline.core.launching import may_choose

logger = logging.getLogger("slotline")

ROWS = range(33, 513)
"""Below, ours are faster; above, no algorithm was more than a few hundredths faster than the library's own choice."""
OFFERED = 8
"""Algorithms to ask the library for."""
CLEARLY = 0.98
"""The share of torch's time, and of an earlier algorithm's, that another one must stay below to be taken."""
ROUNDS = 5
TOLERANCE = 0.01
"""Of the norm: how far an algorithm may be from torch's result."""
ALIGNMENT = 256
"""Bytes that tensors must begin at multiples of: the library's algorithms may count on it."""
WORKSPACE, FLUSHED = 32 << 20, 128 << 20
"""Bytes: what an algorithm may use, and what is written in front of each run, more than an L2 cache holds."""
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""`cudaDataType_t`."""
_COMPUTE_32F, _TRANSPOSED = 68, 1
_TRANSA, _MAX_WORKSPACE = 3, 1
"""Attributes of `cublasLtMatmulDesc_t` and `cublasLtMatmulPreference_t`."""


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class LibraryError(Exception):
    """The library refused a call, with a `cublasStatus_t`."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} returned {status}")


@cache
def _library() -> ctypes.CDLL | None:
    """The library that torch has loaded; None where torch has none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError as error:
        logger.info("products are torch's: %s", error)
        return None


def _call(name: str, *arguments: Any) -> None:
    """A function of the library.

    Raises:
        LibraryError: with what it returned.
    """
    if status := getattr(_library(), name)(*arguments):
        raise LibraryError(name, status)


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """The library's handle of a device, which is the current one; kept as long as the process."""
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    """A matrix whose columns lie one behind the other."""
    made, rows_, columns_ = ctypes.c_void_p(), ctypes.c_uint64(rows), ctypes.c_uint64(columns)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(made), _TYPES[dtype], rows_, columns_, ctypes.c_int64(rows))
    return made


@frozen
class Shape:
    """Of a product ``x @ weight.T``.

    Attributes:
        rows: of x; outputs: rows of the weight; elements: columns of both.
        dtype: of x and the weight; result: of what comes out.
        device: its number.
    """

    rows: int
    outputs: int
    elements: int
    dtype: torch.dtype
    result: torch.dtype
    device: int


class Product:
    """One shape's descriptors. The library counts columns first, so what it sees are the transposed matrices.

    Args:
        workspace: `WORKSPACE` bytes on the device, used by each run.

    Attributes:
        offered: the algorithms that the library has for it, as this orders them.

    Raises:
        LibraryError: if it has none.
    """

    def __init__(self, shape: Shape, workspace: torch.Tensor) -> None:
        self._workspace, self._handle = workspace, _handle(shape.device)
        self._operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
        transposed, most = ctypes.c_int32(_TRANSPOSED), ctypes.c_uint64(WORKSPACE)
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._operation), _COMPUTE_32F, _TYPES[torch.float32])
        _call("cublasLtMatmulDescSetAttribute", self._operation, _TRANSA, ctypes.byref(transposed), ctypes.c_size_t(4))
        self._weight = _layout(shape.dtype, shape.elements, shape.outputs)
        self._x = _layout(shape.dtype, shape.elements, shape.rows)
        self._out = _layout(shape.result, shape.outputs, shape.rows)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_size_t(8)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(most), size)
        found, count = (_Heuristic * OFFERED)(), ctypes.c_int()
        asked = (self._handle, self._operation, self._weight, self._x, self._out, self._out, preference)
        _call("cublasLtMatmulAlgoGetHeuristic", *asked, OFFERED, found, ctypes.byref(count))
        _call("cublasLtMatmulPreferenceDestroy", preference)
        self.offered: list[Any] = [one for one in found[: count.value] if one.state == 0]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, algorithm: Any) -> None:
        """``out = x @ weight.T`` by one of `offered`, on the current stream.

        Raises:
            LibraryError: if that cannot be.
        """
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        first, second, third = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out))
        matrices = (first, self._weight, second, self._x, ctypes.byref(zero), third, self._out, third, self._out)
        workspace, stream = self._workspace.data_ptr(), torch.cuda.current_stream().cuda_stream
        _call(
            "cublasLtMatmul",
            self._handle,
            self._operation,
            ctypes.byref(one),
            *matrices,
            ctypes.byref(algorithm.algorithm),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(stream),
        )


def _torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


class LibraryProducts:
    """Products of one model. What is captured shares one workspace, so no two graphs of it may run at a time."""

    def __init__(self) -> None:
        self._workspaces: dict[int, torch.Tensor] = {}
        self._chosen: dict[Shape, tuple[Product, Any] | None] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """``x @ weight.T`` [..., outputs] of `dtype`, x's by default; None where torch's own product is to be taken.

        Outside a capture that is always so, but in front of one algorithms are chosen.
        """
        rows = x.numel() // x.shape[-1]
        if rows not in ROWS or not x.is_cuda:
            return None
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and not may_choose():
            return None
        (n, k), device = weight.shape, x.device.index or 0
        shape = Shape(rows, n, k, x.dtype, dtype or x.dtype, device)
        if not capturing and shape not in self._chosen:
            self._chosen[shape] = self._choose(shape, x.reshape(rows, -1), weight)
        if (chosen := self._chosen.get(shape)) is None or not _suits(x, weight):
            return None
        out = x.new_empty((*x.shape[:-1], shape.outputs), dtype=shape.result)
        product, algorithm = chosen
        product(x.contiguous(), weight, out, algorithm)
        return out

    def _choose(self, shape: Shape, x: torch.Tensor, weight: torch.Tensor) -> tuple[Product, Any] | None:
        """The algorithm to take; None for torch's product."""
        if _library() is None or shape.dtype not in (torch.bfloat16, torch.float16) or not _suits(x, weight):
            return None
        try:
            product = Product(shape, self._workspace(x.device))
            flushed = torch.empty(FLUSHED, dtype=torch.uint8, device=x.device)
            out = x.new_empty((shape.rows, shape.outputs), dtype=shape.result)
        except (LibraryError, torch.OutOfMemoryError) as error:
            logger.info("products of %s are torch's: %s", shape, error)
            return None
        _torch(x, weight, out)
        expected = out.float()
        algorithms: list[Any] = []
        for algorithm in product.offered:
            try:
                product(x, weight, out, algorithm)
            except LibraryError as error:
                logger.info("an algorithm for %s is left out: %s", shape, error)
                continue
            if (out - expected).norm() <= TOLERANCE * expected.norm():
                algorithms.append(algorithm)
        runs = [partial(product, x, weight, out, algorithm) for algorithm in algorithms]
        times, best = _times([partial(_torch, x, weight, out), *runs], flushed), 0
        for number, time in enumerate(times):
            best = number if time < CLEARLY * times[best] else best
        logger.info("%s: %.1f us by torch, %.1f by algorithm %d", shape, 1e3 * times[0], 1e3 * times[best], best)
        return None if best == 0 else (product, algorithms[best - 1])

    def _workspace(self, device: torch.device) -> torch.Tensor:
        index = device.index or 0
        if index not in self._workspaces:
            self._workspaces[index] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        return self._workspaces[index]


def _suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the tensors begin and lie as the library's algorithms expect."""
    aligned = x.data_ptr() % ALIGNMENT == 0 == weight.data_ptr() % ALIGNMENT
    return aligned and x.is_contiguous() and weight.is_contiguous() and x.shape[-1] % 8 == 0 == len(weight) % 8


def _times(runs: Sequence[Callable[[], object]], flushed: torch.Tensor) -> list[float]:
    """Median milliseconds of each, in turn, over a cache that holds nothing of it."""
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs] for _ in range(ROUNDS)]
    for round_ in events:
        for run, (begin, end) in zip(runs, round_, strict=True):
            flushed.zero_()
            begin.record()
            run()
            end.record()
    torch.cuda.current_stream().synchronize()
    each = zip(*[[begin.elapsed_time(end) for begin, end in round_] for round_ in events], strict=True)
    return [sorted(times)[ROUNDS // 2] for times in each]
