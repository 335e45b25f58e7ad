"""Shares of the pipeline stages in a step and in memory: batches, arrays, part of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slotline.builder.cache_memory import block_bytes
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.kv_cache.block_table import tables_for
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.device_inputs import DeviceInputs
from slotline.planner.context_parallel import ContextDevices
from slotline.planner.pipeline_parallel import Stages
from slotline.registry.contracts import Device, KVSpec
from slotline.registry.engine_reports import DeviceMemory
from slotline.registry.negotiation import Plan


def batches_of(plan: Plan, stages: Stages) -> list[tuple[int, int]]:
    """Return the (stage, cache group) of each batch of a step, in the order of `ModelInputs.batches`.

    The first stage has all cache groups. A later stage has the cache groups that its layers read. The batch of layers
    without a cache comes last.
    """
    first = [(0, index) for index in range(len(plan.cache_groups))]
    names = [group.name for group in plan.cache_groups]
    read = {
        (stage, names.index(group.cache_group))
        for group in plan.groups
        if group.cache_group
        for stage, _ in stages.split(group.layers)
    }
    return first + sorted(pair for pair in read if pair[0] > 0)


def later_feeds(
    plan: Plan,
    stages: Stages,
    groups: Sequence[CacheGroup],
    stagings: Sequence[TransferBuffer],
    hardware: Mapping[str, Device],
    *,
    on_host: bool,
) -> list[DeviceInputs]:
    """Build the inputs of each stage but the first, with the transfer buffers `stagings` of these stages."""
    batches, feeds = batches_of(plan, stages), []
    for stage, staging in enumerate(stagings, start=1):
        read = tuple(group for of_stage, group in batches if of_stage == stage)
        sizes = [plan.cache_groups[index].kernel_block_size for index in read]
        tables = tables_for(
            [groups[index] for index in read], sizes, staging, hardware[stages.stages[stage].device], on_host=on_host
        )
        feeds.append(DeviceInputs(staging, tables, read))
    return feeds


def device_memory(
    plan: Plan, stages: Stages, specs: Sequence[KVSpec], shards: ContextDevices, hardware: Mapping[str, Device]
) -> list[DeviceMemory]:
    """Each device with its part of a block of the pool, before anything is measured.

    Args:
        shards: they have a block's keys in equal parts. If it is not divided, the devices of the stages have them.
    """
    block = {**dict.fromkeys(stages.devices, 0), **block_bytes(plan, specs, stages.device_of)}
    if shards.divided:
        whole, devices = sum(block.values()), shards.devices
        block = {device: whole * devices.count(device) // shards.count for device in dict.fromkeys(devices)}
    return [
        DeviceMemory(device=device, total=hardware[device].info().total_memory, block=size)
        for device, size in block.items()
    ]
