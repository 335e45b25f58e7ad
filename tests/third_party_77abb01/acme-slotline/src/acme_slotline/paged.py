"""Attention over pages of 48 tokens: whole pages are gathered for the whole batch, padded to its longest request."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slotline.registry.contracts import AttentionBatch, AttentionContext, AttentionLayer, KVCache

PAGE = 48


class Step(NamedTuple):
    """One step over the R requests that bring tokens, Q at most, and hold P pages at most.

    Attributes:
        new_tokens: [n] int64, the rows of the step that are stored.
        slots: [n] int64, where.
        rows: [R, Q] int64, query tokens by request; past a request's last they repeat it.
        inside: [R, Q] bool, which of them are real.
        pages: [R, P] int64; past a request's last page they repeat its first.
        visible: [R, Q, P * PAGE] bool, which keys a query sees.
        known: [R, P * PAGE] bool, which places of the pages hold a token of the request.
    """

    new_tokens: Tensor
    slots: Tensor
    rows: Tensor
    inside: Tensor
    pages: Tensor
    visible: Tensor
    known: Tensor


class PagedAttention:
    """All requests of a step in one batched product. Implements `slotline.registry.contracts.AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        assert context.kernel_block_size == PAGE
        assert context.layout == "HND"

    def plan(self, batch: AttentionBatch) -> Step:
        starts = torch.from_numpy(batch.query_start_loc_cpu[: batch.num_requests + 1]).long()
        query_lens = starts.diff()
        active = query_lens > 0
        query_lens, first = query_lens[active], starts[:-1][active]
        seq_lens = torch.from_numpy(batch.seq_lens_cpu[: batch.num_requests]).long()[active]
        longest_query = int(query_lens.max()) if len(query_lens) else 0
        num_pages = -(-int(seq_lens.max()) // PAGE) if len(seq_lens) else 0

        offset = torch.arange(longest_query)
        rows = first[:, None] + torch.minimum(offset, query_lens[:, None] - 1)
        table = batch.block_table[: batch.num_requests, :num_pages].long()[active]
        held = torch.arange(num_pages) * PAGE < seq_lens[:, None]
        at = torch.arange(num_pages * PAGE)
        own = (seq_lens - query_lens)[:, None] + offset  # [R, Q], the position of each query
        slots = batch.slot_mapping[: batch.num_tokens]
        stored = torch.nonzero(slots >= 0).flatten()
        return Step(
            new_tokens=stored,
            slots=slots[stored],
            rows=rows,
            inside=offset < query_lens[:, None],
            pages=torch.where(held, table, table[:, :1]),
            visible=at <= own[:, :, None],
            known=at < seq_lens[:, None],
        )

    def write(self, layer: AttentionLayer, key: Tensor, value: Tensor, cache: KVCache, plan: Step) -> None:
        page, offset = plan.slots // PAGE, plan.slots % PAGE
        for new, pages in ((key, cache.key), (value, cache.value)):
            pages.transpose(1, 2)[page, :, offset] = new[plan.new_tokens]  # heads first: [n, num_kv_heads, head_size]

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        plan: Step,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        out.zero_()
        if not plan.rows.numel():
            return
        keys, values = (self._gather(pages, plan) for pages in cache)  # [R, Hkv, K, D] float32
        heads = query[plan.rows].float()  # [R, Q, H, D]
        heads = heads.unflatten(2, (layer.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [R, Hkv, G, Q, D]
        scores = heads @ keys[:, :, None].transpose(-1, -2) * layer.scale  # [R, Hkv, G, Q, K]
        visible = plan.visible & plan.known[:, None]
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        result = (weights @ values[:, :, None]).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, Q, H, Dv]
        out[plan.rows[plan.inside]] = result[plan.inside].to(out.dtype)

    @staticmethod
    def _gather(pages: Tensor, plan: Step) -> Tensor:
        """Keys or values of each request; places without a token of it may hold anything, so they become zero."""
        found = pages.transpose(1, 2)[plan.pages].transpose(1, 2).flatten(2, 3).float()
        return found.masked_fill(~plan.known[:, None, :, None], 0)
