"""Extension of a plan with context shards: it builds their attention backends and caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve

from slotline.builder.cache_memory import allocate_pages, bind_caches
from slotline.builder.parts import Parts
from slotline.plugins.context_shards.attention import ContextShards, Shard, ShardedCache
from slotline.plugins.context_shards.ranks import RankShards, StepMemory, wide
from slotline.registry.contracts import AttentionBackend, AttentionContext, ExtensionContext, KVCache, KVSpec
from slotline.registry.descriptor import Descriptor
from slotline.registry.negotiation import CacheGroupPlan, GroupPlan


class ContextShardsExtension:
    """Builder of attention over shards, which the engine's builder asks in place of the plan's backends."""

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        self._planned = parts.planned
        self._devices, self._count = parts.planned.shards.devices, parts.planned.shards.count
        self._group = parts.context_group

    def attention_backend(
        self,
        group: GroupPlan,
        descriptor: Descriptor[Any],
        context: AttentionContext,
        build: Callable[[Descriptor[Any], AttentionContext], AttentionBackend],
        spec_of: Callable[[CacheGroupPlan, int], KVSpec],
    ) -> AttentionBackend:
        """Build a backend for each shard, and another for a step's own keys with a cache for them.

        The backends of the shards take each token as a request.

        Args:
            group: with a cache.
            descriptor: of the plan's backend.
            context: of the whole group.
            build: builds a backend on its device.
            spec_of: returns the cache spec of a group for a block size.
        """
        planned, size = self._planned, group.kernel_block_size
        scheduler = planned.loaded.config.scheduler
        most = max(scheduler.max_batched_tokens, scheduler.max_requests)
        each = evolve(context, block_size=group.block_size // self._count, max_requests=most, max_query_len=1)
        num_blocks = -(-scheduler.max_batched_tokens // size) + scheduler.max_requests + 1
        spec, layer = spec_of(planned.plan.cache_group(group.cache_group), size), context.layers[0]
        memory = planned.hardware[context.device].zeros(num_blocks * spec.page_bytes(layer))
        scratch = spec.bind(memory, layer, num_blocks)
        assert isinstance(scratch, KVCache)  # the planner refuses other formats
        rest = (
            build(descriptor, evolve(context, block_size=size)),
            scratch,
            context.device,
            size,
            descriptor.capabilities.lse_base,
            descriptor.capabilities.writes_cache,
        )
        if self._group is not None:
            layers = tuple(wide(layer, self._count) for layer in context.layers)
            columns = -(-context.max_model_len // group.block_size) * (group.block_size // self._count // size)
            steps = StepMemory.of(scheduler.max_requests, columns, context.device)
            return RankShards(self._group, build(descriptor, evolve(each, layers=layers)), *rest, steps)
        shards = [Shard(build(descriptor, evolve(each, device=device)), device) for device in self._devices]
        return ContextShards(shards, *rest)

    def caches(self, num_blocks: int, spec_of: Callable[[CacheGroupPlan, int], KVSpec]) -> Mapping[int, Any]:
        """Allocate each shard's part of the cache of each layer that owns one, by the layer's index.

        They are `ShardedCache`. Ranks have one shard each, which is a cache like any other.

        Args:
            num_blocks: of the pool.
            spec_of: as in `attention_backend`.
        """
        plan = self._planned.plan
        (group,) = plan.cache_groups
        specs = [spec_of(group, group.block_size // self._count)]
        parts: list[dict[int, KVCache]] = []
        for device in self._devices:
            pages = allocate_pages(plan, specs, num_blocks, lambda _layer, device=device: device, self._zeros)  # type: ignore[misc]
            bound = bind_caches(plan, specs, pages, num_blocks)
            parts.append({index: cache for index, cache in bound.items() if isinstance(cache, KVCache)})
        return {index: ShardedCache(*cache, tuple(part[index] for part in parts)) for index, cache in parts[0].items()}

    def _zeros(self, count: int, device: str) -> Any:
        return self._planned.hardware[device].zeros(count)
