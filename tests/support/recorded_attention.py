"""The reference attention as one operation a call, which a device without a GPU can record and run again."""

from __future__ import annotations

from typing import Any

import torch

from slotline.registry.contracts import AttentionBatch, AttentionLayer, KVCache, TreeMask
from slotline.testing.reference.attention.backend import EagerAttention, Plan

CALLS: list[tuple[RecordedAttention, AttentionLayer, KVCache]] = []


@torch.library.custom_op("slotline_tests::store", mutates_args=())
def store(
    key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
    slots: torch.Tensor, trees: list[torch.Tensor], number: int,
) -> torch.Tensor:  # fmt: skip
    """Store keys by what the tensors say now."""
    backend, layer, cache = CALLS[number]
    backend.store_now(layer, key, value, cache, planned(starts, lens, table, slots, trees))
    return key.new_empty(0)


@torch.library.custom_op("slotline_tests::attend", mutates_args={"out"})
def attend(
    out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    lens: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, trees: list[torch.Tensor],
    sinks: torch.Tensor | None, number: int,
) -> torch.Tensor:  # fmt: skip
    """Attend by what the tensors say now."""
    backend, layer, cache = CALLS[number]
    lse = backend.attend_now(layer, query, key, value, cache, planned(starts, lens, table, slots, trees), out, sinks)
    assert lse is not None
    return lse


def planned(
    starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, trees: list[torch.Tensor]
) -> Plan:
    tree = TreeMask(trees[0], trees[1], trees[2].numpy(), trees[2]) if trees else None
    return Plan(starts.tolist(), lens.tolist(), table, slots, causal=True, tree=tree)


class RecordedAttention(EagerAttention):
    """Reads requests from the batch's tensors when it runs, and not when it is planned."""

    store_now, attend_now = EagerAttention.write, EagerAttention.forward

    def plan(self, batch: AttentionBatch) -> Any:
        tree = batch.tree
        trees = [] if tree is None else [tree.sees, tree.depths, tree.num_nodes_device]
        return batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping, trees

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        CALLS.append((self, layer, cache))
        store(key, value, *plan, len(CALLS) - 1)

    def forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: KVCache,
        plan: Any, out: torch.Tensor, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        CALLS.append((self, layer, cache))
        lse: torch.Tensor = attend(out, query, key, value, *plan, sinks, len(CALLS) - 1)
        return lse
