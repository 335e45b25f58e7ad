"""Whether a plugin can run on this machine: what it declares of devices, and what its probe says."""

from __future__ import annotations

from functools import cache
from typing import Any

from slotline.registry.descriptor import Descriptor, DeviceInfo
from slotline.registry.probing import probe


def verdict(descriptor: Descriptor[Any]) -> tuple[list[str], str]:
    """Return the devices of this machine that a plugin runs on, and why it runs on none, or "".

    The probe's reason on a device of a declared type is told before that of another type.
    """
    running, declined, unfit = [], [], []
    for name, device in machine():
        if reason := _unfit(descriptor.capabilities, device):
            unfit.append(reason)
        elif isinstance(offer := probe(descriptor, device), str):
            declined.append(offer)
        elif reason := _unfit(offer, device):
            unfit.append(reason)
        else:
            running.append(name)
    return running, "" if running else (declined or unfit)[0]


@cache
def machine() -> tuple[tuple[str, DeviceInfo], ...]:
    """Return the devices that torch sees: names and facts."""
    import torch

    from slotline.planner.device import describe_device

    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple((name, describe_device(name)) for name in ("cpu", *(f"cuda:{index}" for index in cards)))


def _unfit(capabilities: Any, device: DeviceInfo) -> str:
    """Return why what is declared keeps a plugin from a device, or ""."""
    devices = getattr(capabilities, "devices", None)
    values = None if devices is None else devices.values
    if values is not None and device.type not in values:
        here = ", ".join(sorted({info.type for _, info in machine()}))
        return f"needs {' or '.join(sorted(values))}, this machine has {here}"
    lowest = getattr(capabilities, "min_compute_capability", None)
    if lowest is not None and device.compute_capability is not None and device.compute_capability < lowest:
        shown = ".".join(map(str, device.compute_capability))
        return f"needs compute capability {'.'.join(map(str, lowest))}, {device.name} has {shown}"
    return ""
