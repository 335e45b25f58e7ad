"""Devices for tests of parts, by torch device string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from slotline.core.kv_cache.block_table import DeviceTables
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.registry import PluginRegistry
from slotline.registry.contracts import Device, TransferBuffer
from slotline.registry.devices import Devices


@cache
def device_for(name: str) -> Device:
    """Return the device that a configuration would name so."""
    return Devices(PluginRegistry.discover()).named(name)


def transfer_buffer_for(name: str) -> TransferBuffer:
    """Return a new buffer for the copies of steps."""
    return device_for(name).transfer_buffer()


def tables_on_a_device(
    groups: Sequence[CacheGroup], sizes: Sequence[int], staging: TransferBuffer, device: Device, *, on_host: bool
) -> DeviceTables:
    """Return the tables of a device with memory of its own, whatever the device."""
    return DeviceTables(groups, sizes, staging, device.torch_device, device)
