"""Devices: the base that a device plugin begins with, torch's operations, and the CPU.

`TorchDevice` and `TorchOps` are imported when they are first asked for, since a descriptor must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotline.core.device.torch_device import TorchDevice
    from slotline.core.device.torch_ops import TorchOps

__all__ = ["TorchDevice", "TorchOps"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for."""
    from importlib import import_module

    modules = {"TorchDevice": "torch_device", "TorchOps": "torch_ops"}
    if name in modules:
        return getattr(import_module(f"{__name__}.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
