"""A device that torch serves, with nothing of its own: the base class of other devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from slotline.core.device.torch_ops import TorchOps
from slotline.core.device.transfer_buffer import CopyBuffer
from slotline.registry.contracts.device import (
    CopyStream,
    Device,
    DeviceMemory,
    DeviceOps,
    GraphCapture,
    KernelCompiler,
    PeakMemory,
    TimePoint,
    TransferBuffer,
)
from slotline.registry.descriptor import DeviceInfo


class TorchDevice:
    """Device whose work torch does, in order and without waiting on anything else. Implements `Device`.

    Args:
        name: as the configuration would write it, with its number if it has one.
        torch_device: torch device string of its tensors.
        ops: operations; torch's by default.
    """

    def __init__(self, name: str, torch_device: str, ops: DeviceOps | None = None) -> None:
        self.name, self.torch_device = name, torch_device
        self.ops: DeviceOps = ops or TorchOps()
        self._module: Any = torch.get_device_module(torch_device)

    def info(self) -> DeviceInfo:
        """Return the name of the device's kind and its memory."""
        kind = self.name.partition(":")[0]
        return DeviceInfo(type=kind, name=kind, total_memory=self.memory().total)

    def memory(self) -> DeviceMemory:
        """Return what torch tells of the device, or the host's memory for tensors that live there."""
        if hasattr(self._module, "mem_get_info"):
            return DeviceMemory(*self._module.mem_get_info(self.torch_device))
        host = psutil.virtual_memory()
        return DeviceMemory(host.available, host.total)

    def measure_peak(self) -> AbstractContextManager[PeakMemory]:
        """Measure what torch allocates, or what the process holds for tensors that live in host memory."""
        return host_peak() if not hasattr(self._module, "max_memory_allocated") else self._allocated_peak()

    @contextmanager
    def _allocated_peak(self) -> Iterator[Peak]:
        found = Peak()
        self.synchronize()
        self.release_cached()
        self._module.reset_peak_memory_stats(self.torch_device)
        before = self._module.memory_allocated(self.torch_device)
        yield found
        self.synchronize()
        found.peak = self._module.max_memory_allocated(self.torch_device) - before
        self.release_cached()

    def release_cached(self) -> None:
        """Empty torch's cache of freed memory."""
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()

    def synchronize(self) -> None:
        """Wait as torch does."""
        self._module.synchronize(self.torch_device)

    def scope(self) -> AbstractContextManager[Any]:
        """Change nothing: torch finds the device by its tensors."""
        return nullcontext()

    def is_capturing(self) -> bool:
        """Return False: there are no captures."""
        return False

    def copy_stream(self) -> CopyStream:
        """Return a queue that copies in order with everything else."""
        return OrderedCopies()

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeros of torch's."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def host_empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty(count, dtype=dtype)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy as torch does."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.torch_device)

    def transfer_buffer(self) -> TransferBuffer:
        """Return a buffer whose copies have ended when they return."""
        return CopyBuffer(self.torch_device)

    def graph_capture(self) -> GraphCapture:
        """Refuse: a device with graphs brings its own captures."""
        raise NotImplementedError(f"device {self.name!r} declares no graphs")

    def compiler(self) -> KernelCompiler | None:
        """Return None: no launch waits for a compiler."""
        return None

    def time_point(self) -> TimePoint:
        """Return the time of the call."""
        return HostTime()


def compiler_of(device: Device) -> KernelCompiler | None:
    """Return a device's compiler of kernels, None if it has none."""
    return device.compiler() if hasattr(device, "compiler") else None


def clock_of(device: Device) -> Callable[[], TimePoint]:
    """Return the function that tells a device's time, that of the host if it has none."""
    return getattr(device, "time_point", HostTime)


class HostTime:
    """Time of the host when it was made. Implements `TimePoint`."""

    passed = True

    def __init__(self) -> None:
        self._at = perf_counter()

    def until(self, later: HostTime) -> float:
        """Return the seconds between two calls."""
        return later._at - self._at


class Peak:
    """Peak memory of some work, in bytes."""

    peak = 0


@contextmanager
def host_peak() -> Iterator[Peak]:
    """Measure how far the process exceeds the most memory that it ever held."""
    import resource

    def highest() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    found, before = Peak(), highest()
    yield found
    found.peak = highest() - before


class OrderedCopies:
    """Copies in order with all other work. Implements `CopyStream`."""

    def scope(self) -> AbstractContextManager[Any]:
        """Change nothing."""
        return nullcontext()

    def wait_for_compute(self) -> None:
        """Return at once: what came before has ended or comes first."""

    def compute_waits(self) -> None:
        """Return at once."""

    def record(self, *, copies: bool) -> Any:
        """Return no event."""
        return None

    def wait(self, event: Any, *, copies: bool) -> None:
        """Return at once."""
