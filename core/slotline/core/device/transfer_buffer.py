"""Transfer buffers of a step: views of the host's memory, and staged copies at stable addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.registry.contracts.device import Download, TransferBuffer

__all__ = ["CopyBuffer", "CpuTransferBuffer", "Download", "TransferBuffer", "reserved_bytes"]

ALIGNMENT = 16
"""Bytes; what vector loads of kernels want of an address."""
_MOST_VIEWS = 4096
_STRETCH = 4096
"""Bytes; the one copy of a step is of a multiple of them, so that few lengths occur."""


def reserved_bytes(shape: tuple[int, ...], dtype: type[np.generic]) -> int:
    """Return the bytes that an array takes of a reservation."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


@define
class Arrived:
    """An array that is on the host already. Implements `Download`."""

    array: npt.NDArray[Any]

    def wait(self) -> npt.NDArray[Any]:
        """Return the array."""
        return self.array


class CpuTransferBuffer:
    """Buffer of a device that computes in host memory: nothing is copied. Implements `TransferBuffer`."""

    def reserve(self, num_bytes: int) -> None:
        """Reserve nothing."""

    def begin(self) -> None:
        """Wait for nothing."""

    upload: Callable[[npt.NDArray[Any]], torch.Tensor] = staticmethod(torch.from_numpy)  # a view: one call less

    def flush(self) -> None:
        """Copy nothing."""

    def mark(self) -> None:
        """Return at once: the copies have ended."""

    def download(self, tensor: torch.Tensor) -> Download:
        """Return a view."""
        return Arrived(tensor.numpy())

    def host_memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host [count] for copies."""
        return torch.empty(count, dtype=dtype)

    def landing(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory as for copies."""
        return self.host_memory(count, dtype)

    def arriving(self, landed: torch.Tensor) -> Download:
        """Return a copy, as the memory will be written again."""
        return Arrived(landed.numpy().copy())


class CopyBuffer(CpuTransferBuffer):
    """One buffer of the host, one of the device, and one copy in each step. Implements `TransferBuffer`.

    Args:
        device: torch device string.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}
        self._stretches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._used = 0
        self.reserve(0)

    def reserve(self, num_bytes: int) -> None:
        """Allocate both buffers."""
        self._source = self.host_memory(num_bytes, torch.uint8)
        self._host = self._source.numpy()
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._views.clear()
        self._stretches.clear()

    def begin(self) -> None:
        """Begin at the start of the buffer."""
        self._used = 0

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Write the array behind what is in the buffer."""
        start, end = self._used, self._used + array.nbytes
        self._host[start:end].view(array.dtype).reshape(array.shape)[...] = array
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        key = (start, array.dtype, array.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            dtype = torch.from_numpy(np.zeros(0, array.dtype)).dtype
            view = self._views[key] = self._device[start:end].view(dtype).view(array.shape)
        return view

    def flush(self) -> None:
        """Start one copy."""
        size = min(-(-self._used // _STRETCH) * _STRETCH, len(self._host))
        pair = self._stretches.get(size)
        if pair is None:
            pair = self._stretches[size] = (self._device[:size], self._source[:size])
        pair[0].copy_(pair[1], non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Download:
        """Copy at once."""
        return Arrived(tensor.cpu().clone().numpy())
