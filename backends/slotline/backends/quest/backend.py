"""Attention that leaves out blocks of keys which cannot matter much (Quest, arXiv 2406.10774, in torch).

Each kernel block has the smallest and the largest number of its keys in each element. They bound the score of a query
with any key of the block. A token of a decode reads the blocks with the largest bounds, each KV head its own. Prompts
and chunks read all keys, as the backend `torch` does, which this one derives from.

A block counts as one of the largest by the largest bound over the query heads of its KV head. The first block, which
often holds an attention sink, and the newest one are always read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slotline.backends.torch_sdpa.backend import MAX_SHARED_QUERY, Piece, Plan, TorchBackend
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.contracts.cache_tensors import KEY_BOUNDS, CacheTensors

MOST_ELEMENTS = 1 << 24
"""Bound on the elements of keys that are gathered at once."""


class Rows(NamedTuple):
    """Query tokens of requests with more blocks than a token reads.

    Attributes:
        tokens: [R] int64, rows of the query.
        lengths: [R] int64, keys that each sees.
        blocks: [R, n] int64, kernel blocks of each token's request. Those past the newest have no meaning.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor


class QuestPlan(NamedTuple):
    """Plan of one step: tokens that read all keys, tokens that choose blocks, and what is written.

    Attributes:
        dense: as of the backend `torch`.
        rows: the tokens that choose, None for none.
        written: [w] int64, kernel blocks that the step writes to.
        last: [w] int64, offset of the last slot that it writes in each.
    """

    dense: Plan
    rows: Rows | None
    written: torch.Tensor
    last: torch.Tensor


class QuestBackend:
    """Attention over chosen blocks. Implements `AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        self._top = context.max_model_len if context.exact else context.options.top_blocks
        self._block_size = context.kernel_block_size
        self._dense = _Dense(context, self._top * self._block_size)

    def plan(self, batch: AttentionBatch) -> QuestPlan:
        dense = self._dense.plan(batch)
        written, inverse = dense.blocks.unique(return_inverse=True)
        last = torch.zeros_like(written).scatter_reduce_(0, inverse, dense.offsets, "amax")
        return QuestPlan(dense, self._rows(batch), written, last)

    def _rows(self, batch: AttentionBatch) -> Rows | None:
        requests = np.flatnonzero(self._dense.choosing(batch))
        if not len(requests):
            return None
        counts = np.diff(batch.query_start_loc_cpu[: batch.num_requests + 1])[requests]
        ends, number = batch.seq_lens_cpu[requests], np.concatenate([np.arange(count) for count in counts])
        tokens = number + np.repeat(batch.query_start_loc_cpu[requests], counts)
        lengths = number + np.repeat(ends - counts + 1, counts)
        rows = torch.from_numpy(np.stack([tokens, lengths, np.repeat(requests, counts)]).astype(np.int64))
        tokens_, lengths_, requests_ = rows.to(batch.block_table.device)
        num_blocks = -(-int(ends.max()) // self._block_size)
        return Rows(tokens_, lengths_, batch.block_table[requests_, :num_blocks].long())

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: CacheTensors, plan: QuestPlan
    ) -> None:
        self._dense.write(layer, key, value, KVCache(cache.key, cache.value), plan.dense)
        if plan.written.numel():
            cache[KEY_BOUNDS][plan.written] = bounds_of(cache.key[plan.written], plan.last)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: QuestPlan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._dense.forward(layer, query, key, value, KVCache(cache.key, cache.value), plan.dense, out, sinks)
        if plan.rows is None:
            return
        each = layer.num_kv_heads * self._top * self._block_size * max(layer.head_size, layer.head_size_v)
        for rows in zip(*(part.split(max(1, MOST_ELEMENTS // each)) for part in plan.rows), strict=True):
            own = Rows(*rows)
            out[own.tokens] = self._attend(layer, query[own.tokens].float(), cache, own, sinks).to(out.dtype)

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: CacheTensors,
        rows: Rows,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of query [R, H, D] float32 over the blocks that each row chooses: [R, H, Dv] float32."""
        query = query.unflatten(1, (layer.num_kv_heads, -1)) * layer.scale  # [R, Hkv, G, D]
        newest = (rows.lengths - 1) // self._block_size
        chosen = choose_blocks(query, cache[KEY_BOUNDS][rows.blocks].float(), newest, self._top)  # [R, Hkv, k]
        position = chosen.unsqueeze(3) * self._block_size + torch.arange(self._block_size, device=chosen.device)
        position = position.flatten(2)  # [R, Hkv, L]
        ends = rows.lengths[:, None, None]
        seen, position = position < ends, torch.minimum(position, ends - 1)
        columns = position // self._block_size
        blocks = rows.blocks[:, None].expand(-1, columns.shape[1], -1).gather(2, columns)
        place = (blocks, position % self._block_size, torch.arange(layer.num_kv_heads, device=blocks.device)[:, None])
        scores = query @ cache.key[place].float().transpose(2, 3)  # [R, Hkv, G, L]
        if layer.soft_cap is not None:
            scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
        scores = scores.masked_fill_(~seen.unsqueeze(2), -torch.inf)
        if sinks is None:
            weights = scores.softmax(3)
        else:
            sink = sinks.float().view(1, layer.num_kv_heads, -1, 1).expand(len(scores), -1, -1, -1)
            weights = torch.cat([scores, sink], 3).softmax(3)[..., :-1]
        return (weights @ cache.value[place].float()).flatten(1, 2)


class _Dense(TorchBackend):
    """The backend `torch` for all tokens but those that choose among blocks."""

    def __init__(self, context: AttentionContext, most_keys: int) -> None:
        super().__init__(context)
        self._most_keys = most_keys

    def choosing(self, batch: AttentionBatch) -> npt.NDArray[np.bool_]:
        """Return, as [num_requests], which have more keys than a token reads, and as few new tokens as decodes."""
        num_new = np.diff(batch.query_start_loc_cpu[: batch.num_requests + 1])
        long = batch.seq_lens_cpu[: batch.num_requests] > self._most_keys
        found: npt.NDArray[np.bool_] = long & (num_new > 0) & (num_new <= MAX_SHARED_QUERY)
        return found

    def _pieces(self, batch: AttentionBatch) -> list[Piece]:
        chooses = self.choosing(batch)
        return [piece for piece in super()._pieces(batch) if not chooses[piece.request]]


def bounds_of(keys: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the bounds of blocks of keys: [n, 2, Hkv, D], the smallest numbers and then the largest.

    Args:
        keys: [n, block_size, Hkv, D].
        last: [n] int64, offset of the last slot of each block that counts.
    """
    width = int(last.max()) + 1
    counts = (torch.arange(width, device=last.device) <= last.unsqueeze(1))[:, :, None, None]
    keys = keys[:, :width]
    lowest, highest = keys.masked_fill(~counts, torch.inf), keys.masked_fill(~counts, -torch.inf)
    return torch.stack([lowest.amin(1), highest.amax(1)], 1)


def upper_bounds(query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the largest product that each query can have with a key of each block: [R, Hkv, G, n].

    Args:
        query: [R, Hkv, G, D] float32.
        bounds: [R, n, 2, Hkv, D] float32.
    """
    lowest, highest = bounds.permute(2, 0, 3, 4, 1)  # [R, Hkv, D, n] each
    best: torch.Tensor = query.clamp_min(0) @ highest + query.clamp_max(0) @ lowest
    return best


def choose_blocks(query: torch.Tensor, bounds: torch.Tensor, newest: torch.Tensor, count: int) -> torch.Tensor:
    """Return the blocks that each row and KV head reads, in ascending order: [R, Hkv, min(count, n)] int64.

    Block 0 and the newest are among them. A row with fewer blocks gets some past its newest besides.

    Args:
        query: [R, Hkv, G, D] float32, times the scale of scores.
        bounds: [R, n, 2, Hkv, D] float32. Those past the newest block may be anything.
        newest: [R] int64, a row's last block.
        count: blocks to choose, at least 2.
    """
    best = upper_bounds(query, bounds).amax(2)  # [R, Hkv, n]
    number = torch.arange(best.shape[2], device=best.device)
    newest = newest[:, None, None]
    best = torch.where(number > newest, -torch.inf, best)
    best = torch.where((number == 0) | (number == newest), torch.inf, best)
    return best.topk(min(count, best.shape[2]), dim=2).indices.sort(2).values
