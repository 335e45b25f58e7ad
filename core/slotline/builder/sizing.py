"""Pool sizing: computes how many blocks fit into the memory that weights and activations leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import psutil
from attrs import evolve

from slotline.core.device.torch_device import host_peak
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import Device, PeakMemory
from slotline.registry.engine_reports import DeviceMemory, MemoryReport
from slotline.registry.errors import CapacityError

_CPU_DEFAULT_LIMIT = 4 * 2**30  # a laptop's memory is shared with other programs, unless its owner says otherwise


def size_pool(
    asked: float | str,
    *,
    explicit: bool,
    devices: Sequence[DeviceMemory],
    useful_blocks: int,
    profile: Callable[[], float],
    state_bytes: int = 0,
    checkpoints: int = 0,
    hardware: Mapping[str, Device] | None = None,
    agree: Callable[[int], int] = int,
) -> MemoryReport:
    """Size the pool that `cache.memory` allows. The device with the least room for its part of a block decides.

    Args:
        asked: a share of each device's memory, or a size for the cache over all of them.
        explicit: True if the user set it.
        devices: each device once, with its memory and its part of a block.
        useful_blocks: the most blocks that running requests can use at a time.
        profile: runs a large step and returns the factor from its size to the largest step's.
        state_bytes: bytes already given to state layers, which count as cache.
        checkpoints: number of state slots for checkpoints, for the report.
        hardware: the devices with memory of their own, by torch device string. None if they compute in the host's.
        agree: gives the number of blocks that all ranks have, of this one's.

    Raises:
        CapacityError: if not even one block fits.
    """
    own = hardware or {}
    peaks = _measure([own[device.device] for device in devices] if own else [], profile)
    devices = [evolve(d, activations=peak) for d, peak in zip(devices, peaks, strict=True)]
    if isinstance(asked, str):
        rooms = [(size_in_bytes(asked), sum(device.block for device in devices), "")]
    else:
        rooms = [
            (room_for(d, asked, explicit=explicit, device=own.get(d.device)), d.block, f" on {d.device}")
            for d in devices
        ]
    # A device's states are already allocated. The host's memory is taken at first use.
    taken = state_bytes if isinstance(asked, str) or not own else 0
    cache, block, where = min(rooms, key=lambda room: room[0] // max(room[1], 1))
    cache -= taken
    num_blocks = agree(min(cache // max(block, 1), useful_blocks) + 1)  # plus the null block
    if num_blocks < 2:
        where = where if len(devices) > 1 else ""
        raise CapacityError(
            f"cache.memory = {asked!r} leaves {max(cache, 0)} bytes for the cache{where} and one block takes {block}",
            fix="raise cache.memory, lower scheduler.max_batched_tokens, or take a smaller model or dtype",
        )
    report = tuple(evolve(device, cache=num_blocks * device.block) for device in devices)
    return MemoryReport(devices=report, num_blocks=num_blocks, states=state_bytes, checkpoints=checkpoints)


def room_for(memory: DeviceMemory, share: float, *, explicit: bool, device: Device | None) -> int:
    """Return bytes for the cache on one device, which is None for one in the host's memory."""
    if device is not None:
        return int(share * memory.total) - (memory.total - device.memory().free) - memory.activations
    room = int(share * psutil.virtual_memory().available) - memory.activations
    return room if explicit else min(room, _CPU_DEFAULT_LIMIT)


def _measure(devices: Sequence[Device], profile: Callable[[], float]) -> list[int]:
    """Return the peak memory of the profiled step on each device beyond what was in use before, in bytes."""
    if not devices:
        profile()  # excludes the memory of compiling and tuning
    with ExitStack() as stack:
        peaks: list[PeakMemory] = [stack.enter_context(device.measure_peak()) for device in devices]
        peaks = peaks or [stack.enter_context(host_peak())]
        factor = profile()
    return [int(found.peak * factor) for found in peaks]
