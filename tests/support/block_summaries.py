"""A third party's format: keys and values as usual, with the bounds of each block's keys (Quest, arXiv 2406.10774).

The spec lays out one more tensor for each kernel block. The backend keeps it up to date and reads only the blocks whose
bounds allow the largest scores, all of them while a request has few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slotline.registry import Descriptor, Flag, Kind, Set
from slotline.registry.cache_pages import bind_tensors, block_bytes
from slotline.registry.contracts import (
    AttentionCapabilities,
    AttentionLayer,
    BlockHash,
    CacheTensor,
    CacheTensors,
    KVSpecCapabilities,
    KVSpecContext,
)
from slotline.testing.reference.attention.backend import EagerAttention, Plan

FORMAT = "acme_summaries"


class Summaries:
    """Keeps every token, and the largest and smallest elements of each kernel block's keys."""

    def __init__(self, context: KVSpecContext) -> None:
        assert context.format == FORMAT
        self.context = context
        self.ratio = context.block_size // context.kernel_block_size

    def tensors(self, layer: AttentionLayer) -> tuple[CacheTensor, ...]:
        heads, dtype = layer.num_kv_heads, self.context.kv_dtype
        return (
            CacheTensor("key", dtype, (heads, layer.head_size), by_head=True),
            CacheTensor("value", dtype, (heads, layer.head_size_v), by_head=True),
            CacheTensor("bounds", "float32", (2, heads, layer.head_size), per="block"),
            CacheTensor("filled", "uint8", (), per="block"),
        )

    def page_bytes(self, layer: AttentionLayer) -> int:
        return self.ratio * block_bytes(self.tensors(layer), self.context.kernel_block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.context.block_size)

    def max_blocks_held(self) -> int:
        return self.blocks_needed(self.context.max_model_len)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Sequence[BlockHash], lookup: Callable[[BlockHash], int | None]) -> list[int]:
        found: list[int] = []
        for each in hashes:
            block = lookup(each)
            if block is None:
                break
            found.append(block)
        return found

    def bind(self, raw: torch.Tensor, layer: AttentionLayer, num_blocks: int) -> CacheTensors:
        size = self.context.kernel_block_size
        return bind_tensors(raw, self.tensors(layer), num_blocks * self.ratio, size, self.context.layout)


class Quest(EagerAttention):
    """The textbook formula over the blocks with the highest bounds. `skipped` counts the blocks that were not read."""

    most_blocks = 64
    skipped = 0

    def write(self, layer: AttentionLayer, key: Any, value: Any, cache: Any, plan: Plan) -> None:
        slots = plan.slot_mapping[: plan.starts[-1]]
        kept = slots >= 0
        place = (slots[kept] // self.block_size, slots[kept] % self.block_size)
        for name, new in (("key", key), ("value", value)):
            cache[name][place] = new[: len(slots)][kept].to(cache[name].dtype)
        for block, offset in zip(*(part.tolist() for part in place), strict=True):
            stored = cache.key[block, : offset + 1].float()  # a reused block's old bounds do not count
            cache["bounds"][block] = torch.stack([stored.amax(0), stored.amin(0)])
            cache["filled"][block] = offset + 1

    def forward(self, layer: AttentionLayer, query: Any, key: Any, value: Any, cache: Any, *rest: Any) -> Any:
        self.query = query
        return super().forward(layer, query, key, value, cache, *rest)

    def gather(self, cache: Any, plan: Plan, request: int, first: int, length: int) -> Any:
        count = -(-length // self.block_size)
        blocks = plan.block_table[request, :count].long()
        full = cache["filled"][blocks[: length // self.block_size]]
        assert bool((full == self.block_size).all()) or not bool(blocks.any())  # made-up steps have null blocks
        place = torch.arange(length)
        place = (blocks[place // self.block_size], place % self.block_size)
        keys, values = (cache[name][place].clone() for name in ("key", "value"))
        rows = slice(*plan.starts[request : request + 2])
        if rows.stop - rows.start == 1 and count > self.most_blocks:
            for block in self.unread(cache["bounds"][blocks], self.query[rows.start]):
                keys[block * self.block_size : (block + 1) * self.block_size] = -torch.inf  # no weight
                self.skipped += 1
        return keys, values

    def unread(self, bounds: torch.Tensor, query: torch.Tensor) -> list[int]:
        """The blocks whose best possible score is among the lowest of all heads: bounds [n, 2, Hkv, D]."""
        heads = query.float().view(bounds.shape[2], -1, query.shape[1]).sum(1)
        best = torch.maximum(bounds[:, 0] * heads, bounds[:, 1] * heads).sum((1, 2))
        return best[:-1].argsort()[: len(best) - self.most_blocks].tolist()


spec = Descriptor(
    kind=Kind.KV_SPEC,
    name="acme_summaries",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(("full",)), exact_kinds=Set(("full",)), page_stride=Flag(True), formats=Set((FORMAT,))
    ),
    factory=Summaries,
)
attention = Descriptor(
    kind=Kind.ATTENTION,
    name="acme_quest",
    capabilities=AttentionCapabilities(
        devices=Set(("cpu",)), dtypes=Set((("float32", "float32"),)), cache_formats=Set((FORMAT,)), lse=Flag(True)
    ),
    factory=Quest,
)
