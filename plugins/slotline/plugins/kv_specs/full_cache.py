"""The `full` cache spec: one block for every `block_size` tokens, none freed before the request ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotline.plugins.kv_specs.paged import PagedSpec
from slotline.registry.contracts.kv_spec import BlockHash


class FullSpec(PagedSpec):
    """Answers the pool's questions for layers that keep every token. Implements `KVSpec`."""

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self._context.max_model_len)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        blocks: list[int] = []
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks
