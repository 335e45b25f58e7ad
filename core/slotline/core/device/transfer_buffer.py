"""Transfer buffers of a step, and what an array takes of one."""

from __future__ import annotations

import numpy as np

from slotline.core.device.copy_buffer import ALIGNMENT, CopyBuffer
from slotline.core.device.copy_buffer import HostBuffer as CpuTransferBuffer
from slotline.registry.contracts.device import Download, TransferBuffer

__all__ = ["CopyBuffer", "CpuTransferBuffer", "Download", "TransferBuffer", "reserved_bytes"]


def reserved_bytes(shape: tuple[int, ...], dtype: type[np.generic]) -> int:
    """Return the bytes that an array takes of a reservation."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
