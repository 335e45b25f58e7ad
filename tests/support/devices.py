"""Devices for tests of parts, by torch device string."""

from __future__ import annotations

from slotline.registry import PluginRegistry
from slotline.registry.contracts import Device, TransferBuffer
from slotline.registry.devices import Devices


def device_for(name: str) -> Device:
    """Return the device that a configuration would name so."""
    return Devices(PluginRegistry.discover()).named(name)


def transfer_buffer_for(name: str) -> TransferBuffer:
    """Return a new buffer for the copies of steps."""
    return device_for(name).transfer_buffer()
