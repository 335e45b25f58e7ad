"""Check of whether a plugin runs on this machine, by its declared devices and its probe."""

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
    """Return the devices that the installed device plugins find: names and facts, the CPU first."""
    from slotline.registry.devices import Devices
    from slotline.registry.discovery import PluginRegistry

    devices = Devices(PluginRegistry.discover(tolerant=True))
    return tuple((name, devices.info(devices.named(name))) for name in reversed(devices.there()))


def _unfit(capabilities: Any, device: DeviceInfo) -> str:
    """Return the reason why its declaration keeps a plugin from a device, or ""."""
    devices = getattr(capabilities, "devices", None)
    if devices is not None and devices.refusal(device.need) is not None:
        here = ", ".join(sorted({info.type for _, info in machine()}))
        return f"needs {' or '.join(sorted(devices.values))}, this machine has {here}"
    lowest = getattr(capabilities, "min_compute_capability", None)
    if lowest is not None and device.compute_capability is not None and device.compute_capability < lowest:
        shown = ".".join(map(str, device.compute_capability))
        return f"needs compute capability {'.'.join(map(str, lowest))}, {device.name} has {shown}"
    return ""
