"""Paged attention in plain PyTorch.

A step is cut into *groups*: pieces of requests with equally many query tokens and keys of similar number. A group is
gathered, computed with two matrix products in float32, and scattered. Nothing loops over tokens, and no slot
beyond a request's length is ever read, so garbage there cannot leak.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache

MAX_QUERY_ROWS = 512
"""Query tokens of one request handled at once: bounds the memory of the scores."""
MAX_SHARED_QUERY = 16
"""Longest query that shares a group with other requests (decode, verification of drafts)."""


class Piece(NamedTuple):
    """Query tokens `first_token .. + query_len` of one request, the last one at position `num_keys - 1` if causal."""

    query_len: int
    num_keys: int
    request: int
    first_token: int


class Group(NamedTuple):
    """Pieces computed together; B of them, q query tokens each, L keys at most.

    Attributes:
        tokens: [B, q] int64, rows of the query.
        blocks, offsets: [B, L] int64, where the keys lie; beyond what a piece sees, its first or last key again.
        mask: by window, [B, 1, 1, q, L] bool, True where a query sees a key.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    mask: dict[int | None, torch.Tensor]


class Plan(NamedTuple):
    """One step. `rows` are the new tokens to store (None for all), `blocks` and `offsets` where they go, int64."""

    num_tokens: int
    rows: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    groups: list[Group]


class TorchBackend:
    """Attention by gather and matrix product. Implements `AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        self._block_size = context.kernel_block_size
        self._windows = {layer.window for layer in context.layers}
        # Encoders keep nothing: their keys are this step's own tokens.
        self._encoder = context.layers[0].attention_type == "encoder_only"

    def plan(self, batch: AttentionBatch) -> Plan:
        slots = batch.slot_mapping[: batch.num_tokens]
        rows = (slots >= 0).nonzero().squeeze(1) if bool((slots < 0).any()) else None
        slots = slots if rows is None else slots[rows]
        pieces = sorted(self._pieces(batch), key=_likeness)
        groups: list[Group] = []
        for (query_len, _), members in groupby(pieces, _likeness):
            step = len(pieces) if query_len <= MAX_SHARED_QUERY else 1
            same = list(members)
            groups += [self._group(batch, same[i : i + step]) for i in range(0, len(same), step)]
        blocks = slots // self._block_size
        return Plan(batch.num_tokens, rows, blocks, slots - blocks * self._block_size, groups)

    def _pieces(self, batch: AttentionBatch) -> list[Piece]:
        starts = batch.query_start_loc_cpu[: batch.num_requests + 1].tolist()
        lens = np.diff(starts) if self._encoder else batch.seq_lens_cpu[: batch.num_requests]
        pieces = []
        for request, num_keys in enumerate(np.asarray(lens).tolist()):
            end = starts[request + 1]
            for first in range(starts[request], end if num_keys else starts[request], MAX_QUERY_ROWS):
                last = min(first + MAX_QUERY_ROWS, end)
                seen = num_keys - (end - last) if batch.causal else num_keys
                pieces.append(Piece(last - first, seen, request, first))
        return pieces

    def _group(self, batch: AttentionBatch, pieces: list[Piece]) -> Group:
        device = batch.block_table.device
        columns = torch.tensor(pieces, device=device).T.unsqueeze(2)  # [4, B, 1]
        num_keys, request, first = columns[1], columns[2], columns[3]  # [B, 1] each
        query = torch.arange(pieces[0].query_len, device=device)  # [q]
        keys = torch.arange(max(p.num_keys for p in pieces), device=device)  # [L]
        last_seen = num_keys - pieces[0].query_len + query if batch.causal else num_keys - 1 + 0 * query  # [B, q]
        position = torch.minimum(keys, num_keys - 1)  # [B, L], never past the last key
        if None not in self._windows:  # nor before the first one, where blocks may have been freed
            position = torch.maximum(position, last_seen[:, :1] - max(filter(None, self._windows)) + 1)
        tokens = first + query
        if self._encoder:
            start = batch.query_start_loc[request].long()  # [B, 1]
            blocks, offsets = start + position, position
        else:
            blocks = batch.block_table[request, position // self._block_size].long()
            offsets = position % self._block_size
        visible = {window: _visible(keys, last_seen, window) for window in self._windows}
        return Group(tokens, blocks, offsets, visible)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if self._encoder or not plan.blocks.numel():
            return
        for new, stored in ((key, cache.key), (value, cache.value)):
            rows = new[: plan.num_tokens] if plan.rows is None else new[plan.rows]
            stored[plan.blocks, plan.offsets] = rows.to(stored.dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lse = torch.full((layer.num_heads, query.shape[0]), -torch.inf, device=query.device)
        if sum(group.tokens.numel() for group in plan.groups) != out.shape[0]:
            out.zero_()  # padding, and requests that have no key at all
        for group in plan.groups:
            if self._encoder:
                keys, values = key[group.blocks], value[group.blocks]
            else:
                keys, values = cache.key[group.blocks, group.offsets], cache.value[group.blocks, group.offsets]
            result, group_lse = _attend(layer, query[group.tokens], keys, values, group.mask[layer.window], sinks)
            out[group.tokens] = result.to(out.dtype)
            lse[:, group.tokens] = group_lse
        return lse


def _likeness(piece: Piece) -> tuple[int, int]:
    """Pieces of equal likeness share a group: as many queries, and at most twice as many keys."""
    return piece.query_len, piece.num_keys.bit_length()


def _visible(keys: torch.Tensor, last_seen: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which of `keys` [L] a query whose last visible key is `last_seen` [B, q] sees: [B, 1, 1, q, L] bool."""
    last = last_seen[:, None, None, :, None]
    return keys <= last if window is None else (keys <= last) & (keys > last - window)


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [B, q, H, D] over keys [B, L, Hkv, D], values [B, L, Hkv, Dv], all in float32.

    Returns the output [B, q, H, Dv] and the natural log-sum-exp [H, B, q]. A sink is a key of that logit without value.
    """
    batch, length, heads, _ = query.shape
    groups = heads // layer.num_kv_heads
    # [B, Hkv, G * q, D] x [B, Hkv, D, L]
    rows = query.float().transpose(1, 2).reshape(batch, layer.num_kv_heads, groups * length, -1)
    scores = torch.matmul(rows, keys.float().permute(0, 2, 3, 1)).mul_(layer.scale)
    scores = scores.view(batch, layer.num_kv_heads, groups, length, -1)  # [B, Hkv, G, q, L]
    if layer.soft_cap is not None:
        scores = torch.tanh(scores.div_(layer.soft_cap)).mul_(layer.soft_cap)
    scores = scores.masked_fill_(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)  # [B, Hkv, G, q, 1]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, layer.num_kv_heads, groups, 1, 1))
    weights = torch.exp(scores.sub_(lse)).flatten(2, 3)  # [B, Hkv, G * q, L]
    result = torch.matmul(weights, values.float().transpose(1, 2))  # [B, Hkv, G * q, Dv]
    result = result.view(batch, heads, length, -1).transpose(1, 2)
    return result, lse.view(batch, heads, length).transpose(0, 1)
