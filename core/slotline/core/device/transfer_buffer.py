"""Moving a step's arrays between host and device.

On a CPU a tensor is a view of the array and nothing moves. On a GPU all arrays of a step are written one behind the
other into one pinned buffer and travel in one copy. Arrays of equal sizes in equal order get equal addresses, which is
what captured graphs rely on. The host buffer is written again only once its last copy, and those that attention
backends started while planning, are over.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

_ALIGNMENT = 16
"""Bytes; what vector loads of kernels want of an address."""
_MOST_VIEWS = 4096
_STRETCH = 4096
"""Bytes; the one copy of a step is of a multiple of them, so that few lengths occur."""


class Download(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> npt.NDArray[Any]:
        """The array; waits for this copy alone, not for what the device was given to do since."""
        ...


class TransferBuffer(Protocol):
    """How arrays get to the device and back."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for the largest step; `reserved_bytes` says what an array takes."""
        ...

    def begin(self) -> None:
        """Begin a step: wait until the copies of the step before are over, so that host buffers can be written."""
        ...

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor on the device, shape and dtype unchanged; filled by `flush`."""
        ...

    def flush(self) -> None:
        """Start the copy of all that was uploaded since `begin`."""
        ...

    def mark(self) -> None:
        """All copies of this step's inputs have been started; the next `begin` waits for them."""
        ...

    def download(self, tensor: torch.Tensor) -> Download:
        """Start bringing a tensor to the host."""
        ...

    def landing(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host [count] that kernels of the device write to."""
        ...

    def arriving(self, landed: torch.Tensor) -> Download:
        """What the device has been told to write to a part of it."""
        ...


def reserved_bytes(shape: tuple[int, ...], dtype: type[np.generic]) -> int:
    """What an array takes of a reservation."""
    return _aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize)


@define
class _Here:
    """An array that is on the host already."""

    array: npt.NDArray[Any]

    def wait(self) -> npt.NDArray[Any]:
        """It has arrived."""
        return self.array


class CpuTransferBuffer:
    """Host and device are one memory."""

    def reserve(self, num_bytes: int) -> None:
        """Nothing to reserve."""

    def begin(self) -> None:
        """Nothing to wait for."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A view."""
        return torch.from_numpy(array)

    def flush(self) -> None:
        """Nothing to copy."""

    def mark(self) -> None:
        """Nothing to wait for."""

    def download(self, tensor: torch.Tensor) -> Download:
        """A view."""
        return _Here(tensor.numpy())

    def landing(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Any memory."""
        return torch.empty(count, dtype=dtype)

    def arriving(self, landed: torch.Tensor) -> Download:
        """A copy, as the memory will be written again."""
        return _Here(landed.numpy().copy())


@define
class _Copy:
    """What is on its way to pinned memory."""

    host: torch.Tensor
    shape: torch.Size
    done: torch.cuda.Event

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the event behind it; the result is the caller's own."""
        self.done.synchronize()
        return self.host.numpy().reshape(self.shape).copy()


class CudaTransferBuffer:
    """One pinned buffer on the way there; pinned buffers in turn and events on the way back."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        current = self.device.index is None
        self._index = torch.cuda.current_device() if current else self.device.index  # faster looked up than a device
        self._copied = torch.cuda.Event()
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        self._stretches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._results: dict[torch.dtype, list[torch.Tensor]] = {}
        self._used = 0
        self.reserve(0)

    def reserve(self, num_bytes: int) -> None:
        """One device buffer and one pinned host buffer."""
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._host = self._pinned.numpy()
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._views.clear()
        self._stretches.clear()

    def begin(self) -> None:
        """Wait for the marked copies; an event that was never recorded counts as passed."""
        self._copied.synchronize()
        self._used = 0

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Write behind what is there."""
        start, end = self._used, self._used + array.nbytes
        self._host[start:end].view(array.dtype).reshape(array.shape)[...] = array
        self._used = _aligned(end)
        key = (start, array.dtype, array.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
            view = self._views[key] = self._device[start:end].view(dtype).view(array.shape)
        return view

    def flush(self) -> None:
        """One copy."""
        size = min(-(-self._used // _STRETCH) * _STRETCH, len(self._host))
        pair = self._stretches.get(size)
        if pair is None:
            pair = self._stretches[size] = (self._device[:size], self._pinned[:size])
        pair[0].copy_(pair[1], non_blocking=True)

    def mark(self) -> None:
        """Record the event that `begin` waits for."""
        self._copied.record(torch.cuda.current_stream(self._index))

    def download(self, tensor: torch.Tensor) -> Download:
        """Copy to pinned memory, and an event behind it."""
        host = self._result(tensor.dtype, tensor.numel())
        host.copy_(tensor.reshape(-1), non_blocking=True)
        return self._arriving(host, tensor.shape)

    def landing(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory, which the device can address."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def arriving(self, landed: torch.Tensor) -> Download:
        """An event behind what was launched."""
        return self._arriving(landed, landed.shape)

    def _arriving(self, host: torch.Tensor, shape: torch.Size) -> Download:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._index))
        return _Copy(host, shape, done)

    def _result(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Pinned memory for a result; a step and the one prepared behind it have two downloads each at most."""
        buffers = self._results.setdefault(dtype, [torch.empty(0, dtype=dtype)] * 4)
        buffer = buffers.pop(0)
        if buffer.numel() < count:
            buffer = torch.empty(1 << (count - 1).bit_length(), dtype=dtype, pin_memory=True)
        buffers.append(buffer)
        return buffer[:count]


def transfer_buffer_for(device: str) -> TransferBuffer:
    """The staging of a device, by its torch device string."""
    return CudaTransferBuffer(device) if device.startswith("cuda") else CpuTransferBuffer()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
