"""From the plan's KV connector to the transfers of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotline.core.builder.plugin_construction import build_plugin
from slotline.core.kv_cache.allocation import bind_caches
from slotline.core.kv_cache.block_copy import CacheBlockCopy
from slotline.core.kv_cache.kv_transfer import Transfers
from slotline.planner.plan import Planned
from slotline.registry.contracts import ConnectorGroup, KVConnectorContext, KVSpec
from slotline.registry.loading import bind_contract


def build_transfers(
    planned: Planned, specs: Sequence[KVSpec], pages: Mapping[int, torch.Tensor], num_blocks: int
) -> Transfers | None:
    """The connector with the caches registered; None where none is named.

    Args:
        pages: memory of each layer that owns a cache, by its index.
    """
    descriptor, plan = planned.connector, planned.plan
    if descriptor is None:
        return None
    copy = CacheBlockCopy(
        [[_blocks(pages[layer.index], num_blocks) for layer in group.layers] for group in plan.cache_groups],
        lambda device: planned.hardware.get(str(device), planned.hardware[planned.device]).copy_stream(),
    )
    groups = tuple(
        ConnectorGroup(
            name=group.name,
            layers=group.layers,
            kv_dtype=plan.kv_dtype,
            layout=group.layout,
            block_size=group.block_size,
            kernel_block_size=group.kernel_block_size,
            block_bytes=size,
        )
        for group, size in zip(plan.cache_groups, copy.block_bytes, strict=True)
    )
    context = KVConnectorContext(
        contract=bind_contract(descriptor),
        groups=groups,
        caches=bind_caches(plan, specs, pages, num_blocks),
        num_blocks=num_blocks,
        copy=copy,
        device=planned.stages.stages[0].device,
        model=f"{planned.facts.path}:{plan.dtype}",
        options=planned.options(descriptor),
    )
    connector = build_plugin(planned.registry, descriptor, context, "give it less memory in its table")
    saves_evicted = descriptor.capabilities.saves == "evicted"
    return Transfers(connector, saves_evicted, planned.registry.full_name(descriptor))


def _blocks(pages: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's memory by block, [num_blocks, ratio, bytes]; it comes flat, or with a row for each kernel block."""
    return pages.view(num_blocks, 1, -1) if pages.dim() == 1 else pages.unflatten(0, (num_blocks, -1))
