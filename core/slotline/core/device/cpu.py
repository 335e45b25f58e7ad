"""The CPU as a device, and its descriptor."""

from __future__ import annotations

import contextlib
import mmap

import psutil
import torch

from slotline.core.device.cpu_ops import CpuOps
from slotline.core.device.torch_device import TorchDevice
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.kernels.cpu_threads import set_threads
from slotline.registry.contracts.device import DeviceContext, TransferBuffer
from slotline.registry.descriptor import DeviceInfo


class CpuDevice(TorchDevice):
    """The host's processor and memory."""

    def __init__(self) -> None:
        super().__init__("cpu", "cpu", CpuOps())

    def info(self) -> DeviceInfo:
        """Return the processor's facts."""
        return DeviceInfo(
            type="cpu",
            name=torch.backends.cpu.get_cpu_capability(),
            features=_features(),
            total_memory=psutil.virtual_memory().total,
            cores=torch.get_num_threads(),
        )

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return pages that the system zeroes when they are first used, so that a large pool costs nothing until then.

        They are huge pages where the system has them, which halves the time of the first use.
        """
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]

    def synchronize(self) -> None:
        """Return at once: a call has ended when it returns."""

    def transfer_buffer(self) -> TransferBuffer:
        """Return a buffer of views."""
        return CpuTransferBuffer()


class CpuFactory:
    """Factory of the one CPU."""

    def count(self) -> int:
        """Return 1."""
        return 1

    def __call__(self, context: DeviceContext) -> CpuDevice:
        """Return the CPU, after giving torch its number of threads."""
        set_threads(context.options)
        return CpuDevice()


factory = CpuFactory()


def _features() -> frozenset[str]:
    """Return instruction sets that change which dtype pays, as far as torch tells them."""
    names = ("avx512_bf16", "amx_tile", "avx512")
    return frozenset(name for name in names if getattr(torch.cpu, f"_is_{name}_supported", lambda: False)())
