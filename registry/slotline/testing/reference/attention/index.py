"""Attention to the keys that an index picks, written for clarity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache, TreeMask
from slotline.registry.contracts.cache_tensors import CacheTensors
from slotline.testing.reference.attention.backend import EagerAttention, Plan, raw

Inputs = Mapping[str, torch.Tensor]


class IndexedAttention(EagerAttention):
    """The textbook formula over latents, masked by what an index picks. Mutants change one of its steps."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self.picks: dict[tuple[int, int], torch.Tensor] = {}
        self.request, self.rows, self.given = 0, slice(0), dict[str, torch.Tensor]()
        self.index_keys = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> Plan:
        """Return the batch, and forget what an earlier one picked."""
        self.picks.clear()
        return super().plan(batch)

    def write(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: Plan,
        inputs: Inputs | None = None,
    ) -> None:
        """Store latents, and the index's keys of a layer that has an index of its own."""
        super().write(layer, key, value, KVCache(cache.key, cache.key), plan)
        if inputs is not None:
            slots = plan.slot_mapping[: plan.starts[-1]]
            self.store_index(cache, slots, inputs["index_key"][: len(slots)])

    def store_index(self, cache: CacheTensors, slots: torch.Tensor, new: torch.Tensor) -> None:
        """Put the index's keys [n, size] into their slots [n], except slot -1."""
        kept = slots >= 0
        self.store(cache["index_key"], slots[kept], new[kept])

    def forward(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        inputs: Inputs | None = None,
    ) -> torch.Tensor | None:
        """Compute attention of each request in turn, over the keys that are picked."""
        self.given = dict(inputs or {})
        self.index_keys = cache["index_key"] if layer.index_from is None else torch.empty(0)
        return super().forward(layer, query, key, value, KVCache(cache.key, cache.key), plan, out, sinks)

    def gather(self, cache: KVCache, plan: Plan, request: int, first: int, length: int) -> Any:
        """Note the request, beside returning its keys."""
        self.request, self.rows = request, slice(*plan.starts[request : request + 2])
        return super().gather(cache, plan, request, first, length)

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        """Return, as [q, n] bool, the keys that are picked."""
        seen = self.in_tree(layer, plan, super().visible(layer, plan, num_queries, first, length), first, length)
        if layer.index_from is not None:
            return self.shared(layer.index_from)
        if layer.index_topk is None:
            return seen
        positions = torch.arange(length, device=self.index_keys.device)
        place = (self.blocks(plan, self.request, positions // self.block_size), positions % self.block_size)
        keys = raw(self.index_keys)[place].view(self.index_keys.dtype)
        query, weight = (self.given[name][self.rows] for name in ("index_query", "index_weight"))
        scores = self.index_scores(query, keys, weight).cpu()
        self.picks[layer.index, self.request] = self.pick(scores, seen, layer.index_topk)
        return self.picks[layer.index, self.request]

    def in_tree(self, layer: AttentionLayer, plan: Plan, seen: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Return, as [q, n] bool, the keys that may be picked if the current request's last tokens are tree nodes."""
        if plan.tree is None or not (nodes := int(plan.tree.num_nodes[self.request])):
            return seen
        return super().among_nodes(layer, self.tree_of(plan.tree, self.request), seen, nodes, first, length)

    def among_nodes(self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        """Return the keys that are picked: among those that nodes see."""
        return seen

    def shared(self, owner: int) -> torch.Tensor:
        """Return what the current request's queries picked in an earlier layer."""
        return self.picks[owner, self.request]

    def index_scores(self, query: torch.Tensor, keys: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the scores [q, n] of queries [q, heads, size] and keys [n, size], with weights [q, heads]."""
        products = torch.einsum("qhd,kd->qhk", query.float(), keys.float()).clamp_min(0.0)
        return torch.einsum("qh,qhk->qk", weight.float(), products)

    def pick(self, scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
        """Return, as [q, n] bool, the keys seen with the highest scores, the first of equal ones."""
        order = scores.masked_fill(~seen, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :most]
        return torch.zeros_like(seen).scatter(1, order, True) & seen
