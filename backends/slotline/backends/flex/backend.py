"""FlexAttention as an attention backend (Dong et al. 2024, Flex Attention).

Pages of several requests are gathered into one long sequence, slots without an owner are zeroed, and a mask separates
requests. Query tokens of a step are in the order of the requests, like their pages. Each block of query tokens
therefore sees one range of blocks of keys, and the block mask takes only a few array operations. Requests are computed
some at a time, so that the gathered keys stay small compared with the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from slotline.backends.alibi import slopes_of
from slotline.backends.keys_ahead import through_torch
from slotline.backends.sinks import add_sinks
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache

BLOCK = 128
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""The kernel for short queries has no tile sizes that fit float32 with several query heads to one of keys."""
MOST_SLOTS = 65_536
"""Of the cache, gathered at a time; a request with more is served alone."""
MOST_COMPILED = 64
"""Variants of the kernel that dynamo may keep: shapes of layers, short and long batches."""
Int = npt.NDArray[np.int64]


class Keys(NamedTuple):
    """Keys of some requests, gathered page by page.

    Attributes:
        pages: [P] int64, indices into the cache, in the order of the requests.
        owner: [P * page] int64, the request that a slot belongs to, -1 for none.
        position: [P * page] int64, position in the owner's text.
        ends: [R] int64, the slot after each request's last page.
    """

    pages: torch.Tensor
    owner: Int
    position: Int
    ends: Int


class Part(NamedTuple):
    """Requests that are computed together.

    Attributes:
        tokens: [T] int64, their query tokens. None for all of the batch.
        pages: [P] int64, gathered pages in the order of their requests.
        owned: [P * page, 1, 1] bool, slots that hold a key of their request.
        mask: the mask of visible keys.
        score: the function of scores, None for none.
    """

    tokens: torch.Tensor | None
    pages: torch.Tensor
    owned: torch.Tensor
    mask: BlockMask
    score: Callable[..., torch.Tensor] | None


class Plan(NamedTuple):
    """Plan of one step.

    Attributes:
        num_tokens: tokens of the batch.
        rows: new tokens to store, None for all.
        blocks, offsets: their destinations, int64.
        complete: True if every token of the batch sees a key.
        parts: the requests that have query tokens and keys.
    """

    num_tokens: int
    rows: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    complete: bool
    parts: list[Part]


class FlexBackend:
    """FlexAttention, compiled on a GPU, the operator as it is on a CPU. Implements `AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        self._page, self._window = context.kernel_block_size, layer.window
        self._device = torch.device(context.device)
        self._score = _capped(layer.soft_cap) if layer.soft_cap else None
        self._slopes = slopes_of(context)
        compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
        self._attend = _fused(compiled) if self._device.type == "cuda" else _unfused

    def plan(self, batch: AttentionBatch) -> Plan:
        slots = batch.slot_mapping[: batch.num_tokens]
        rows = (slots >= 0).nonzero().squeeze(1) if bool((slots < 0).any()) else None
        slots = slots if rows is None else slots[rows]
        blocks = slots // self._page
        starts = batch.query_start_loc_cpu[: batch.num_requests + 1].astype(np.int64)
        counts, lens = np.diff(starts), batch.seq_lens_cpu[: batch.num_requests].astype(np.int64)
        requests = np.flatnonzero((counts > 0) & (lens > 0))  # those that read
        complete = int(counts[requests].sum()) == batch.num_tokens
        parts = [self._part(batch, starts, some, counts[some], lens[some]) for some in self._split(requests, lens)]
        if complete and len(parts) == 1:
            parts = [parts[0]._replace(tokens=None)]
        return Plan(batch.num_tokens, rows, blocks, slots - blocks * self._page, complete, parts)

    def _split(self, requests: Int, lens: Int) -> list[Int]:
        """Yield the requests in their order, as many together as have at most `MOST_SLOTS` slots."""
        slots = -(-lens[requests] // self._page) * self._page
        parts, held = list[list[int]](), 0
        for request, more in zip(requests.tolist(), slots.tolist(), strict=True):
            if not parts or held + more > MOST_SLOTS:
                parts.append([])
                held = 0
            parts[-1].append(request)
            held += more
        return [np.asarray(part) for part in parts]

    def _part(self, batch: AttentionBatch, starts: Int, requests: Int, counts: Int, lens: Int) -> Part:
        owner, place = _ragged(counts)
        position = (lens - counts)[owner] + place
        keys = self._keys(batch, requests, counts, lens)
        return Part(
            self._put(starts[requests][owner] + place),
            keys.pages,
            self._put(keys.owner >= 0)[:, None, None],
            self._mask(keys, owner, position, batch.causal),
            self._score
            if self._slopes is None
            else _biased(self._score, self._slopes, self._put(position), self._put(keys.position)),
        )

    def _keys(self, batch: AttentionBatch, requests: Int, counts: Int, lens: Int) -> Keys:
        """Return all keys of requests with these numbers of query tokens and keys, except pages before every window."""
        skipped = np.zeros_like(lens)
        if self._window is not None:
            skipped = np.maximum(lens - counts - self._window + 1, 0) // self._page
        num_pages = -(-lens // self._page) - skipped
        owner, column = _ragged(num_pages)
        column = column + skipped[owner]
        pages = batch.block_table[self._put(requests[owner]), self._put(column)].long()
        owner = np.repeat(owner, self._page)
        position = (column[:, None] * self._page + np.arange(self._page)).ravel()
        owner = np.where(position < lens[owner], owner, -1)
        return Keys(pages, owner, position, np.cumsum(num_pages) * self._page)

    def _mask(self, keys: Keys, owner: Int, position: Int, causal: bool) -> BlockMask:
        """Return the mask of visible keys for query tokens of these requests at these positions."""
        how_many, which = _blocks_of_keys(owner, keys.ends)
        queries = self._put(owner), self._put(position)
        visible = _visible(queries, (self._put(keys.owner), self._put(keys.position)), self._window, causal)
        if self._device.type != "cuda":
            visible = _looked_up(visible, len(owner), len(keys.owner))
        return BlockMask.from_kv_blocks(
            self._put(how_many),
            self._put(which),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(len(owner), len(keys.owner)),
            compute_q_blocks=False,
        )

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        if not plan.blocks.numel():
            return
        for new, stored in ((key, cache.key), (value, cache.value)):
            rows = new[: plan.num_tokens] if plan.rows is None else new[plan.rows]
            _raw(stored)[plan.blocks, plan.offsets] = _raw(_converted(rows, stored.dtype))

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
        lse = torch.full((out.shape[0], layer.num_heads), -torch.inf, device=out.device)
        if not plan.complete or out.shape[0] != plan.num_tokens:
            out.zero_()  # padding, and requests that have no key at all
        for part in plan.parts:
            tokens = slice(plan.num_tokens) if part.tokens is None else part.tokens
            keys, values = (self._gathered(one, part, query.dtype) for one in cache)
            found, norms = self._attend(query[tokens].transpose(0, 1)[None], keys, values, part, layer)
            found, norms = found[0].transpose(0, 1), norms[0].T  # [T, H, Dv], [T, H]
            lse[tokens] = norms if sinks is None else add_sinks(found, norms, sinks)
            out[tokens] = found
        return lse.T

    def _gathered(self, cache: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Gather keys or values [1, num_kv_heads, slots, size], with zeros in slots without an owner.

        Masked values are multiplied by zero, which would give NaN for NaN.
        """
        slots = _raw(cache)[part.pages].view(cache.dtype).flatten(0, 1).to(dtype)
        return torch.where(part.owned, slots, 0).transpose(0, 1)[None]


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Part, AttentionLayer], tuple[torch.Tensor, torch.Tensor]]
"""Query [1, H, T, D], keys and values [1, num_kv_heads, slots, size] -> output [1, H, T, Dv] and lse [1, H, T]."""


def _fused(compiled: Callable[..., Any]) -> Attend:
    """Return FlexAttention by a compiled kernel, one for each shape of layer and for short and long batches."""

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED, specialize_float=True):
            found, aux = compiled(
                query,
                keys,
                values,
                score_mod=part.score,
                block_mask=part.mask,
                scale=layer.scale,
                enable_gqa=layer.num_heads != layer.num_kv_heads,
                kernel_options=OPTIONS,
                return_aux=AuxRequest(lse=True),
            )
        return found, aux.lse

    return attend


def _unfused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FlexAttention by torch's own operator, which computes all scores of a part at once.

    `flex_attention` would trace the same operator for each mask, score and shape, and run it the same way.
    """
    score = _unchanged if part.score is None else part.score
    found, norms, _most = operator(query, keys, values, score, part.mask.as_tuple(), layer.scale, {})
    return found, norms * math.log(2.0)  # the operator's is of base two


def _unchanged(value: torch.Tensor, *_place: torch.Tensor) -> torch.Tensor:
    return value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """View eight-bit floats as bytes, because they cannot be indexed on every device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _converted(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the cache's dtype. Eight-bit floats are clamped, so that they do not become NaN or infinity."""
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        rows = rows.float().clamp(-most, most)
    return rows.to(dtype)


def _ragged(counts: Int) -> tuple[Int, Int]:
    """Return, for each element of rows with these lengths, its row and its index in the row."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def _blocks_of_keys(owner: Int, ends: Int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return, for each block of query tokens, the number of blocks with keys of its requests, and these blocks.

    Args:
        owner: request of each query token, ascending.
        ends: the slot after each request's keys.
    """
    first = owner[::BLOCK]
    last = owner[np.minimum(np.arange(1, len(first) + 1) * BLOCK, len(owner)) - 1]
    low = np.concatenate([[0], ends[:-1]])[first] // BLOCK
    high = -(-ends[last] // BLOCK)
    total = -(-ends[-1] // BLOCK)
    indices = np.minimum(low[:, None] + np.arange(total), total - 1)
    return (high - low)[None, None].astype(np.int32), indices[None, None].astype(np.int32)


def _visible(
    queries: tuple[torch.Tensor, torch.Tensor],
    keys: tuple[torch.Tensor, torch.Tensor],
    window: int | None,
    causal: bool,
) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's mask: keys of the query's own request, not after it, and in its window.

    Args:
        queries, keys: the owner and the position of each.
        window, causal: as everywhere.
    """
    query_owner, query_position = queries
    key_owner, key_position = keys

    def mask(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = query_owner[query] == key_owner[key]
        if causal:
            seen = seen & (key_position[key] <= query_position[query])
        if window is not None:
            seen = seen & (key_position[key] > query_position[query] - window)
        return seen

    return mask


def _looked_up(visible: Callable[..., torch.Tensor], queries: int, keys: int) -> Callable[..., torch.Tensor]:
    """Return a mask that reads a table [queries, keys] of another one, so that a step computes it once for all layers.

    The table is smaller than the scores, which torch's operator holds too.
    """
    table = visible(None, None, torch.arange(queries)[:, None], torch.arange(keys))

    def mask(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return table[query, key]

    return mask


def _capped(cap: float) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's score: ``cap * tanh(score / cap)``."""

    def score(value: torch.Tensor, *_place: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(value / cap)

    return score


def _biased(
    capped: Callable[..., torch.Tensor] | None, slopes: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's score function with ALiBi after the cap.

    `queries` and `keys` are the positions of each.
    """

    def score(
        value: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        value = value if capped is None else capped(value)
        return value + slopes[head] * (keys[key] - queries[query])

    return score


build = through_torch(FlexBackend)
