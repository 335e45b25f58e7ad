"""Cache memory: one buffer on each device if all cache groups share their blocks, else one buffer a layer.

Layout of a shared buffer, outermost first: blocks of the pool, kernel blocks of the group that holds the block, layers
of the group, one kernel block of one layer. The kernel blocks of a layer therefore have a constant stride over the
whole pool, and each kernel block is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm

import torch

from slotline.planner.cache_specs import aligned
from slotline.registry.contracts import AttentionLayer, KVCache, KVSpec
from slotline.registry.contracts.attention import LayerCache
from slotline.registry.negotiation import CacheGroupPlan, Plan
from slotline.registry.negotiation.pages import ALIGNMENT

DeviceOf = Callable[[AttentionLayer], str]
Zeros = Callable[[int, str], torch.Tensor]
"""Returns zeroed memory, [count] uint8, of a device by its torch device string."""


def block_bytes(plan: Plan, specs: Sequence[KVSpec], device_of: DeviceOf) -> dict[str, int]:
    """Return the bytes of one pool block on each device."""
    taken: dict[str, list[int]] = {}  # by device: bytes of each cache group
    for number, (group, spec) in enumerate(zip(plan.cache_groups, specs, strict=True)):
        for layer in group.layers:
            own = taken.setdefault(device_of(layer), [0] * len(specs))
            own[number] += _page(plan, group, spec, layer)
    if not _shared(plan):
        return {device: sum(own) for device, own in taken.items()}
    unit = ALIGNMENT * lcm(*map(_ratio, plan.cache_groups))
    return {device: -(-max(own) // unit) * unit for device, own in taken.items()}


def allocate_pages(
    plan: Plan, specs: Sequence[KVSpec], num_blocks: int, device_of: DeviceOf, zeros: Zeros | None = None
) -> dict[int, torch.Tensor]:
    """Return the zeroed memory of each layer that owns a cache, by layer index, as `KVSpec.bind` takes it."""
    groups, zeros = list(zip(plan.cache_groups, specs, strict=True)), zeros or torch_zeros
    if not _shared(plan):
        return {
            layer.index: zeros(num_blocks * spec.page_bytes(layer), device_of(layer))
            for group, spec in groups
            for layer in group.layers
        }
    sizes = block_bytes(plan, specs, device_of)
    raw = {device: zeros(num_blocks * size, device) for device, size in sizes.items()}
    pages: dict[int, torch.Tensor] = {}
    for group, spec in groups:
        ratio, offsets = _ratio(group), dict.fromkeys(raw, 0)
        for layer in group.layers:
            device, size = device_of(layer), spec.page_bytes(layer) // ratio
            rows, offset = raw[device].view(num_blocks * ratio, -1), offsets[device]  # [kernel blocks, their bytes]
            pages[layer.index] = rows[:, offset : offset + size]
            offsets[device] += aligned(size)
    return pages


def bind_caches(
    plan: Plan, specs: Sequence[KVSpec], pages: Mapping[int, torch.Tensor], num_blocks: int
) -> dict[int, LayerCache]:
    """Return the cache of each layer that owns one, by layer index, in the memory of `allocate_pages`."""
    return {
        layer.index: spec.bind(pages[layer.index], layer, num_blocks)
        for group, spec in zip(plan.cache_groups, specs, strict=True)
        for layer in group.layers
    }


def no_cache(layer: AttentionLayer, dtype: str, device: str) -> KVCache:
    """Return the placeholder cache of a layer without one: no blocks, each of one token."""
    return KVCache(
        *(
            torch.empty((0, 1, layer.num_kv_heads, size), dtype=getattr(torch, dtype), device=device)
            for size in (layer.head_size, layer.head_size_v)
        )
    )


def _page(plan: Plan, group: CacheGroupPlan, spec: KVSpec, layer: AttentionLayer) -> int:
    size, ratio = spec.page_bytes(layer), _ratio(group)
    return ratio * aligned(size // ratio) if _shared(plan) else size


def _shared(plan: Plan) -> bool:
    return plan.pool is not None and plan.pool.shared and len(plan.cache_groups) > 1


def _ratio(group: CacheGroupPlan) -> int:
    return group.block_size // group.kernel_block_size


def torch_zeros(count: int, device: str) -> torch.Tensor:
    """Return zeroed memory [count] uint8 of torch's."""
    return torch.zeros(count, dtype=torch.uint8, device=device)
