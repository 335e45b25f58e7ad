"""Moving a step's arrays between host and device.

On a CPU a tensor is a view of the array and nothing moves. On a GPU each named array has a device buffer at an address
that never changes (captured graphs read it) and two pinned host buffers used in turn: a host buffer is written again
only once the event of its last copy has passed.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define


class Staging(Protocol):
    """How arrays get to the device and back."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """Reserve a buffer of the largest shape that `upload` will see under this name."""
        ...

    def upload(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array as a tensor on the device, shape and dtype unchanged."""
        ...

    def download(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """The tensor as a host array; waits for this copy alone, not for the whole device."""
        ...


class CpuStaging:
    """Host and device are one memory."""

    def declare(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """Nothing to reserve."""

    def upload(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """A view."""
        return torch.from_numpy(array)

    def download(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """A view."""
        return tensor.numpy()


@define(eq=False)
class _Buffer:
    device: torch.Tensor
    hosts: tuple[torch.Tensor, torch.Tensor]
    copied: tuple[torch.cuda.Event, torch.cuda.Event]
    turn: int = 0


class CudaStaging:
    """Pinned double buffers on the way there, a pinned buffer and an event on the way back."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._buffers: dict[str, _Buffer] = {}
        self._results: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def declare(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
        """Reserve one device buffer and two pinned host buffers."""
        host = torch.from_numpy(np.zeros(shape, dtype))
        pinned = (host.pin_memory(), host.clone().pin_memory())
        self._buffers[name] = _Buffer(host.to(self.device), pinned, (torch.cuda.Event(), torch.cuda.Event()))

    def upload(self, name: str, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy through the pinned buffer whose last copy is over."""
        buffer = self._buffers[name]
        buffer.turn ^= 1
        copied, index = buffer.copied[buffer.turn], tuple(slice(0, n) for n in array.shape)
        copied.synchronize()
        host, device = buffer.hosts[buffer.turn][index], buffer.device[index]
        host.numpy()[...] = array
        device.copy_(host, non_blocking=True)
        copied.record()
        return device

    def download(self, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Copy to pinned memory and wait for an event instead of the stream."""
        key = (tensor.dtype, tensor.numel())
        host = self._results.get(key)
        if host is None:
            host = self._results[key] = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.reshape(-1), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return host.numpy().reshape(tensor.shape).copy()


def staging_for(device: str) -> Staging:
    """The staging of a device, by its torch device string."""
    return CudaStaging(device) if device.startswith("cuda") else CpuStaging()
