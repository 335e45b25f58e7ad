"""Whether plugins of a plan hear of blocks that change hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slotline.planner.context_parallel import ContextDevices
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Plan


def hears_blocks(
    plan: Plan,
    offers: Mapping[tuple[Kind, str], Descriptor[Any]],
    extensions: Sequence[Descriptor[Any]],
    shards: ContextDevices,
) -> bool:
    """Return whether an extension or an attention backend of a plan declares `block_events`.

    Raises:
        NegotiationError: if a backend does whose keys are divided among shards, since each has a part of a block.
    """
    groups = [group for group in plan.groups if group.cache_group]
    backends = {group.backend for group in groups if offers[Kind.ATTENTION, group.backend].capabilities.block_events}
    if backends and shards.divided:
        raise NegotiationError(
            f"{shards.asked}: attention backend {', '.join(sorted(backends))} keeps something for each block, of which "
            f"each shard has a part",
            fix=f"choose another attention.backend, or set {shards.key} = 1",
        )
    return bool(backends) or any(one.capabilities.block_events for one in extensions)
