"""NVIDIA GPUs as devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.backends.cuda.capture import CudaCapture
from slotline.backends.cuda.compiler import TritonCompiler
from slotline.backends.cuda.copies import CudaCopies, PinnedBuffer
from slotline.backends.cuda.ops import ops_for
from slotline.core.device import TorchDevice
from slotline.registry.contracts.device import CopyStream, DeviceContext, DeviceMemory, GraphCapture, TransferBuffer
from slotline.registry.descriptor import DeviceInfo


class CudaDevice(TorchDevice):
    """One GPU: `cuda`, which is torch's current one, or `cuda:N`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, name, ops_for(name))
        self._compiler = TritonCompiler(name)
        self._index = int(name.partition(":")[2]) if ":" in name else None

    def info(self) -> DeviceInfo:
        """Return the GPU's facts."""
        properties = torch.cuda.get_device_properties(self.torch_device)
        return DeviceInfo(
            type="cuda",
            name=properties.name,
            compute_capability=(properties.major, properties.minor),
            total_memory=properties.total_memory,
            cores=properties.multi_processor_count,
        )

    def memory(self) -> DeviceMemory:
        """Return what the driver tells."""
        return DeviceMemory(*torch.cuda.mem_get_info(self.torch_device))

    def scope(self) -> AbstractContextManager[Any]:
        """Make it the current GPU for kernels that torch does not launch, for streams and for captures."""
        return nullcontext() if self._index is None else torch.cuda.device(self._index)

    def is_capturing(self) -> bool:
        """Ask the current stream."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def copy_stream(self) -> CopyStream:
        """Return a CUDA stream."""
        return CudaCopies(self.torch_device)

    def host_empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, which torch gives to no one else before a copy has read it."""
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy by pinned memory: from ordinary memory the host would wait for the forward pass in front of it."""
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def transfer_buffer(self) -> TransferBuffer:
        """Return a pinned buffer."""
        return PinnedBuffer(self.torch_device)

    def graph_capture(self) -> GraphCapture:
        """Return a session that captures CUDA graphs."""
        return CudaCapture()

    def compiler(self) -> TritonCompiler:
        """Return Triton's."""
        return self._compiler

    def time_point(self) -> CudaTime:
        """Record an event in the current stream."""
        return CudaTime()


class CudaTime:
    """End of all work that was launched to the current stream before. Implements `TimePoint`."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def passed(self) -> bool:
        """Return True if the work is over."""
        return bool(self._event.query())

    def until(self, later: CudaTime) -> float:
        """Return the seconds between two ends."""
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1e3


class CudaFactory:
    """Factory of the GPUs that torch sees."""

    def count(self) -> int:
        """Return how many torch sees."""
        return torch.cuda.device_count()

    def __call__(self, context: DeviceContext) -> CudaDevice:
        """Return a GPU."""
        return CudaDevice("cuda" if context.index is None else f"cuda:{context.index}")


factory = CudaFactory()
