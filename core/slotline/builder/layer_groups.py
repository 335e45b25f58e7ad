"""The parts of an engine that serve layers: cache specs and groups, attention and state backends, and their memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from attrs import define, evolve

from slotline.builder.cache_memory import allocate_pages, bind_caches, no_cache
from slotline.builder.freed_tokens import table_maker
from slotline.builder.placement import batches_of
from slotline.builder.plugin_construction import build_plugin
from slotline.builder.served_attention import CheckedDispatcher
from slotline.core.batch.request_table import RequestTable
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, AttentionGroup
from slotline.planner.cache_specs import SpecBuilder, of_encoder
from slotline.planner.component_selection import plans_once
from slotline.planner.plan import Planned
from slotline.planner.spec_answers import wrong_cache
from slotline.planner.workspaces import workspace_bytes
from slotline.registry.capability import GraphSupport
from slotline.registry.contracts import (
    PLAIN,
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    KVSpec,
)
from slotline.registry.contracts.prefix_groups import PrefixFinder
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.negotiation import CacheGroupPlan, GroupPlan
from slotline.registry.output_checks import OutputChecks

logger = logging.getLogger("slotline")


@define
class LayerGroupBuilder:
    """Builds the parts that serve the groups of a plan. Each method makes one part.

    Attributes:
        planned: the plan with its descriptors and facts.
        shards: extension that divides the keys of requests over devices. None if each is on one.
    """

    planned: Planned
    shards: Any = None

    def specs(self) -> list[KVSpec]:
        """Return the cache spec of each cache group."""
        return [self._spec(group, group.block_size) for group in self.planned.plan.cache_groups]

    def held(self, specs: list[KVSpec]) -> list[KVSpec]:
        """Return the specs of what this rank holds of each block: a part of its tokens, if ranks share keys."""
        if not self.planned.shards.ranks:
            return specs
        count = self.planned.shards.count
        return [self._spec(group, group.block_size // count) for group in self.planned.plan.cache_groups]

    def _spec(self, group: CacheGroupPlan, block_size: int) -> KVSpec:
        planned = self.planned
        builder = SpecBuilder(
            planned.loaded,
            planned.registry,
            planned.offers,
            planned.plan.kv_dtype,
            planned.max_model_len,
            planned.facts.max_encoder_len,
        )
        # Blocks are freed when a step's results are processed. Another step may have been prepared by then.
        ahead = planned.loaded.config.scheduler.max_batched_tokens * (2 if planned.asynchronous else 1)
        return builder.build(group, block_size=block_size, max_tokens_in_flight=ahead)

    def cache_groups(self, specs: list[KVSpec], rows: RequestTable) -> list[CacheGroup]:
        """Build the block tables of each cache group."""
        make = table_maker(self.planned, rows)
        return [
            make(
                index,
                spec,
                group.block_size,
                group.kernel_block_size,
                rows.max_requests,
                *(
                    (self.planned.facts.max_encoder_len, rows.fixed_len)
                    if of_encoder(group.layers)
                    else (rows.max_model_len, None)
                ),
            )
            for index, (group, spec) in enumerate(zip(self.planned.plan.cache_groups, specs, strict=True))
        ]

    def prefix_finder(self, attention: list[AttentionGroup], extension: Any) -> PrefixFinder | None:
        """Build the finder of prefixes that requests share by an extension. Return None if there is no extension."""
        groups = range(len(self.planned.plan.cache_groups))
        if extension is None:
            return None
        read = batches_of(self.planned.plan, self.planned.stages)
        backends = [[g for g in attention if g.cascade and read[g.batch][1] == index] for index in groups]
        found: PrefixFinder = extension.prefix_finder(backends)
        return found

    def attention_groups(self, scales: Any) -> list[AttentionGroup]:
        """Build a backend for each attention group of the plan, one for each stage that has layers of the group."""
        return [
            self._attention_group(group, stage, layers, scales)
            for group in self.planned.plan.groups
            for stage, layers in self.planned.stages.split(group.layers)
        ]

    def _attention_group(
        self, group: GroupPlan, stage: int, layers: tuple[AttentionLayer, ...], scales: Any
    ) -> AttentionGroup:
        plan, scheduler = self.planned.plan, self.planned.loaded.config.scheduler
        names = [cache_group.name for cache_group in plan.cache_groups]
        batches = batches_of(plan, self.planned.stages)
        descriptor = self.planned.offers[Kind.ATTENTION, group.backend]
        context = AttentionContext(
            contract=group.contract,
            layers=layers,
            device=self.planned.stages.stages[stage].device,
            dtype=group.dtype,
            kv_dtype=group.kv_dtype,
            block_size=group.block_size,
            kernel_block_size=group.kernel_block_size,
            layout=group.layout,
            max_query_len=group.max_query_len,
            max_requests=scheduler.max_requests,
            max_tokens=scheduler.max_batched_tokens,
            max_model_len=self.planned.facts.max_encoder_len if of_encoder(layers) else self.planned.max_model_len,
            kv_scales={layer.index: scales.by_layer[layer.index] for layer in layers} if scales else {},
            batch_invariant=self.planned.loaded.config.batch_invariant,
            cache_format=group.cache_format,
            options=self.planned.options(descriptor),
        )
        if size := workspace_bytes(descriptor, context):
            # Written, so that the host's memory is taken too before the pool is sized.
            context = evolve(context, workspace=self._zeros(size, context.device).fill_(0))
        sharded = self.shards is not None and bool(group.cache_group)
        if self.shards is not None and group.cache_group:
            backend = self.shards.attention_backend(group, descriptor, context, self._built, self._spec)
        else:
            backend = self._built(descriptor, context)
        return AttentionGroup(
            name=group.name,
            backend=backend,
            writes_cache=descriptor.capabilities.writes_cache,
            batch=batches.index((stage, names.index(group.cache_group))) if group.cache_group else len(batches),
            layers=layers,
            device=context.device,
            cascade=group.cascade != "none",
            cascade_captured=group.cascade == "captured",
            cascade_prefixes=descriptor.capabilities.cascade_prefixes,
            plain_writes=descriptor.capabilities.plain_writes and group.cache_format == PLAIN and not sharded,
            fast_prefill=group.fast_prefill,
            last_queries=group.last_queries,
            any_captured=not sharded and _captured_always(descriptor.capabilities),
            edges=() if sharded else group.edges,
            plan_once=not sharded and plans_once(self.planned.loaded, self.planned.offers, group),
            plugin=self.planned.registry.full_name(descriptor),
        )

    def _built(self, descriptor: Descriptor[Any], context: AttentionContext) -> AttentionBackend:
        """Build a descriptor's backend while its device is the current one."""
        with self.planned.hardware[context.device].scope():
            fix = "lower scheduler.max_batched_tokens or scheduler.max_requests"
            backend: AttentionBackend = build_plugin(self.planned.registry, descriptor, context, fix)
        return backend

    def _zeros(self, count: int, device: str) -> torch.Tensor:
        return self.planned.hardware[device].zeros(count)

    def pages(self, specs: list[KVSpec], num_blocks: int) -> dict[int, torch.Tensor]:
        """Allocate the memory of each layer that owns a cache."""
        plan, device_of = self.planned.own_plan, self.planned.stages.device_of
        return allocate_pages(plan, self.held(specs), num_blocks, device_of, self._zeros)

    def router(
        self,
        attention: list[AttentionGroup],
        specs: list[KVSpec],
        num_blocks: int,
        pages: Mapping[int, torch.Tensor] | None = None,
        checks: OutputChecks | None = None,
    ) -> AttentionDispatcher:
        """Bind each layer to its own cache. Layers that share a cache are bound to the same memory.

        Args:
            pages: the caches' memory. New memory is allocated if it is not given.
            checks: of the outputs of backends in eager steps.
        """
        if self.shards is not None and not self.planned.shards.ranks:
            caches = self._complete(self.shards.caches(num_blocks, self._spec))
        else:
            pages = self.pages(specs, num_blocks) if pages is None else pages
            caches = self._complete(self._bound(specs, pages, num_blocks))
        device = self.planned.hardware[self.planned.device]
        may_capture = device.is_capturing if self.planned.device_capabilities.graphs.support else None
        if checks is None:
            return AttentionDispatcher(attention, caches, may_capture)
        return CheckedDispatcher(attention, caches, checks, may_capture)

    def _bound(self, specs: list[KVSpec], pages: Mapping[int, torch.Tensor], num_blocks: int) -> dict[int, Any]:
        """Return the caches that the specs make of their memory.

        Raises:
            ContractError: if one has another form than the contract says.
        """
        plan, parts = self.planned.own_plan, len(self.planned.shards.ranks) or 1
        caches = bind_caches(plan, self.held(specs), pages, num_blocks)
        for group, spec in zip(plan.cache_groups, specs, strict=True):
            ratio, size = group.block_size // group.kernel_block_size // parts, group.kernel_block_size
            tensors = getattr(spec, "tensors", None) if group.format != PLAIN else None
            misfits = (
                wrong_cache(caches[at.index], at, num_blocks * ratio, size, plan.kv_dtype, tensors)
                for at in group.layers
            )
            descriptor = self.planned.offers[Kind.KV_SPEC, group.kv_spec]
            self.planned.registry.fit(descriptor, "what bind() made", chain.from_iterable(misfits))
        return caches

    def _complete(self, caches: dict[int, Any]) -> dict[int, Any]:
        """Add the caches of layers that own none."""
        for layer in self.planned.stages.own(self.planned.layers):
            if layer.shares_kv_with is not None:
                caches[layer.index] = caches[layer.shares_kv_with]
            elif layer.attention_type == "encoder_only":
                caches[layer.index] = no_cache(layer, self.planned.plan.dtype, self.planned.stages.device_of(layer))
        return caches


def _captured_always(capabilities: AttentionCapabilities) -> bool:
    """Return whether graphs can hold the attention of any step, common prefixes aside."""
    limited = any(limit.capability == "graphs" and limit.when != "cascade" for limit in capabilities.limits)
    return capabilities.graphs.value is GraphSupport.ALWAYS and not limited
