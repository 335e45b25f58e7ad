"""Construction of the KV connector of a plan, with the caches that it copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attrs import evolve

from slotline.builder.cache_memory import bind_caches
from slotline.builder.parts import CacheMemory, Parts
from slotline.core.kv_cache.block_hashes import hash_sizes
from slotline.planner.kv_connector import inner_connectors, part_of, waits_for_loads
from slotline.planner.plan import Planned
from slotline.plugins.kv_transfer.agreement import Agreement
from slotline.plugins.kv_transfer.block_copy import CacheBlockCopy, is_over
from slotline.plugins.kv_transfer.fingerprint import fingerprint
from slotline.plugins.kv_transfer.later_loads import LaterLoads
from slotline.plugins.kv_transfer.speed import LoadSpeed
from slotline.plugins.kv_transfer.state_blocks import state_group, state_pages
from slotline.plugins.kv_transfer.transfers import AsyncTransfers, Transfers
from slotline.plugins.states.dispatcher import StateDispatcher
from slotline.registry.contracts import (
    ConnectorGroup,
    CopyStream,
    KVConnector,
    KVConnectorCapabilities,
    KVConnectorContext,
)
from slotline.registry.descriptor import Descriptor
from slotline.registry.loading import bind_contract

_FIX = "give it less memory in its table"


def build_transfers(parts: Parts, descriptor: Descriptor[Any], memory: CacheMemory) -> Transfers:
    """Build a connector and register the caches with it.

    Args:
        parts: of the engine.
        descriptor: of the connector.
        memory: of the caches.
    """
    planned, plan = parts.planned, parts.planned.own_plan
    pages = [
        [_blocks(memory.pages[layer.index], memory.num_blocks) for layer in group.layers] for group in plan.cache_groups
    ]
    first, unit = [0] * len(pages), hash_sizes(parts.groups, plan.block_size)[1]
    states = (
        []
        if (dispatcher := kept_states(parts)) is None
        else [state_group(dispatcher, unit, [one.kv_spec for one in plan.state_caches])]
    )
    if dispatcher is not None:
        pages.append(state_pages(dispatcher, parts.rows.max_requests))
        first.append(memory.num_blocks)
    copy = CacheBlockCopy(pages, partial(_copies_of, planned), first)
    groups = tuple(
        ConnectorGroup(
            name=group.name,
            layers=group.layers,
            kv_dtype=plan.kv_dtype,
            format=group.format,
            layout=group.layout,
            block_size=group.block_size,
            kernel_block_size=group.kernel_block_size,
            block_bytes=sum(sizes),
            layer_bytes=sizes,
        )
        for group, sizes in zip(plan.cache_groups, copy.layer_bytes[: len(plan.cache_groups)], strict=True)
    )
    part = part_of(planned.place, plan, planned.shards.ranks)
    capabilities, limits = descriptor.capabilities, planned.loaded.config.kv_connector
    judges = bool(capabilities.judges.support)
    speed = LoadSpeed(active=limits.leave_out_slow and not judges and not capabilities.by_request.support)
    context = KVConnectorContext(
        contract=bind_contract(descriptor),
        groups=(*groups, *states),
        caches=bind_caches(plan, memory.specs, memory.pages, memory.num_blocks),
        num_blocks=memory.num_blocks,
        num_states=0 if dispatcher is None else dispatcher.num_slots - parts.rows.max_requests,
        copy=copy,
        device=planned.stages.stages[0].device,
        model=":".join(filter(None, (str(planned.facts.path), plan.dtype, fingerprint(planned), part))),
        options=planned.options(descriptor),
        part=part,
        computing=speed.computed if judges and limits.leave_out_slow else None,
    )
    if capabilities.composes:
        inner = {one.name: one for one in inner_connectors(planned.loaded, planned.registry, descriptor)}

        def build(name: str, given: KVConnectorContext) -> tuple[KVConnectorCapabilities, KVConnector]:
            one = inner[name]
            own = evolve(given, contract=bind_contract(one), options=planned.options(one), inner=None, computing=None)
            return one.capabilities, parts.build(one, own, _FIX)

        context = evolve(context, inner=build)
    connector: KVConnector = parts.build(descriptor, context, _FIX)
    saves_evicted = capabilities.saves == "evicted"
    kind: Callable[..., Transfers] = Transfers
    if waits_for_loads(descriptor, planned.plan):
        if not capabilities.asynchronous.support:
            device = torch.device(context.device)
            connector = LaterLoads(connector, partial(_moment, device, _copies_of(planned, device)))
        most = max(min(limits.max_saves, memory.num_blocks // 2), 1)
        kind = partial(AsyncTransfers, timeout=limits.load_timeout, max_saves=most)
    return kind(
        connector,
        saves_evicted,
        planned.registry.full_name(descriptor),
        elsewhere=frozenset(number for number, group in enumerate(groups) if not group.layers),
        agreement=Agreement(parts.gather, planned.place.layout.replica_size),
        by_request=bool(capabilities.by_request.support),
        speed=speed,
        sizes=[*(group.block_size for group in groups), *(0 for _ in states)],
        counts=bool(capabilities.counts.support),
    )


def _copies_of(planned: Planned, device: torch.device) -> CopyStream:
    """Return a queue of copies of a device."""
    return planned.hardware.get(str(device), planned.hardware[planned.device]).copy_stream()


def _moment(device: torch.device, copies: CopyStream) -> Callable[[], bool]:
    """Return a function that says whether a device has done all that it was given to compute so far."""
    return partial(is_over, copies.record(copies=False), device)


def kept_states(parts: Parts) -> StateDispatcher | None:
    """Return the holder of the states if prefixes are kept with them, else None."""
    states = parts.named.get("states")
    dispatcher: StateDispatcher | None = None if states is None else states.dispatcher
    return dispatcher if dispatcher is not None and dispatcher.num_slots > parts.rows.max_requests else None


def _blocks(pages: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a layer's memory by block, [num_blocks, ratio, bytes].

    The memory comes flat, or with a row for each kernel block.
    """
    return pages.view(num_blocks, 1, -1) if pages.dim() == 1 else pages.unflatten(0, (num_blocks, -1))
