"""Bytes that attention backends declare for themselves beside the caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.attention import AttentionContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ContractError
from slotline.registry.loading import label_of, resolve_options
from slotline.registry.negotiation import GroupPlan, Plan


def workspace_bytes(descriptor: Descriptor[Any], context: AttentionContext) -> int:
    """Return the bytes that a backend declares for a context, 0 without a declaration.

    Raises:
        ContractError: if what it gives is no number of bytes.
    """
    declared = descriptor.capabilities.workspace
    if declared is None:
        return 0
    found = declared(context) if callable(declared) else declared
    if type(found) is not int or found < 0:
        raise ContractError(
            f"{label_of(descriptor)}: workspace gives {found!r:.80}, not a number of bytes",
            fix="declare a function from the context to an int of at least 0",
        )
    return found


def with_workspaces(
    plan: Plan, offers: Mapping[tuple[Kind, str], Descriptor[Any]], loaded: LoadedConfig, max_model_len: int
) -> Plan:
    """Return the plan with the workspace of each attention group."""
    groups = tuple(
        evolve(group, workspace=workspace_bytes(descriptor, _context(plan, group, descriptor, loaded, max_model_len)))
        for group in plan.groups
        for descriptor in [offers[Kind.ATTENTION, group.backend]]
    )
    return evolve(plan, groups=groups)


def _context(
    plan: Plan, group: GroupPlan, descriptor: Descriptor[Any], loaded: LoadedConfig, max_model_len: int
) -> AttentionContext:
    scheduler = loaded.config.scheduler
    return AttentionContext(
        contract=group.contract,
        layers=group.layers,
        device=plan.device.type,
        dtype=group.dtype,
        kv_dtype=group.kv_dtype,
        block_size=group.block_size,
        kernel_block_size=group.kernel_block_size,
        layout=group.layout,
        max_query_len=group.max_query_len,
        max_requests=scheduler.max_requests,
        max_tokens=scheduler.max_batched_tokens,
        max_model_len=max_model_len,
        batch_invariant=loaded.config.batch_invariant,
        cache_format=group.cache_format,
        options=loaded.options(Kind.ATTENTION, group.backend, resolve_options(descriptor)),
    )
