"""Long queries on a CPU: the request's keys are gathered once, and PyTorch's matrix products do the rest.

Prompts of up to `MAX_BLOCKED` tokens run as batched products over blocks of queries, each block with the keys that it
may see. Longer prompts, and those with a prefix or a window, use PyTorch's flash attention.

A KV head is a row of the flash kernel's batch and the query heads of its group are its heads, so keys and values are
shared by a stride of zero and never repeated in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slotline.backends import cache_codes
from slotline.backends.cpu import kernels
from slotline.registry.contracts.attention import AttentionBatch, AttentionLayer, LayerCache
from slotline.registry.contracts.cache_tensors import CacheTensors

MAX_MASKED_QUERY = 1024
"""Query tokens per call where a mask is needed: bounds the mask's memory."""


MAX_BLOCKED = 1024
"""Longest prompt for the blocked products: beyond it their scores leave the processor's cache and flash wins."""

QUERY_BLOCK = 48
"""Query tokens per block, the fastest of 24 to 128 for 512 tokens; see docs/decisions/cpu-attention.md."""


class Prefill(NamedTuple):
    """Query tokens `first_token .. + query_len` of one request, and the keys that they see.

    Attributes:
        blocks: [n] int64, the kernel blocks that hold the keys.
        skip, num_keys: the keys are `skip .. + num_keys` of those blocks' slots.
        mask: [query_len, num_keys] float32 to add to the scores. None for plain causal masking.
        complete: True if the keys are exactly this step's new tokens.
    """

    first_token: int
    query_len: int
    blocks: torch.Tensor
    skip: int
    num_keys: int
    mask: torch.Tensor | None
    complete: bool


def cut_prefills(batch: AttentionBatch, longer_than: int, window: int, block_size: int) -> list[Prefill]:
    """Return the requests of more than `longer_than` query tokens and without trees, as calls of flash attention.

    A window of 0 is none.
    """
    starts = batch.query_start_loc_cpu[: batch.num_requests + 1].tolist()
    prefills = []
    for request, length in enumerate(batch.seq_lens[: batch.num_requests].tolist()):
        first, end = starts[request], starts[request + 1]
        nodes = 0 if batch.tree is None else batch.tree.num_nodes[request]
        if end - first <= longer_than or not length or nodes:
            continue
        plain = length == end - first and (not window or window >= length)
        step = end - first if plain else MAX_MASKED_QUERY
        for at in range(first, end, step):
            stop = min(at + step, end)
            seen = length - (end - stop)
            prefills.append(_cut(batch, request, at, stop, seen, window, block_size, plain))
    return prefills


def _cut(
    batch: AttentionBatch, request: int, first: int, stop: int, seen: int, window: int, block_size: int, plain: bool
) -> Prefill:
    start = max(0, seen - (stop - first) + 1 - window) if window else 0
    first_block = start // block_size
    blocks = batch.block_table[request, first_block : -(-seen // block_size)].long()
    mask = None if plain else _mask(stop - first, seen - start, window)
    return Prefill(first, stop - first, blocks, start - first_block * block_size, seen - start, mask, plain)


def _mask(query_len: int, num_keys: int, window: int) -> torch.Tensor:
    """Return [query_len, num_keys] float32: 0 if a query sees a key, else -inf. The last query is the last key."""
    mask = torch.full((query_len, num_keys), -torch.inf).triu_(num_keys - query_len + 1)
    if window:
        mask += torch.full_like(mask, -torch.inf).tril_(num_keys - query_len - window)
    return mask


def run_prefill(
    prefill: Prefill,
    layer: AttentionLayer,
    query: torch.Tensor,
    fresh: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Fill the prefill's rows of out [tokens, H, D] and lse [H, tokens]. `fresh` holds the keys if they are all new."""
    rows = slice(prefill.first_token, prefill.first_token + prefill.query_len)
    if fresh is None:
        keys, values = (part.to(query.dtype) for part in _stored(layer, cache, prefill))
    else:
        keys, values = fresh[0][rows], fresh[1][rows]  # [L, Hkv, D]
    group = layer.num_heads // layer.num_kv_heads
    heads = query[rows].view(-1, layer.num_kv_heads, group, layer.head_size).permute(1, 2, 0, 3)  # [Hkv, G, q, D]
    keys, values = (t.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1) for t in (keys, values))  # [Hkv, G, L, D]
    if prefill.complete and prefill.query_len <= MAX_BLOCKED:
        _blocked(heads, keys[:, 0], values[:, 0], layer.scale, out[rows], lse[:, rows], sinks)
        return
    result, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        heads, keys, values, 0.0, prefill.mask is None, attn_mask=prefill.mask, scale=layer.scale
    )  # [Hkv, G, q, D], [Hkv, G, q]
    result, norm = result.flatten(0, 1).transpose(0, 1), norm.flatten(0, 1)
    if sinks is not None:
        # A sink is one more key without value: it takes exp(sink) of the sum under the softmax.
        logits = sinks.float().unsqueeze(1)  # [H, 1]
        result = result * torch.sigmoid(norm - logits).T.unsqueeze(2)
        norm = torch.logaddexp(norm, logits)
    out[rows] = result.to(out.dtype)
    lse[:, rows] = norm


def _blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Compute causal attention of a whole prompt: query [Hkv, G, L, D], key and value [Hkv, L, D].

    Scores and softmax are float32 for every dtype. Weights are rounded to the value's dtype. Fills out [L, H, D] and
    the natural log-sum-exp lse [H, L] float32.
    """
    kv_heads, group, length, _ = query.shape
    query = query.float() * scale
    keys = key.float().transpose(1, 2)  # [Hkv, D, L]
    block_rows = kv_heads * group * min(length, QUERY_BLOCK)
    room = torch.empty(block_rows * length, dtype=torch.float32)
    weights_room = room if value.dtype == torch.float32 else value.new_empty(block_rows * length)
    logits = kernels.NO_SINKS if sinks is None else sinks.detach().float().numpy()
    for first in range(0, length, QUERY_BLOCK):
        end = min(length, first + QUERY_BLOCK)
        size = end - first
        rows = kv_heads * group * size
        block = query[:, :, first:end].reshape(kv_heads, group * size, -1)
        scores = room[: rows * end].view(kv_heads, group * size, end)
        weights = weights_room[: rows * end].view(scores.shape)
        torch.bmm(block, keys[:, :, :end], out=scores)
        kernels.soften(
            scores.data_ptr(),
            weights.data_ptr(),
            (lse.data_ptr(), kernels.TAGS[torch.float32]),
            (rows, end, first, size, lse.stride(0), first),
            logits,
            kernels.TAGS[value.dtype],
        )
        mixed = torch.bmm(weights, value[:, :end])  # [Hkv, G * size, D]
        out[first:end].view(size, kv_heads, group, -1).copy_(mixed.view(kv_heads, group, size, -1).permute(2, 0, 1, 3))


def _stored(layer: AttentionLayer, cache: LayerCache, prefill: Prefill) -> list[torch.Tensor]:
    """Return the keys and values of a prefill as the cache holds them, codes multiplied by their scales."""
    if not isinstance(cache, CacheTensors):
        return [_gather(part, prefill) for part in cache]
    parts = {name: _gather(part, prefill) for name, part in cache.items()}
    sizes = {"key": layer.head_size, "value": layer.head_size_v}
    return [cache_codes.restore(parts[name], parts[f"{name}_scale"], size) for name, size in sizes.items()]


def _gather(part: torch.Tensor, prefill: Prefill) -> torch.Tensor:
    """Gather the keys or values of a prefill from the cache: [num_keys, Hkv, D]."""
    found = cache_codes.raw(part).index_select(0, prefill.blocks).view(part.dtype).flatten(0, 1)
    return found[prefill.skip : prefill.skip + prefill.num_keys]
