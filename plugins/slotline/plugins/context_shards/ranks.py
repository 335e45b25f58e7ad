"""Context shards over ranks: each rank of a group has one shard, and a communicator joins them.

The ranks hold different query heads and would hold the same keys. So they gather the queries, each rank attends with
all of the group's heads to its shard, and the outputs, weighted by their log-sum-exp, are added up where their heads
are.

A step of single tokens is the same for a graph each time: what a shard reads of it has memory of its own, whose
addresses stay, and all ranks exchange always. Prompts are planned from each step's own lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, evolve, frozen

from slotline.kernels.async_copy import to_device
from slotline.plugins.context_shards.attention import StepTokens, local_lens, lse_of, merge, of_shard, of_step, own_keys
from slotline.registry.contracts import AttentionBackend, AttentionBatch, AttentionLayer, Communicator, KVCache


@frozen(eq=False)
class RankPlan:
    """Plan of one step.

    Attributes:
        part: of this rank's shard.
        joined: whether any token sees a key in any shard, which all ranks know alike.
        has_keys: [num_tokens] bool on the device, the tokens that see a key in this shard. None if no token does.
        fresh: the plan of the step's own keys. None if every request has one token.
    """

    part: Any
    joined: bool
    has_keys: torch.Tensor | None
    fresh: Any


@frozen(eq=False)
class StepMemory:
    """Memory for steps of single tokens as a shard sees them, where captured graphs find them.

    Attributes:
        starts: [requests + 1] int32, each number itself.
        lens: [requests] int32. slots: [requests] int64. table: [requests, columns] int32, as in `AttentionBatch`.
        has_keys: [requests] bool, the requests with a key in the shard.
    """

    starts: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    has_keys: torch.Tensor

    @classmethod
    def of(cls, requests: int, columns: int, device: str) -> StepMemory:
        """Allocate memory for so many requests with so many kernel blocks each."""
        return cls(
            torch.arange(requests + 1, dtype=torch.int32, device=device),
            torch.zeros(requests, dtype=torch.int32, device=device),
            torch.zeros(requests, dtype=torch.int64, device=device),
            torch.zeros(requests, columns, dtype=torch.int32, device=device),
            torch.zeros(requests, dtype=torch.bool, device=device),
        )

    def keep(self, batch: AttentionBatch) -> AttentionBatch:
        """Return a step of single tokens whose tensors are in this memory."""
        count, columns = batch.num_requests, min(batch.block_table.shape[1], self.table.shape[1])
        lens = self.lens[:count].copy_(batch.seq_lens)
        torch.gt(lens, 0, out=self.has_keys[:count])
        return evolve(
            batch,
            query_start_loc=self.starts[: count + 1],
            seq_lens=lens,
            slot_mapping=self.slots[:count].copy_(batch.slot_mapping),
            block_table=self.table[:count, :columns].copy_(batch.block_table[:, :columns]),
        )


@define(eq=False)
class RankShards:
    """Backend of an attention group whose cache is divided among ranks. Implements `AttentionBackend`.

    Attributes:
        group: joins the ranks in the order in which they hold kernel blocks.
        shard: attends to this rank's keys with the heads of the whole group.
        own: attends to a step's own keys with this rank's heads, in `scratch`.
        device: of all tensors.
        size: tokens of a kernel block.
        base: of the backends' LSE.
        writes_cache: whether the backends store keys inside `forward`.
        memory: for steps of single tokens.
    """

    group: Communicator
    shard: AttentionBackend
    own: AttentionBackend
    scratch: KVCache
    device: str
    size: int
    base: str
    writes_cache: bool
    memory: StepMemory

    def plan(self, batch: AttentionBatch) -> RankPlan:
        """Plan this rank's shard, and the step's own keys."""
        step, index, count = StepTokens.of(batch), self.group.rank, self.group.size
        local = local_lens(step.seen, index, count, self.size)
        own = of_shard(batch, index, count, self.size, self.device, step.request, local)
        if not step.several:
            part = self.shard.plan(self.memory.keep(own))
            return RankPlan(part, joined=True, has_keys=self.memory.has_keys[: own.num_requests], fresh=None)
        has_keys = to_device(local > 0, torch.device(self.device)) if local.any() else None
        fresh = self.own.plan(of_step(batch, step, self.size))
        return RankPlan(self.shard.plan(own), bool(step.seen.any()), has_keys, fresh)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Any) -> None:
        """Store the new keys that belong to this rank."""
        self.shard.write(self._wide(layer), key, value, cache, plan.part)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention over all ranks' keys and the step's own, merged.

        Returns its natural LSE [num_heads, num_tokens].
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        if plan.fresh is not None:
            found.append(own_keys(self, layer, query, key, value, plan.fresh, out, sinks))
            sinks = None  # it counts once, with keys that every token has
        if plan.joined:
            found.append(self._joined(layer, query, key, value, cache, plan, out, sinks))
        elif self.writes_cache:
            blank = query.new_zeros(len(query), query.shape[1] * self.group.size, query.shape[2])
            self._attend(layer, blank, key, value, cache, plan, out, None)
        return merge(found, out)

    def _joined(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention of this rank's heads over all ranks' keys, as `out`, and its LSE."""
        group, heads = self.group, query.shape[1]
        if sinks is not None:
            sinks = group.all_gather(sinks.contiguous())
            sinks = sinks if group.rank == 0 else None  # the first shard has every request's first key
        queries = group.all_gather(query.contiguous(), 1)  # [T, all heads, D]
        part, lse = self._attend(layer, queries, key, value, cache, plan, out, sinks)
        if plan.has_keys is None:
            part, lse = torch.zeros_like(part), torch.full_like(lse, -torch.inf)
        else:
            part, lse = part.where(plan.has_keys[:, None, None], 0), lse.where(plan.has_keys, -torch.inf)
        whole = group.all_gather(lse.float()[None].contiguous()).logsumexp(0)  # [all heads, T]
        weight = torch.where(lse == -torch.inf, 0.0, (lse - whole).exp())
        weighted = (weight[..., None] * part.transpose(0, 1).float()).contiguous()  # [all heads, T, Dv]
        merged = group.reduce_scatter(weighted).transpose(0, 1)
        return merged, whole[group.rank * heads : (group.rank + 1) * heads]

    def _attend(
        self,
        layer: AttentionLayer,
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention of the group's queries over this rank's keys, and its LSE."""
        part = out.new_empty(len(out), queries.shape[1], out.shape[2])
        wide = self._wide(layer)
        return part, lse_of(self.shard, self.base, wide, queries, key, value, cache, plan.part, part, sinks)

    def _wide(self, layer: AttentionLayer) -> AttentionLayer:
        return wide(layer, self.group.size)


def wide(layer: AttentionLayer, size: int) -> AttentionLayer:
    """Return a layer with the query heads of a group of ranks."""
    return evolve(layer, num_heads=layer.num_heads * size)
