"""Attention that leaves out blocks by the bounds of their keys, written for clarity: Quest (arXiv 2406.10774)."""

from __future__ import annotations

import torch

from slotline.registry.contracts.attention import AttentionContext, AttentionLayer, KVCache
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS, CacheTensors
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class BoundedAttention(EagerAttention):
    """The textbook formula over `most` blocks of a decode. Mutants change one of its steps.

    All heads of a request read the same blocks, those with the largest bounds of any head.
    """

    most = 12

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.exact = context.exact

    def write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,  # type: ignore[override]
        plan: Plan,
    ) -> None:
        super().write(layer, key, value, KVCache(cache.key, cache.value), plan)
        slots = plan.slot_mapping[: plan.starts[-1]]
        slots = slots[slots >= 0]
        for block in self.written(slots):
            last = int((slots[slots // self.block_size == block] % self.block_size).max())
            self.bound(cache[KEY_BOUNDS], block, cache.key[block, : self.counted(last)])

    def written(self, slots: torch.Tensor) -> list[int]:
        """Return the blocks of slots [n], each once."""
        return [int(block) for block in (slots // self.block_size).unique()]

    def counted(self, last: int) -> int:
        """Return how many of a block's keys count, from the last offset that is written."""
        return last + 1

    def bound(self, bounds: torch.Tensor, block: int, keys: torch.Tensor) -> None:
        """Set the bounds [2, Hkv, D] of one block from its keys [n, Hkv, D]."""
        bounds[block] = torch.stack([keys.amin(0), keys.amax(0)])

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,  # type: ignore[override]
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        self.query = query
        return super().forward(layer, query, key, value, cache, plan, out, sinks)  # type: ignore[arg-type]

    def gather(
        self,
        cache: CacheTensors,  # type: ignore[override]
        plan: Plan,
        request: int,
        first: int,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(KVCache(cache.key, cache.value), plan, request, first, length)
        start, stop = plan.starts[request : request + 2]
        count, self.hidden = -(-length // self.block_size), torch.zeros(length, dtype=torch.bool)
        if self.exact or stop - start > 1 or count <= self.most:
            return keys, values
        bounds = cache[KEY_BOUNDS][plan.block_table[request, :count].long()].float()
        kept = self.kept(self.best(self.query[start].float(), bounds))
        self.hidden = ~torch.isin(torch.arange(length) // self.block_size, kept.cpu())
        return keys, values

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        return super().visible(layer, plan, num_queries, first, length) & ~self.hidden

    def best(self, query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Return the largest possible product of any head with a key of each block, [n].

        Args:
            query: [H, D].
            bounds: [n, 2, Hkv, D].
        """
        heads = query.unflatten(0, (bounds.shape[2], -1))  # [Hkv, G, D]
        low, high = (bounds[:, side, :, None] * heads for side in (0, 1))  # [n, Hkv, G, D]
        return torch.maximum(low, high).sum(3).amax((1, 2))

    def kept(self, best: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the blocks that are read: the first, the newest, and the best others."""
        best = best.clone()
        best[[0, -1]] = torch.inf
        return best.topk(self.most).indices
