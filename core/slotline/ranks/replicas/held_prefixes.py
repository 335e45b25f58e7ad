"""Names of prefixes, by which replicas tell the front what their caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import numpy as np
from attrs import frozen

from slotline.builder.prefix_log import LoggedPool, PrefixLog
from slotline.core.engine.engine import Engine
from slotline.core.kv_cache.block_hashes import extend_hashes
from slotline.ranks.replicas.front_requests import SentRequest
from slotline.ranks.replicas.reports import NAME, PrefixNews
from slotline.registry.negotiation import Plan

_OWN_HASHES = ("lora_request", "features", "prompt_embeds")
"""Arguments of requests whose blocks are hashed with what only a replica knows."""


@frozen
class ToldBlocks:
    """The blocks that replicas tell of: those of one cache group, the one that keeps the longest prefixes.

    Attributes:
        group: its index.
        size: tokens of a block.
        piece: tokens that are hashed at a time.
    """

    group: int
    size: int
    piece: int

    def names(self, request: SentRequest) -> Sequence[bytes] | None:
        """Return the names of a prompt's prefixes of 1, 2, ... blocks, None if they cannot be known here."""
        if not request.prompt_known or any(request.inputs.get(name) for name in _OWN_HASHES):
            return None
        tokens = request.token_array.astype(np.int32)
        hashes = extend_hashes(request, tokens, len(tokens) // self.piece, self.piece)
        step = self.size // self.piece
        return [one[:NAME] for one in hashes[step - 1 :: step]]


def told_blocks(plan: Plan) -> ToldBlocks:
    """Return the blocks that replicas with a plan tell of. It has prefixes."""
    groups = plan.cache_groups
    group = next((index for index, one in enumerate(groups) if "full" in one.kinds), 0)
    return ToldBlocks(group, groups[group].block_size, gcd(*(one.block_size for one in groups)))


@frozen(eq=False)
class PrefixTeller:
    """What a replica tells of its prefixes."""

    log: PrefixLog
    group: int

    @classmethod
    def of(cls, engine: Engine) -> PrefixTeller | None:
        """Return that of an engine, None if its pool keeps no log or its model has no prefixes."""
        pool = engine.scheduler.cache.pool
        if not isinstance(pool, LoggedPool) or not engine.plan.cache_groups:
            return None
        return cls(pool.listen(), told_blocks(engine.plan).group)

    def news(self) -> PrefixNews | None:
        """Return what has changed since the last call, None for nothing."""
        changes = self.log.take()
        if changes is None:
            return None
        removed, stored = (
            b"".join(one[:NAME] for group, one in keys if group == self.group)
            for keys in (changes.removed, changes.stored)
        )
        return PrefixNews(changes.cleared, removed, stored) if changes.cleared or removed or stored else None
