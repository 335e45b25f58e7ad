"""Paged attention in plain PyTorch.

A step is cut into *groups*: pieces of requests with equally many query tokens and keys of similar number. A group is
gathered, computed with two matrix products in float32, and scattered. Nothing loops over tokens, and no slot
beyond a request's length is ever read, so garbage there cannot leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slotline.backends import cache_codes
from slotline.backends.alibi import position_bias_of, slopes_of
from slotline.backends.cache_codes import raw as _raw
from slotline.backends.torch_sdpa.expansion import attend_expanded
from slotline.backends.torch_sdpa.index import picked
from slotline.backends.window_scores import window_scores
from slotline.kernels.attention_edges import finished, turned
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerCache
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.contracts.cache_tensors import CacheTensors
from slotline.registry.contracts.prefix_groups import PrefixGroups

MAX_QUERY_ROWS = 512
"""Query tokens of one request handled at once: bounds the memory of the scores."""
MAX_SHARED_QUERY = 16
"""Longest query that shares a group with other requests (decode, verification of drafts)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_packed = torch.ops.aten._flash_attention_forward.default
PACKED_DTYPES = frozenset({"float16", "bfloat16"})
PACKED_HEADS = range(8, 257, 8)
"""Sizes of heads that torch's kernel for texts side by side takes, on a CUDA device."""

Reach = tuple[int | None, int | None]
"""(window, chunk) of a layer."""


class Piece(NamedTuple):
    """Query tokens `first_token .. + query_len` of one request, the last one at position `num_keys - 1` if causal.

    `num_keys` may be too large if the host knows only bounds. A causal piece has exactly its request's length minus the
    `behind` tokens that come after it.
    """

    query_len: int
    num_keys: int
    request: int
    first_token: int
    behind: int = 0


class Group(NamedTuple):
    """Pieces computed together: B pieces, q query tokens each, at most L keys.

    Attributes:
        tokens: [B, q] int64, rows of the query.
        blocks, offsets: [B, L] int64, places of the keys. Beyond the keys that a piece sees, its first or last key
            again.
        mask: by reach, [B, 1, 1, q, L] bool, True if a query sees a key.
        distance: [B, 1, 1, q, L] int64, the key's position in a text minus the query's. None if no layer needs it.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    mask: dict[Reach, torch.Tensor]
    distance: torch.Tensor | None = None


class Texts(NamedTuple):
    """Requests of an encoder that lie side by side: `number` of them from token `start` on, `length` tokens each."""

    start: int
    number: int
    length: int


class Packed(NamedTuple):
    """Requests of an encoder that lie side by side, for one call of a kernel.

    `bounds` is [num_requests + 1] int32, `num_tokens` and `longest` count tokens of all requests and of one.
    """

    bounds: torch.Tensor
    num_tokens: int
    longest: int


class Plan(NamedTuple):
    """Plan of one step.

    `rows` are those of the `num_new` keys to store (None for all), `blocks` and `offsets` their destinations, int64.
    `prefix` handles the common prefix, if any, for all tokens. `groups` begin after it then.
    Of encoders there may be `texts` (on a CPU) or `packed` (on a CUDA device) in place of groups.
    `picks` has the masks of the groups that each layer's index made, by the layer's index.
    """

    num_new: int
    rows: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    groups: list[Group]
    prefix: list[Group]
    picks: dict[int, list[torch.Tensor]]
    texts: Sequence[Texts] = ()
    packed: Packed | None = None


class TorchBackend:
    """Attention by gather and matrix product. Implements `AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        self._block_size = context.kernel_block_size
        self._reaches = {_reach(layer) for layer in context.layers}
        # Encoders keep nothing: their keys are this step's own tokens.
        self._encoder = context.layers[0].attention_type == "encoder_only"
        self._cross = context.layers[0].attention_type == "cross"
        self._plain_texts = self._encoder and torch.device(context.device).type == "cpu"
        self._plain_texts &= all(_is_plain(layer) for layer in context.layers)
        self._packs = self._encoder and _can_pack(context)
        self._looks_ahead = context.layers[0].keys_ahead
        self._scales = context.kv_scales
        self._slopes = slopes_of(context)
        self._position_bias = position_bias_of(context)

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Return True, because the prefix is gathered once instead of once for each request."""
        return True

    def plan(self, batch: AttentionBatch) -> Plan:
        if self._plain_texts:
            nothing = batch.slot_mapping[:0]
            return Plan(0, None, nothing, nothing, [], [], {}, _texts(batch))
        if self._packs:
            nothing = batch.slot_mapping[:0]
            return Plan(0, None, nothing, nothing, [], [], {}, packed=_packed(batch))
        slots = batch.slot_mapping if self._cross else batch.slot_mapping[: batch.num_tokens]
        num_new = len(slots)
        rows = (slots >= 0).nonzero().squeeze(1) if bool((slots < 0).any()) else None
        slots = slots if rows is None else slots[rows]
        pieces = sorted(self._pieces(batch), key=_likeness)
        groups: list[Group] = []
        for (query_len, _), members in groupby(pieces, _likeness):
            step = len(pieces) if query_len <= MAX_SHARED_QUERY else 1
            same = list(members)
            groups += [self._group(batch, same[i : i + step], batch.causal) for i in range(0, len(same), step)]
        blocks = slots // self._block_size
        offsets = slots - blocks * self._block_size
        return Plan(num_new, rows, blocks, offsets, groups, self._prefix(batch), {})

    def _prefix(self, batch: AttentionBatch) -> list[Group]:
        """Return a group of all query tokens, as if of the first request, over the shared blocks.

        Of prefixes of groups of requests return a group for each segment, with the query tokens of its requests.
        """
        if batch.prefix_groups is not None:
            return self._segments(batch, batch.prefix_groups)
        if not batch.common_prefix_len:
            return []
        starts = range(0, batch.num_tokens, MAX_QUERY_ROWS)
        whole = (
            Piece(min(MAX_QUERY_ROWS, batch.num_tokens - start), batch.common_prefix_len, 0, start) for start in starts
        )
        return [self._group(batch, [piece], causal=False, first_key=0) for piece in whole]

    def _segments(self, batch: AttentionBatch, shared: PrefixGroups) -> list[Group]:
        bounds, device = pairwise(shared.starts_cpu.tolist()), batch.block_table.device
        found = []
        for (begin, end), (request, first, last, _) in zip(bounds, shared.segments_cpu.tolist(), strict=True):
            keys = torch.arange(first, last, device=device)
            blocks = batch.block_table[request, keys // self._block_size].long()[None]
            for start in range(begin, end, MAX_QUERY_ROWS):
                tokens = shared.tokens[None, start : min(start + MAX_QUERY_ROWS, end)].long()  # [1, q]
                seen = torch.ones((1, 1, 1, tokens.shape[1], len(keys)), dtype=torch.bool, device=device)
                masks = dict.fromkeys(self._reaches, seen)
                distance = None
                if self._slopes is not None or self._position_bias is not None:
                    distance = (keys - batch.positions[tokens][:, :, None])[:, None, None]
                found.append(Group(tokens, blocks, keys[None] % self._block_size, masks, distance))
        return found

    def _pieces(self, batch: AttentionBatch) -> list[Piece]:
        starts = batch.query_start_loc_cpu[: batch.num_requests + 1].tolist()
        lens = np.diff(starts) if self._encoder else batch.seq_lens_cpu[: batch.num_requests]
        pieces = []
        for request, num_keys in enumerate(np.asarray(lens).tolist()):
            end = starts[request + 1]
            for first in range(starts[request], end if num_keys else starts[request], MAX_QUERY_ROWS):
                last = min(first + MAX_QUERY_ROWS, end)
                seen = num_keys - (end - last) if batch.causal and self._ahead(batch) is None else num_keys
                pieces.append(Piece(last - first, seen, request, first, end - last))
        return pieces

    def _group(self, batch: AttentionBatch, pieces: list[Piece], causal: bool, first_key: int | None = None) -> Group:
        if first_key is None:
            shared = batch.prefix_groups
            first_key = batch.common_prefix_len if shared is None else min(shared.own_cpu[p.request] for p in pieces)
        device = batch.block_table.device
        columns = torch.tensor(pieces, device=device).T.unsqueeze(2)  # [5, B, 1]
        num_keys, request, first = columns[1], columns[2], columns[3]  # [B, 1] each
        if causal:
            num_keys = batch.seq_lens[request] - columns[4]
        query = torch.arange(pieces[0].query_len, device=device)  # [q]
        keys = torch.arange(first_key, max(p.num_keys for p in pieces), device=device)  # [L]
        last_seen = num_keys - pieces[0].query_len + query if causal else num_keys - 1 + 0 * query  # [B, q]
        tokens = first + query
        ahead = self._ahead(batch) if causal else None
        num_keys = num_keys if ahead is None else num_keys + columns[4]
        position = torch.minimum(keys, num_keys - 1)  # [B, L], never past the last key
        if self._encoder:
            start = batch.query_start_loc[request].long()  # [B, 1]
            visible = {reach: _visible_in_encoder(keys, last_seen, tokens - start, reach) for reach in self._reaches}
            return Group(tokens, start + position, position, visible)
        begin = last_seen[:, :1]
        if batch.tree is not None:  # a node's place in a text may be before its slot
            known = batch.seq_lens_cpu[: batch.num_requests] - batch.tree.num_nodes[: batch.num_requests]
            begin = torch.minimum(begin, torch.from_numpy(known).to(device)[request])
        first_seen = torch.stack([_first_seen(begin, reach) for reach in self._reaches]).amin(0)  # [B, 1]
        position = torch.maximum(position, first_seen)  # nor before the first one, where blocks may have been freed
        blocks = batch.block_table[request, position // self._block_size].long()
        offsets = position % self._block_size
        places = keys  # in a text
        if ahead is not None:
            visible = {reach: _visible(keys, last_seen, reach, ahead[tokens]) for reach in self._reaches}
        elif batch.tree is None or not causal:
            visible = {reach: _visible(keys, last_seen, reach) for reach in self._reaches}
        else:
            visible, places = _visible_in_tree(batch, pieces, keys, query, self._reaches)
        if causal and batch.prefix_groups is not None:
            own = (keys >= batch.prefix_groups.own[request])[:, None, None, None, :]  # others are in segments
            visible = {reach: mask & own for reach, mask in visible.items()}
        if self._slopes is None and self._position_bias is None:
            return Group(tokens, blocks, offsets, visible)
        distance = places.expand(len(pieces), -1)[:, None, :] - batch.positions[tokens][:, :, None]  # [B, q, L]
        return Group(tokens, blocks, offsets, visible, distance[:, None, None])

    def _ahead(self, batch: AttentionBatch) -> torch.Tensor | None:
        """Return how many later keys each query token sees, if the group's layers look ahead in this batch."""
        return batch.keys_ahead if self._looks_ahead else None

    def write(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        if self._encoder or not plan.blocks.numel():
            return
        if isinstance(cache, CacheTensors) and layer.mla:
            named = {"key": key} if inputs is None else {"key": key, "index_key": inputs["index_key"]}
            for name, states in named.items():
                rows = states[: plan.num_new] if plan.rows is None else states[plan.rows]
                cache[name][plan.blocks, plan.offsets] = rows.to(cache[name].dtype)
            return
        if isinstance(cache, CacheTensors):
            for new, name in ((key, "key"), (value, "value")):
                rows = new[: plan.num_new] if plan.rows is None else new[plan.rows]
                cache_codes.store(cache, name, rows, plan.blocks, plan.offsets)
            return
        scales = self._scales.get(layer.index, (None, None))
        parts = zip((key, value), (cache.key, cache.value), scales, strict=True)
        for new, stored, scale in islice(parts, 1 if layer.mla else 2):  # latents hold their values
            rows = new[: plan.num_new] if plan.rows is None else new[plan.rows]
            _raw(stored)[plan.blocks, plan.offsets] = _raw(_converted(rows, stored.dtype, scale))

    def attention_scores(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: LayerCache,
        blocks: torch.Tensor,
        num_keys: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean probability of each key, see `ScoringBackend`."""
        return window_scores(layer, query, cache, blocks, num_keys, sinks, self._scales.get(layer.index))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor:
        if edges is not None:
            return self._at_edges(layer, (query, key, value), cache, plan, out, sinks, inputs, edges)
        return self._forward(layer, (query, key, value), cache, plan, out, sinks, inputs)

    def _at_edges(
        self,
        layer: AttentionLayer,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
        edges: AttentionEdges,
    ) -> torch.Tensor:
        """Compute attention and what the model left to it, and store the step's keys and values."""
        query, key, value = states
        if edges.expansion is None:
            query, key = turned(query, key, edges)
        self.write(layer, key, value, cache, plan, inputs)
        ends = edges.gate is not None or edges.scales is not None
        target = torch.empty_like(out, dtype=query.dtype) if ends else out
        lse = self._forward(layer, (query, key, value), cache, plan, target, sinks, inputs, edges.expansion)
        if ends:
            finished(target, edges, out)
        return lse

    def _forward(
        self,
        layer: AttentionLayer,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        inputs: Mapping[str, torch.Tensor] | None,
        expansion: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = states
        if self._plain_texts:
            return _attend_texts(layer, (query, key, value), plan.texts, out)
        if plan.packed is not None:
            return _attend_packed(layer, (query, key, value), plan.packed, out)
        lse = torch.full((layer.num_heads, query.shape[0]), -torch.inf, device=query.device)
        if sum(group.tokens.numel() for group in plan.groups) != out.shape[0]:
            out.zero_()  # padding, and requests that have no key at all
        rotates = isinstance(cache, CacheTensors) and cache_codes.is_rotated(cache.key.dtype)
        query = cache_codes.rotate(query) if rotates else query
        target = torch.zeros_like(out, dtype=torch.float32) if plan.prefix or rotates else out
        masks = self._masks(layer, cache, plan, inputs)
        attend = _attend if expansion is None else partial(attend_expanded, expansion, _attend)
        for group, mask in zip(plan.groups, masks, strict=True):
            own = (key[group.blocks], value[group.blocks]) if self._encoder else self._read(layer, cache, group)
            result, group_lse = attend(layer, query[group.tokens], *own, mask, self._bias(group), sinks)
            target[group.tokens] = result.to(target.dtype)
            lse[:, group.tokens] = group_lse
        for group in plan.prefix:
            keys, values = self._read(layer, cache, group)
            shared = attend(
                layer, query[group.tokens], keys, values, group.mask[_reach(layer)], self._bias(group), None
            )
            _join(target, lse, group.tokens, *shared)
        if target is not out:
            out.copy_(cache_codes.rotate(target) if rotates else target)
        return lse

    def _masks(
        self, layer: AttentionLayer, cache: LayerCache, plan: Plan, inputs: Mapping[str, torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return for each group which keys its queries attend to, [B, 1, 1, q, L] bool.

        What the index of a layer picks is kept in the plan, for the layers after it.
        """
        if layer.index_from is not None:
            return plan.picks[layer.index_from]
        masks = [group.mask[_reach(layer)] for group in plan.groups]
        if layer.index_topk is None:
            return masks
        assert inputs is not None
        assert isinstance(cache, CacheTensors)
        found = []
        for group, mask in zip(plan.groups, masks, strict=True):
            keys = cache["index_key"][group.blocks, group.offsets]  # [B, L, index head size]
            query, weight = inputs["index_query"][group.tokens], inputs["index_weight"][group.tokens]
            found.append(picked(query, keys, weight, mask[:, 0, 0], layer.index_topk)[:, None, None])
        plan.picks[layer.index] = found
        return found

    def _bias(self, group: Group) -> torch.Tensor | None:
        """Return the bias by distance on the scores of a group, [B, H, 1, q, L], or None for layers without one."""
        if group.distance is None:
            return None
        bias = torch.zeros((), device=group.distance.device)
        if self._slopes is not None:
            bias = self._slopes[:, None, None, None] * group.distance
        if self._position_bias is None:
            return bias
        distance = (-group.distance[:, 0, 0]).clamp(0, self._position_bias.shape[1] - 1)  # [B, q, L]
        return bias + self._position_bias[:, distance].transpose(0, 1)[:, :, None]

    def _read(self, layer: AttentionLayer, cache: LayerCache, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [B, L, Hkv, D] and values [B, L, Hkv, Dv] of a group, multiplied by the cache's scales if any."""
        if isinstance(cache, CacheTensors) and not layer.mla:
            at = group.blocks, group.offsets
            sizes = {"key": layer.head_size, "value": layer.head_size_v}
            keys, values = (
                cache_codes.decode(_raw(cache[name])[at].view(cache[name].dtype), cache[f"{name}_scale"][at], size)
                for name, size in sizes.items()
            )
            return keys, values
        scales = self._scales.get(layer.index)
        if layer.mla:
            keys = _raw(cache.key)[group.blocks, group.offsets].view(cache.key.dtype)
            keys = keys if scales is None else keys.float() * scales.key
            return keys, keys[..., : layer.head_size_v]
        parts = (cache.key, cache.value)
        keys, values = (_raw(part)[group.blocks, group.offsets].view(part.dtype) for part in parts)
        return (keys, values) if scales is None else (keys.float() * scales.key, values.float() * scales.value)


def _is_plain(layer: AttentionLayer) -> bool:
    """Return True if torch's own attention on a CPU computes a layer of an encoder."""
    special = layer.window is not None or layer.chunk is not None or layer.soft_cap is not None or layer.sinks
    return not special and layer.num_heads == layer.num_kv_heads and layer.head_size == layer.head_size_v


def _texts(batch: AttentionBatch) -> list[Texts]:
    """Return the requests of a step, those of equal length that follow each other together."""
    starts = batch.query_start_loc_cpu[: batch.num_requests + 1].tolist()
    found: list[Texts] = []
    for length, same in groupby(pairwise(starts), lambda ends: ends[1] - ends[0]):
        ends = list(same)
        if length:
            found.append(Texts(ends[0][0], len(ends), length))
    return found


def _attend_texts(
    layer: AttentionLayer,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    texts: Sequence[Texts],
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute attention within texts, with nothing gathered, by the tiles that torch has for a CPU.

    Args:
        states: query, key and value, [num_tokens, H, D] each.
        out: [num_tokens, H, D]. That of padding becomes 0.

    Returns:
        the natural log-sum-exp [H, num_tokens] float32.
    """
    num_tokens = out.shape[0]
    lse = torch.full((layer.num_heads, num_tokens), -torch.inf)
    if sum(each.number * each.length for each in texts) != num_tokens:
        out.zero_()
    for start, number, length in texts:
        shape, end = (number, length), start + number * length
        parts = (part[start:end].unflatten(0, shape).transpose(1, 2) for part in states)  # [B, H, L, D] each
        result, sums = _flash(
            *(part if part.stride(3) == 1 else part.contiguous() for part in parts), scale=layer.scale
        )
        out[start:end].unflatten(0, shape).copy_(result.transpose(1, 2))
        lse[:, start:end].unflatten(1, shape).copy_(sums.transpose(0, 1))
    return lse


def _can_pack(context: AttentionContext) -> bool:
    """Return True if the device's kernel for texts side by side computes all layers of an encoder."""
    device = torch.device(context.device)
    if device.type != "cuda" or context.dtype not in PACKED_DTYPES:
        return False
    return torch.backends.cuda.is_flash_attention_available() and all(
        _is_plain(layer) and layer.head_size in PACKED_HEADS for layer in context.layers
    )


def _packed(batch: AttentionBatch) -> Packed:
    bounds = batch.query_start_loc[: batch.num_requests + 1].int()
    ends = batch.query_start_loc_cpu[: batch.num_requests + 1]
    return Packed(bounds, int(ends[-1]), int(np.diff(ends).max(initial=0)))


def _attend_packed(
    layer: AttentionLayer,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    packed: Packed,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute attention within texts in one call of torch's FlashAttention-2.

    Args:
        states: query, key and value, [num_tokens, H, D] each.
        out: [num_tokens, H, D]. That of padding becomes 0.

    Returns:
        the natural log-sum-exp [H, num_tokens] float32.
    """
    bounds, end, longest = packed
    lse = torch.full((layer.num_heads, out.shape[0]), -torch.inf, device=out.device)
    out[end:] = 0
    if not end:
        return lse
    rows = (part[:end] if part.stride(2) == 1 else part[:end].contiguous() for part in states)
    result, sums, *_ = _flash_packed(*rows, bounds, bounds, longest, longest, 0.0, False, False, scale=layer.scale)
    out[:end] = result
    lse[:, :end] = sums
    return lse


def _converted(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Convert to the cache's dtype.

    Eight-bit floats are scaled and clamped, so that they do not become NaN or infinity.
    """
    if dtype.itemsize > 1:
        return rows.to(dtype)
    most = torch.finfo(dtype).max
    rows = rows.float() if scale is None else rows.float() / scale
    return rows.clamp(-most, most).to(dtype)


def _join(
    out: torch.Tensor, lse: torch.Tensor, tokens: torch.Tensor, shared: torch.Tensor, shared_lse: torch.Tensor
) -> None:
    """Add attention over other keys, [B, q, H, Dv] with LSE [H, B, q], to that of some tokens, in place."""
    own_lse = lse[:, tokens]
    both = torch.logaddexp(own_lse, shared_lse)  # [H, B, q]
    own, other = (torch.exp(part - both).permute(1, 2, 0).unsqueeze(3) for part in (own_lse, shared_lse))
    out[tokens] = out[tokens] * own + shared * other
    lse[:, tokens] = both


def _likeness(piece: Piece) -> tuple[int, int]:
    """Return the key of a piece's group: pieces with the same number of queries, and at most twice as many keys."""
    return piece.query_len, piece.num_keys.bit_length()


def _reach(layer: AttentionLayer) -> Reach:
    return layer.window, layer.chunk


def _first_seen(last_seen: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Return the first key that a query sees, from the last one. Negative if a window is wider than the text."""
    window, chunk = reach
    if window is not None:
        return last_seen - window + 1
    return torch.zeros_like(last_seen) if chunk is None else last_seen // chunk * chunk


def _visible(
    keys: torch.Tensor, last_seen: torch.Tensor, reach: Reach, ahead: torch.Tensor | None = None
) -> torch.Tensor:
    """Return, as [B, 1, 1, q, L] bool, which of `keys` [L] a query with last visible key `last_seen` [B, q] sees.

    `ahead` [B, q] counts the keys after that one which are visible too.
    """
    last = last_seen[:, None, None, :, None]
    most = last if ahead is None else last + ahead[:, None, None, :, None]
    return (keys <= most) & (keys >= _first_seen(last, reach))


def _visible_in_encoder(keys: torch.Tensor, last_seen: torch.Tensor, own: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Return, as [B, 1, 1, q, L] bool, which of `keys` [L] an encoder's query at `own` [B, q] sees.

    Keys after `last_seen` [B, q] are not the request's.
    """
    seen = keys <= last_seen[:, None, None, :, None]
    if reach[0] is None:
        return seen
    return seen & ((keys - own[:, None, None, :, None]).abs() < reach[0])


def _visible_in_tree(
    batch: AttentionBatch, pieces: list[Piece], keys: torch.Tensor, query: torch.Tensor, reaches: Iterable[Reach]
) -> tuple[dict[Reach, torch.Tensor], torch.Tensor]:
    """Return the mask if the last tokens of requests are tree nodes: by position before them, by path among them.

    The positions of the keys in a text, [B, L], are returned too.
    """
    tree, query_len = batch.tree, pieces[0].query_len
    assert tree is not None
    ends = batch.seq_lens_cpu
    known = [int(ends[p.request]) - int(tree.num_nodes[p.request]) for p in pieces]  # tokens before the nodes
    columns = torch.tensor([[p.num_keys for p in pieces], known], device=keys.device).unsqueeze(2)  # [2, B, 1]
    num_keys, known_tokens = columns
    slots = num_keys - query_len + query  # [B, q], each query's own place in the cache
    node, key_node = slots - known_tokens, keys - known_tokens  # [B, q] and [B, L], below 0 for known tokens
    most = tree.depths.shape[-1] - 1
    whose = torch.tensor([p.request if tree.depths.ndim > 1 else 0 for p in pieces], device=keys.device)[:, None]
    depths, sees = (part if tree.depths.ndim > 1 else part[None] for part in (tree.depths, tree.sees))
    position = torch.where(node < 0, slots, known_tokens + depths[whose, node.clamp(0, most)])
    key_position = torch.where(key_node < 0, keys, known_tokens + depths[whose, key_node.clamp(0, most)])
    path = sees[whose[:, :, None], node.clamp(0, most)[:, :, None], key_node.clamp(0, most)[:, None, :]]  # [B, q, L]
    below = (keys <= slots[:, :, None]) & (keys < num_keys)[:, None, :]
    seen = below & ((key_node < 0)[:, None, :] | (path & (node >= 0)[:, :, None]))
    visible = {
        reach: (seen & (key_position[:, None, :] >= _first_seen(position, reach)[:, :, None]))[:, None, None]
        for reach in reaches
    }
    return visible, key_position


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of query [B, q, H, D] over keys [B, L, Hkv, D], values [B, L, Hkv, Dv], all in float32.

    `bias` [B, H, 1, q, L] float32 is added to the scores.

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
    if bias is not None:
        scores.add_(bias.view(bias.shape[0], layer.num_kv_heads, groups, length, -1))
    scores = scores.masked_fill_(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)  # [B, Hkv, G, q, 1]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(1, layer.num_kv_heads, groups, 1, 1))
    weights = torch.exp(scores.sub_(lse)).flatten(2, 3)  # [B, Hkv, G * q, L]
    result = torch.matmul(weights, values.float().transpose(1, 2))  # [B, Hkv, G * q, Dv]
    result = result.view(batch, heads, length, -1).transpose(1, 2)
    return result, lse.view(batch, heads, length).transpose(0, 1)
