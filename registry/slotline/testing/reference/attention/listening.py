"""Attention that keeps bounds of blocks in memory of its own and hears when blocks change hands, for clarity."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.registry.contracts.attention import AttentionContext, AttentionLayer, KVCache
from slotline.registry.contracts.block_events import BlockEvents
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS, CacheTensors
from slotline.testing.reference.attention.backend import EagerAttention, Plan
from slotline.testing.reference.attention.bounded import BoundedAttention


class ListeningAttention(BoundedAttention):
    """As `BoundedAttention`, over a plain cache. Bounds grow with each key that is written. Mutants change one step.

    Bounds of a block are dropped when it is returned or given, and computed from its keys when it comes back.
    """

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.bounds: dict[tuple[int, ...], torch.Tensor] = {}
        self.coming: dict[int, set[int]] = {layer.index: set() for layer in context.layers}
        self.empty: dict[int, set[int]] = {layer.index: set() for layer in context.layers}

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        """Note which blocks have no keys yet, and whose keys are to be read."""
        for each in events:
            for block in each.returned.tolist():
                self.on_returned(block)
            for block in each.given.tolist():
                self.on_given(block)
            for block in each.restored.tolist():
                self.on_restored(block)
            for block in each.loaded.tolist():
                self.on_loaded(block)

    def on_returned(self, block: int) -> None:
        """Forget a block."""
        for index in self.coming:
            self.coming[index].discard(block)
            self.empty[index].add(block)

    def on_given(self, block: int) -> None:
        """Begin a block anew."""
        for index in self.empty:
            self.empty[index].add(block)

    def on_restored(self, block: int) -> None:
        """Have a block's keys read."""
        self.read_anew(block)

    def on_loaded(self, block: int) -> None:
        """Have a block's keys read."""
        self.read_anew(block)

    def read_anew(self, block: int) -> None:
        """Have the keys of a block read before the next use, in each layer."""
        for index in self.coming:
            self.coming[index].add(block)
            self.empty[index].discard(block)

    def current(self, layer: AttentionLayer, cache: KVCache) -> torch.Tensor:
        """Return the layer's bounds [num_blocks, 2, Hkv, D], brought up to date with what was heard."""
        shape = (len(cache.key), 2, layer.num_kv_heads, layer.head_size)
        whose = (layer.index, cache.key.data_ptr(), *shape)  # the suite has caches of several sizes
        if whose not in self.bounds:
            self.bounds[whose] = torch.zeros(shape, device=cache.key.device)
        bounds = self.bounds[whose]
        if dropped := sorted(self.empty[layer.index]):
            bounds[dropped, 0], bounds[dropped, 1] = torch.inf, -torch.inf
        if read := sorted(self.coming[layer.index]):
            keys = cache.key[read].float()
            bounds[read] = torch.stack([keys.amin(1), keys.amax(1)], 1)
        self.empty[layer.index].clear()
        self.coming[layer.index].clear()
        return bounds

    def write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,  # type: ignore[override]
        plan: Plan,
    ) -> None:
        EagerAttention.write(self, layer, key, value, cache, plan)
        bounds, slots = self.current(layer, cache), plan.slot_mapping[: plan.starts[-1]].tolist()
        for slot, new in zip(slots, key.to(cache.key.dtype).float(), strict=False):
            if slot >= 0:
                low, high = bounds[slot // self.block_size]
                bounds[slot // self.block_size] = torch.stack([torch.fmin(low, new), torch.fmax(high, new)])

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,  # type: ignore[override]
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        tensors = {"key": cache.key, "value": cache.value, KEY_BOUNDS: self.current(layer, cache)}
        return super().forward(layer, query, key, value, CacheTensors(tensors), plan, out, sinks)
