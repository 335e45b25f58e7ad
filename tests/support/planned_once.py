"""An attention backend that can be planned once for every replay: it reads all that a batch holds at each call."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.capability import Flag
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, KVCache
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.reference.attention.backend import EagerAttention


class PlannedOnce(EagerAttention):
    """The reference, whose plan is the batch itself, so that tensors filled after it was planned count."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:  # type: ignore[override]
        return batch

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: AttentionBatch
    ) -> None:  # type: ignore[override]
        super().write(layer, key, value, cache, super().plan(plan))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: AttentionBatch,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # type: ignore[override]
        return super().forward(layer, query, key, value, cache, super().plan(plan), out, sinks)


descriptor = evolve(
    reference,
    name="planned_once",
    capabilities=evolve(reference.capabilities, plan_once=Flag(True)),
    factory="planned_once:PlannedOnce",
)
