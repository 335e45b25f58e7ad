"""How much the last tokens of a request attend to each of its keys, in plain torch."""

from __future__ import annotations

import torch

from slotline.backends import cache_codes
from slotline.registry.contracts.attention import AttentionLayer, KVScales, LayerCache
from slotline.registry.contracts.cache_tensors import CacheTensors


def window_scores(
    layer: AttentionLayer,
    query: torch.Tensor,
    cache: LayerCache,
    blocks: torch.Tensor,
    num_keys: int,
    sinks: torch.Tensor | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Return the mean probability of each key. See `slotline.registry.contracts.attention.ScoringBackend`.

    Args:
        layer, query, cache, blocks, num_keys, sinks: as there. The layer has no bias by distance.
        scales: of an eight-bit cache, None for none.
    """
    keys = _keys(cache, blocks, layer.head_size)[:num_keys].float()  # [num_keys, num_kv_heads, head_size]
    keys = keys if scales is None else keys * scales.key
    length, heads = query.shape[:2]
    rows = query.float().view(length, layer.num_kv_heads, heads // layer.num_kv_heads, -1).permute(1, 2, 0, 3)
    scores = torch.matmul(rows.flatten(1, 2), keys.permute(1, 2, 0)).mul_(layer.scale)
    scores = scores.view(layer.num_kv_heads, -1, length, num_keys)  # [num_kv_heads, group, w, num_keys]
    if layer.soft_cap is not None:
        scores = torch.tanh(scores.div_(layer.soft_cap)).mul_(layer.soft_cap)
    places = torch.arange(num_keys, device=keys.device)
    last = num_keys - length + torch.arange(length, device=keys.device)[:, None]  # the key at the query's own place
    hidden = places > last
    if layer.window is not None:
        hidden |= places <= last - layer.window
    scores = scores.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(layer.num_kv_heads, -1, 1, 1))
    return torch.exp(scores.sub_(lse)).mean((1, 2)).T


def _keys(cache: LayerCache, blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the keys of blocks, one after the other: [tokens, num_kv_heads, head_size]."""
    if isinstance(cache, CacheTensors):
        codes = cache_codes.raw(cache["key"])[blocks].view(cache["key"].dtype)
        return cache_codes.restore(codes, cache["key_scale"][blocks], size).flatten(0, 1)
    stored = cache.key
    raw = stored.view(torch.uint8) if stored.element_size() == 1 else stored
    return raw[blocks].view(stored.dtype).flatten(0, 1)
