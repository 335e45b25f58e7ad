"""Batches over latents among which an index picks: a `World` with the index's keys beside the latents.

Numbers of the index are small integers and quarters. Their scores are exact in every dtype and in any order of the
sums, so every backend picks the same keys. Many scores are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.cache_tensors import CacheTensors
from slotline.testing.environments.attention import World, fill, raw
from slotline.testing.environments.attention_case import FIRST_BLOCK, NULL_BLOCK, POISON_BLOCK, Case
from slotline.testing.oracles import attention as oracle

GAP = 16
"""Elements behind a kernel block's tensors, which nobody may read or write."""


class IndexedWorld(World):
    """World whose cache holds latents, and keys of an index that picks among them."""

    @cached_property
    def index(self) -> list[Mapping[str, torch.Tensor]]:
        """Inputs of the index for each request, on the host: those of its new tokens, and the keys of all tokens."""
        case, generator = self.case, torch.Generator().manual_seed(self.case.seed + 1)
        heads, size = case.index_heads, case.index_size

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randint(-3, 4, shape, generator=generator)

        return [
            {
                "index_query": numbers(count, heads, size).to(case.dtype),
                "index_key": numbers(length, size).to(case.cache_dtype),
                "index_weight": numbers(count, heads).float() / 4 * case.index_amplitude,
            }
            for count, length in case.requests
        ]

    def empty_cache(self) -> tuple[list[torch.Tensor], Any]:
        """Return the memory of the kernel blocks and its two tensors, spoiled where nothing may be read."""
        case, n, tokens = self.case, self.num_blocks, self.case.block_size
        parts = [tokens * case.head_size, tokens * case.index_size]
        gap = GAP if case.strided else 0
        whole = torch.empty(n, sum(parts) + gap, dtype=case.cache_dtype, device=self.device)
        keys, own = whole[:, : parts[0]], whole[:, parts[0] : sum(parts)]
        buffers = [whole]
        if not case.strided:
            keys, own = keys.contiguous(), own.contiguous()
            buffers = [keys, own]
        outer = (tokens, 1) if case.layout == "NHD" else (1, tokens)
        latents = keys.unflatten(1, (*outer, -1))
        views = {
            "key": latents if case.layout == "NHD" else latents.transpose(1, 2),
            "index_key": own.unflatten(1, (tokens, -1)),
        }
        rows: dict[str, Sequence[int]] = {"null block": [NULL_BLOCK], "poison block": [POISON_BLOCK]}
        owned = {block for each in self.owned for block in each} - {NULL_BLOCK}
        rows["unused blocks"] = sorted(set(range(FIRST_BLOCK, n)) - owned)
        rows["unused slots"] = sorted(owned)
        for place, blocks in rows.items():
            index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
            for view in views.values():
                fill(view, index, self._garbage(place))
        if case.strided:
            whole[:, sum(parts) :] = self._garbage("gaps")
        return buffers, CacheTensors(views)

    def _put(self, request: int, positions: range, slots: torch.Tensor) -> None:
        kept = torch.as_tensor(list(positions), dtype=torch.int64)[slots >= 0]
        slots = slots[slots >= 0].to(self.device)
        place = (slots // self.case.block_size, slots % self.case.block_size)
        dense = {"key": self.keys[request], "index_key": self.index[request]["index_key"]}
        for name, view in self.cache.items():
            raw(view)[place] = raw(dense[name][kept]).to(self.device)

    def inputs(self) -> dict[str, Any]:
        """Return the layer's inputs, those of new tokens followed by padded rows."""
        if not self.layer.inputs:
            return {}
        found = {}
        for each in self.layer.inputs:
            counts = [count for count, _ in self.case.requests]
            rows = [own[each.name][len(own[each.name]) - n :] for own, n in zip(self.index, counts, strict=True)]
            dtype = torch.float32 if each.dtype else self.case.dtype
            pad = torch.full((self.case.padding, *each.shape), self._garbage("padding"))
            found[each.name] = torch.cat([part.to(dtype) for part in (*rows, pad)]).to(self.device)
        return {"inputs": found}

    def seen(self, request: int) -> torch.Tensor | None:
        """Return the keys that the index picks for a request's query tokens, [q, L] bool."""
        own, (count, length) = self.index[request], self.case.requests[request]
        assert self.case.index_topk is not None
        seen = super().seen(request)  # of a tree's nodes only those of a path may be picked
        visible = oracle.visible(count, length) if seen is None else seen
        return oracle.picked(own["index_query"], own["index_key"], own["index_weight"], visible, self.case.index_topk)


class SharingWorld(IndexedWorld):
    """The next layer of an `IndexedWorld`: other latents and queries, in blocks of the same table, the same picks."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        super().__init__(case, device)
        self.layer = evolve(case.layer(1), index_from=0, inputs=())
        self.keys, self.queries = (
            [raw(key).flip(-1).view(key.dtype) for key in self.keys],
            [-query for query in self.queries],
        )
        self.values = [self.value_of(key) for key in self.keys]
        self.buffers, whole = self.empty_cache()
        self.cache = CacheTensors({"key": whole["key"]})
        for request in range(len(case.requests)):
            self.store(request)
