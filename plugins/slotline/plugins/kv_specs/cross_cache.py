"""The `cross_attention` cache spec: blocks for all of an encoder's tokens at once, held until the request ends.

Tokens here are the encoder's: the core asks with their number, which is known before the request's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotline.plugins.kv_specs.paged import PagedSpec
from slotline.registry.contracts.kv_spec import BlockHash


class CrossSpec(PagedSpec):
    """Answers the pool's questions for layers that read an encoder's keys. Implements `KVSpec`."""

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self._context.max_model_len)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        """Return no hit, because hashes of tokens do not identify an encoder's blocks."""
        return []
