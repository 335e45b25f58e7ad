"""Copies between host and GPU: pinned memory, streams and events."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch
from attrs import define

from slotline.core.device.transfer_buffer import CopyBuffer
from slotline.registry.contracts.device import Download

_DOWNLOADS = 32
"""Results of one dtype that are under way at most."""


@define
class _Copy:
    """A tensor on its way to pinned memory. Implements `Download`."""

    host: torch.Tensor
    shape: torch.Size
    done: torch.cuda.Event

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the event behind the copy; the result is the caller's own."""
        self.done.synchronize()
        return self.host.numpy().reshape(self.shape).copy()


class PinnedBuffer(CopyBuffer):
    """One pinned buffer for uploads; pinned buffers in turn, and events, for downloads."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        current = self.device.index is None
        self._index = torch.cuda.current_device() if current else self.device.index  # faster looked up than a device
        self._copied = torch.cuda.Event()
        self._results: dict[torch.dtype, list[torch.Tensor]] = {}

    def host_memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, which kernels of the device can address too."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def begin(self) -> None:
        """Wait for the marked copies; an event that was never recorded counts as passed."""
        self._copied.synchronize()
        self._used = 0

    def mark(self) -> None:
        """Record the event that `begin` waits for."""
        self._copied.record(torch.cuda.current_stream(self._index))

    def download(self, tensor: torch.Tensor) -> Download:
        """Copy to pinned memory, and record an event behind it."""
        host = self._result(tensor.dtype, tensor.numel())
        host.copy_(tensor.reshape(-1), non_blocking=True)
        return self._recorded(host, tensor.shape)

    def arriving(self, landed: torch.Tensor) -> Download:
        """Record an event behind what was launched."""
        return self._recorded(landed, landed.shape)

    def _recorded(self, host: torch.Tensor, shape: torch.Size) -> Download:
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._index))
        return _Copy(host, shape, done)

    def _result(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return pinned memory for a result. Each of the steps in flight has two downloads at most."""
        buffers = self._results.setdefault(dtype, [torch.empty(0, dtype=dtype)] * _DOWNLOADS)
        buffer = buffers.pop(0)
        if buffer.numel() < count:
            buffer = torch.empty(1 << (count - 1).bit_length(), dtype=dtype, pin_memory=True)
        buffers.append(buffer)
        return buffer[:count]


class CudaCopies:
    """Copies in a stream of their own. Implements `CopyStream`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._side = torch.cuda.Stream(self._device)

    def scope(self) -> AbstractContextManager[Any]:
        """Make the stream the current one."""
        scope: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return scope

    def wait_for_compute(self) -> None:
        """Let the stream wait for the current one."""
        self._side.wait_stream(self._compute())

    def compute_waits(self) -> None:
        """Let the current stream wait for this one."""
        self._compute().wait_stream(self._side)

    def record(self, *, copies: bool) -> Any:
        """Record an event in one of the two."""
        return (self._side if copies else self._compute()).record_event()

    def wait(self, event: Any, *, copies: bool) -> None:
        """Let one of the two wait for an event."""
        (self._side if copies else self._compute()).wait_event(event)

    def _compute(self) -> Any:
        return torch.cuda.current_stream(self._device)
