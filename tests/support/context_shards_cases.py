"""One layer's attention over shards of a cache, beside that of the same backend over the whole cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import evolve

from slotline.plugins.context_shards.attention import ContextShards, Shard, ShardedCache
from slotline.plugins.context_shards.ranks import RankShards, StepMemory
from slotline.plugins.model_families.tensor_parallel import threads
from slotline.registry.contracts import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

SIZE = 16
DECODES: list[tuple[int, int]] = [(1, 1), (1, 16), (1, 17), (1, 33), (1, 100), (1, 49)]
"""Query tokens and keys of each request; a shard has no key of the first ones."""
MIXED: list[tuple[int, int]] = [(1, 40), (1, 1), (5, 5), (20, 70), (33, 33), (2, 18)]


def compare(
    backend: str, device: str, dtype: torch.dtype, requests: list[tuple[int, int]], num_shards: int, *, sinks: bool
) -> tuple[float, float]:
    """The largest difference of the outputs, which are of the order of 1, and of the natural LSEs."""
    torch.manual_seed(0)
    descriptor = PluginRegistry.discover().load(Kind.ATTENTION, backend, required=True)
    offer = descriptor.capabilities
    layer = _layer(4, 2, sinks=sinks)
    size = SIZE if offer.kernel_block_sizes.refusal(SIZE) is None else 256
    lens = np.array([query for query, _ in requests])
    keys = np.array([total for _, total in requests])
    columns = -(-int(keys.max()) // (size * num_shards)) * num_shards
    num_blocks = len(requests) * columns // num_shards + 1
    context = _context(layer, device, dtype, size, num_shards, offer.layouts.options[0])
    build: Any = resolve_factory(descriptor)
    whole, (query, key, value) = _cache(context, num_blocks * num_shards), torch.randn(3, lens.sum(), 4, 64).unbind()
    query, key, value = (part.to(device, dtype) for part in (query, key[:, :2], value[:, :2]))
    logits = torch.randn(4, device=device).to(dtype) if sinks else None
    batch = _batch(lens, keys, columns, num_blocks, num_shards, size, device)
    each = evolve(context, block_size=size, max_requests=128, max_query_len=1)
    shards = [Shard(build(each), device) for _ in range(num_shards)]
    parts = [_cache(context, num_blocks) for _ in shards]
    for index, part in enumerate(parts):
        for mine, all_of_it in zip(part, whole, strict=True):
            mine.copy_(all_of_it[index::num_shards])
    sharded = ContextShards(
        shards,
        build(context),
        _cache(context, 24 if size == SIZE else 8),
        device,
        size,
        offer.lse_base,
        offer.writes_cache,
    )
    divided: Any = ShardedCache(*parts[0], tuple(parts))
    found = []
    for one, cache in ((build(context), whole), (sharded, divided)):
        plan, out = one.plan(batch), torch.empty_like(query)
        if not offer.writes_cache:
            one.write(layer, key, value, cache, plan)
        lse = one.forward(layer, query, key, value, cache, plan, out, logits)
        found.append((out.float(), lse * (1.0 if one is sharded or offer.lse_base == "e" else float(np.log(2)))))
    (want, want_lse), (got, got_lse) = found
    return float((want - got).abs().max()), float((want_lse - got_lse).abs().max())


def compare_ranks(
    backend: str, requests: list[tuple[int, int]], num_ranks: int, *, sinks: bool
) -> list[tuple[float, float]]:
    """The largest differences of output and natural LSE, for the two heads that each rank has of a layer with one KV
    head. The ranks are threads."""
    torch.manual_seed(0)
    descriptor = PluginRegistry.discover().load(Kind.ATTENTION, backend, required=True)
    offer, build = descriptor.capabilities, resolve_factory(descriptor)
    lens = np.array([query for query, _ in requests])
    keys = np.array([total for _, total in requests])
    columns = -(-int(keys.max()) // (SIZE * num_ranks)) * num_ranks
    num_blocks = len(requests) * columns // num_ranks + 1
    one = _context(_layer(2, 1, sinks=sinks), "cpu", torch.float32, SIZE, num_ranks, offer.layouts.options[0])
    all_heads = evolve(one, layers=(_layer(2 * num_ranks, 1, sinks=sinks),))
    whole = _cache(one, num_blocks * num_ranks)
    query = torch.randn(lens.sum(), 2 * num_ranks, 64)
    key, value = torch.randn(2, lens.sum(), 1, 64).unbind()
    logits = torch.randn(2 * num_ranks) if sinks else None
    batch = _batch(lens, keys, columns, num_blocks, num_ranks, SIZE, "cpu")
    parts = [KVCache(*(part[rank::num_ranks].clone() for part in whole)) for rank in range(num_ranks)]

    def attend(backend: Any, layer: AttentionLayer, cache: KVCache, heads: slice) -> tuple[Any, Any]:
        plan, out = backend.plan(batch), torch.empty_like(query[:, heads])
        if not offer.writes_cache:
            backend.write(layer, key, value, cache, plan)
        own = None if logits is None else logits[heads]
        return out, backend.forward(layer, query[:, heads].contiguous(), key, value, cache, plan, out, own)

    def rank_shards(group: Any) -> tuple[Any, Any]:
        shard = build(evolve(all_heads, block_size=SIZE, max_requests=128, max_query_len=1))
        scratch = _cache(one, 24)
        memory = StepMemory.of(len(requests), columns // num_ranks, "cpu")
        ranked = RankShards(group, shard, build(one), scratch, "cpu", SIZE, offer.lse_base, offer.writes_cache, memory)
        return attend(ranked, one.layers[0], parts[group.rank], slice(2 * group.rank, 2 * group.rank + 2))

    want, want_lse = attend(build(all_heads), all_heads.layers[0], whole, slice(None))
    want_lse = want_lse * (1.0 if offer.lse_base == "e" else float(np.log(2)))
    return [
        (
            float((out - want[:, 2 * rank : 2 * rank + 2]).abs().max()),
            float((lse - want_lse[2 * rank : 2 * rank + 2]).abs().max()),
        )
        for rank, (out, lse) in enumerate(_at_once(num_ranks, rank_shards))
    ]


def _at_once(size: int, run: Callable[[Any], Any]) -> list[Any]:
    """What a function returns on each rank."""
    return threads.run(size, lambda _shard, ranks: run(ranks))


def _layer(num_heads: int, num_kv_heads: int, *, sinks: bool) -> AttentionLayer:
    return AttentionLayer(
        name="one",
        index=0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=64,
        head_size_v=64,
        scale=0.125,
        sinks=sinks,
    )


def _context(
    layer: AttentionLayer, device: str, dtype: torch.dtype, size: int, num_shards: int, layout: str
) -> AttentionContext:
    return AttentionContext(
        contract=1,
        layers=(layer,),
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(dtype).removeprefix("torch."),
        block_size=size * num_shards,
        kernel_block_size=size,
        layout=layout,
        max_query_len=64,
        max_requests=8,
        max_tokens=128,
        max_model_len=1024,
    )


def _cache(context: AttentionContext, num_blocks: int) -> KVCache:
    """A cache of random keys, in the physical order that was negotiated."""
    by_head, heads = context.layout == "HND", context.layers[0].num_kv_heads
    inner = (heads, context.kernel_block_size) if by_head else (context.kernel_block_size, heads)
    memory = torch.randn(num_blocks, 2, *inner, 64).to(context.device, getattr(torch, context.dtype))
    keys, values = (part.transpose(1, 2) if by_head else part for part in memory.unbind(1))
    return KVCache(keys, values)


def _batch(
    lens: np.ndarray, keys: np.ndarray, columns: int, num_blocks: int, num_shards: int, size: int, device: str
) -> AttentionBatch:
    """Requests in blocks of the pool in random order, each of which is `num_shards` kernel blocks."""
    order = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).reshape(len(lens), -1)
    table = (order[:, :, None] * num_shards + np.arange(num_shards)).reshape(len(lens), columns).astype(np.int32)
    starts = np.append(0, np.cumsum(lens))
    of = np.repeat(np.arange(len(lens)), lens)
    positions = (keys - lens)[of] + np.arange(lens.sum()) - starts[of]
    slots = table[of, positions // size].astype(np.int64) * size + positions % size

    def sent(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return AttentionBatch(
        num_requests=len(lens),
        num_tokens=int(lens.sum()),
        max_query_len=int(lens.max()),
        max_seq_len=int(keys.max()),
        query_start_loc=sent(starts.astype(np.int32)),
        seq_lens=sent(keys.astype(np.int32)),
        block_table=sent(table),
        slot_mapping=sent(slots),
        positions=sent(positions),
        query_start_loc_cpu=starts.astype(np.int32),
        seq_lens_cpu=keys.astype(np.int32),
        num_decodes=int((np.cumprod(lens == 1)).sum()),
    )
