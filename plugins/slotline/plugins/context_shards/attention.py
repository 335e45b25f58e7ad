"""Decode context parallelism: the keys of one request over several shards of the cache, each with attention of its own.

A block of the pool has one kernel block for each shard, or a multiple. They go to the shards in turn, so that shard s
of n holds a request's kernel blocks s, s + n, s + 2n, ... Each shard attends to the keys that it holds, and its
log-sum-exp says how much that counts: outputs o_s with LSEs l_s merge to sum(exp(l_s) o_s) / sum(exp(l_s)), exactly (as
in ring attention, Liu et al., arXiv 2310.01889; for decoding, Helix parallelism, arXiv 2507.07120).

For a shard each query token is a request of its own with one query token, whose length counts only the keys of that
shard. In a step of single tokens these are all keys. If a request has more tokens, their own keys are attended to
apart, in a small cache that holds a step, and the shards' keys are those of the steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, evolve, frozen

from slotline.kernels.async_copy import to_device
from slotline.kernels.device_scope import device_scope
from slotline.registry.contracts import AttentionBackend, AttentionBatch, AttentionLayer, KVCache

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class Shard:
    """Part of the keys on one device, with the attention backend for it."""

    backend: AttentionBackend
    device: str


@frozen(eq=False)
class ShardedPlan:
    """Plan of one step.

    Attributes:
        parts: each shard's plan.
        has_keys: of each shard, [num_tokens] bool on the device, the tokens that see a key there. None if no token
            does.
        fresh: the plan of the step's own keys. None if every request has one token.
    """

    parts: list[Any]
    has_keys: list[torch.Tensor | None]
    fresh: Any


class ShardedCache(NamedTuple):
    """Cache of one layer over shards. `key` and `value` are those of the first shard, as in `KVCache`."""

    key: torch.Tensor
    value: torch.Tensor
    shards: tuple[KVCache, ...]


def local_lens(num_keys: Int, shard: int, num_shards: int, size: int) -> Int:
    """Count the first `num_keys` tokens [n] that a shard holds, which has every `num_shards`-th piece of `size`."""
    rounds, rest = np.divmod(num_keys, num_shards * size)
    lens: Int = rounds * size + np.clip(rest - shard * size, 0, size)
    return lens


@define(eq=False)
class ContextShards:
    """Backend of an attention group whose cache is sharded. Implements `AttentionBackend`.

    Attributes:
        shards: in the order in which they hold kernel blocks.
        own: attends to a step's own keys, in `scratch`.
        device: of queries and outputs.
        size: tokens of a kernel block.
        base: of the backends' LSE.
        writes_cache: whether the backends store keys inside `forward`.
    """

    shards: Sequence[Shard]
    own: AttentionBackend
    scratch: KVCache
    device: str
    size: int
    base: str
    writes_cache: bool

    def plan(self, batch: AttentionBatch) -> ShardedPlan:
        """Plan all shards, and the step's own keys."""
        step = StepTokens.of(batch)
        parts: list[Any] = []
        has_keys: list[torch.Tensor | None] = []
        for index, shard in enumerate(self.shards):
            local = local_lens(step.seen, index, len(self.shards), self.size)
            with device_scope(shard.device):
                own = of_shard(batch, index, len(self.shards), self.size, shard.device, step.request, local)
                parts.append(shard.backend.plan(own))
            has_keys.append(to_device(local > 0, torch.device(self.device)) if local.any() else None)
        fresh = self.own.plan(of_step(batch, step, self.size)) if step.several else None
        return ShardedPlan(parts, has_keys, fresh)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: Any, plan: Any) -> None:
        """Store the new keys, each in its shard. `cache` is a `ShardedCache`."""
        for index, shard in enumerate(self.shards):
            own = cache.shards[index]
            with device_scope(shard.device):
                shard.backend.write(layer, key.to(shard.device), value.to(shard.device), own, plan.parts[index])

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: Any,  # ShardedCache
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention over all shards' keys and the step's own, merged.

        Returns its natural LSE [num_heads, num_tokens].
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        if plan.fresh is not None:
            found.append(own_keys(self, layer, query, key, value, plan.fresh, out, sinks))
            sinks = None  # it counts once, with keys that every token has
        for index, shard in enumerate(self.shards):
            has_keys, where = plan.has_keys[index], shard.device
            if has_keys is None and not self.writes_cache:
                continue
            tensors = [tensor.to(where) for tensor in (query, key, value)]
            part = torch.empty_like(out, device=where)
            beside = sinks if index == 0 or sinks is None else None  # the first shard has every request's first key
            with device_scope(where):
                lse = lse_of(
                    shard.backend,
                    self.base,
                    layer,
                    *tensors,
                    cache.shards[index],
                    plan.parts[index],
                    part,
                    None if beside is None else beside.to(where),
                )
            if has_keys is not None:
                part, lse = part.to(self.device), lse.to(self.device)
                found.append((part.where(has_keys[:, None, None], 0), lse.where(has_keys, -torch.inf)))
        return merge(found, out)


@frozen(eq=False)
class StepTokens:
    """Tokens of a step.

    Attributes:
        starts: [num_requests + 1], where each request's tokens begin.
        lens: [num_requests], tokens of each.
        request: [num_tokens], the request of each token.
        seen: [num_tokens], keys that each token sees in the caches: all if every request has one token, else those of
            the steps before.
        several: whether a request has several tokens.
    """

    starts: Int
    lens: Int
    request: Int
    seen: Int
    several: bool

    @classmethod
    def of(cls, batch: AttentionBatch) -> StepTokens:
        """Return the tokens of a batch."""
        count = batch.num_requests
        starts = batch.query_start_loc_cpu[: count + 1].astype(np.int64)
        lens = np.diff(starts)
        before = batch.seq_lens_cpu[:count].astype(np.int64) - lens
        several = bool((lens > 1).any())
        of = np.repeat(np.arange(count), lens)
        return cls(starts, lens, of, np.maximum(before, 0)[of] if several else before[of] + 1, several)


def of_shard(
    batch: AttentionBatch, index: int, num_shards: int, size: int, device: str, of: Int, local: Int
) -> AttentionBatch:
    """Build the step as a shard sees it, with tokens as requests.

    Args:
        size: tokens of a kernel block.
        of: [num_tokens], the request of each token.
        local: [num_tokens], keys of the shard that each token sees.
    """
    count, where = len(of), torch.device(device)
    table = batch.block_table[:, index::num_shards] // num_shards  # the null block stays the null block
    if not table.shape[1]:  # no request is so long
        table = batch.block_table.new_zeros((len(batch.block_table), 1))
    slots = batch.slot_mapping[:count]
    block = slots // size
    mine = (slots >= 0) & (block % num_shards == index)
    slots = torch.where(mine, block // num_shards * size + slots % size, -1)
    lens, starts = local.astype(np.int32), np.arange(count + 1, dtype=np.int32)
    return AttentionBatch(
        num_requests=count,
        num_tokens=count,
        max_query_len=1,
        max_seq_len=max(1, int(local.max(initial=0))),
        query_start_loc=to_device(starts, where),
        seq_lens=to_device(lens, where),
        block_table=table[to_device(of, table.device)].contiguous().to(where),
        slot_mapping=slots.to(where),
        positions=batch.positions[:count].to(where),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=count,
    )


def of_step(batch: AttentionBatch, step: StepTokens, size: int) -> AttentionBatch:
    """Build the batch of only the step's own keys: request after request in the blocks of the scratch cache."""
    blocks = -(-step.lens // size)
    first = 1 + np.cumsum(blocks) - blocks  # after the null block
    columns = np.arange(max(1, int(blocks.max(initial=0))))
    table = np.where(columns < blocks[:, None], first[:, None] + columns, 0).astype(np.int32)
    slots = first[step.request] * size + np.arange(len(step.request)) - step.starts[step.request]
    where, own = batch.seq_lens.device, step.lens.astype(np.int32)
    return evolve(
        batch,
        max_seq_len=int(step.lens.max(initial=1)),
        seq_lens=to_device(own, where),
        block_table=to_device(table, where),
        slot_mapping=to_device(slots, where),
        seq_lens_cpu=own,
    )


class HasOwnKeys(Protocol):
    """Backend over shards that attends to a step's own keys apart. `ContextShards` says what its parts are."""

    own: AttentionBackend
    scratch: KVCache
    base: str
    writes_cache: bool


def own_keys(
    shards: HasOwnKeys,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: Any,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to a step's own keys, as `out`, and its natural LSE [num_heads, num_tokens]."""
    if not shards.writes_cache:
        shards.own.write(layer, key, value, shards.scratch, plan)
    part = torch.empty_like(out)
    return part, lse_of(shards.own, shards.base, layer, query, key, value, shards.scratch, plan, part, sinks)


def lse_of(backend: AttentionBackend, base: str, *arguments: Any) -> torch.Tensor:
    """Run a backend's forward pass and return its LSE, which is in `base`, in base e."""
    lse = backend.forward(*arguments)
    assert lse is not None  # it declares one, or negotiation would have refused it
    return lse if base == "e" else lse * float(np.log(2))


def merge(found: Sequence[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> torch.Tensor:
    """Join outputs [T, H, D] by their natural LSEs [H, T] into `out`. Return the LSE of all."""
    whole = torch.stack([lse for _, lse in found]).logsumexp(0) if found else out.new_zeros(0)
    total = torch.zeros_like(out, dtype=torch.float32)
    for part, lse in found:
        weight = torch.where(lse == -torch.inf, 0.0, (lse - whole).exp())  # [H, T]
        total += weight.T[..., None] * part.float()
    out.copy_(total)
    return whole
