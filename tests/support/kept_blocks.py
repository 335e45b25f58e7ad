"""What connectors of the tests share that keep blocks in a dict, and fail where their options name a method."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorContext


class KeptBlocks:
    """Blocks in host memory, by group and hash.

    Args:
        how: the method that raises, or another way to fail.
    """

    def __init__(self, context: KVConnectorContext, how: str) -> None:
        self.context, self.how = context, how
        self.blocks: dict[tuple[int, BlockHash], torch.Tensor] = {}
        self.broken: set[int] = set()

    def _fail(self, where: str) -> None:
        if self.how == where:
            raise OSError("no such store")

    def _read(self, block: CacheBlock) -> torch.Tensor:
        row = torch.empty(self.context.groups[block.group].block_bytes, dtype=torch.uint8)
        self.context.copy.to_host(block.group, [block.block], [row])
        return row

    def _write(self, block: CacheBlock, row: torch.Tensor) -> None:
        self.context.copy.to_device(block.group, [block.block], [row])

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        self._fail("held")
        return [(group, one) in self.blocks for one in hashes]

    def failed(self) -> set[int]:
        broken, self.broken = self.broken, set()
        return broken

    def reset(self) -> None:
        self.blocks.clear()
