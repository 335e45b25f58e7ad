"""Staging on a CPU that copies, as on a GPU: what was sent stays where it is, and has one address."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.transfer_buffer import CpuTransferBuffer


class Arena(CpuTransferBuffer):
    """Staging whose arrays lie one behind the other in one buffer."""

    def __init__(self, device: str = "cpu") -> None:
        self._used = 0
        self.reserve(1 << 16)

    def reserve(self, num_bytes: int) -> None:
        """A buffer of so many bytes."""
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def begin(self) -> None:
        """From the front again."""
        self._used = 0

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Behind what is there."""
        start, size = self._used, array.nbytes
        self._used += -(-size // 16) * 16
        view = self._buffer[start : start + size].view(torch.from_numpy(np.zeros(0, array.dtype)).dtype)
        return view.view(array.shape).copy_(torch.from_numpy(np.ascontiguousarray(array)))
