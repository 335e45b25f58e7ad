"""Devices: the base that a device plugin begins with, torch's operations, and the CPU."""

from slotline.core.device.torch_device import TorchDevice
from slotline.core.device.torch_ops import TorchOps

__all__ = ["TorchDevice", "TorchOps"]
