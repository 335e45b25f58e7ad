"""The acme device: slotline's base class, the host's memory, and graphs of its own."""

from __future__ import annotations

import torch

from acme_device.graphs import RecordedOperations, is_recording
from slotline.core.device import TorchDevice, TorchOps
from slotline.registry.contracts import DeviceContext


class AcmeOps(TorchOps):
    """Torch's operations, of which acme replaces one."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first of the largest entries, from the largest value. NaN counts as infinity."""
        return logits.max(dim=-1).indices


class AcmeDevice(TorchDevice):
    """One of two devices in the host's memory."""

    def __init__(self, index: int) -> None:
        super().__init__(f"acme:{index}", "cpu", AcmeOps())

    def is_capturing(self) -> bool:
        """Return whether operations are being recorded."""
        return is_recording()

    def graph_capture(self) -> RecordedOperations:
        """Return a session that records operations."""
        return RecordedOperations()


class AcmeFactory:
    """Factory of both."""

    def count(self) -> int:
        """Return 2."""
        return 2

    def __call__(self, context: DeviceContext) -> AcmeDevice:
        """Return the device with the asked number, or the first."""
        return AcmeDevice(context.index or 0)


factory = AcmeFactory()
