"""Attention written for clarity: request by request, the textbook formula in float32, any layout, any block size."""

from __future__ import annotations

import torch
from attrs import frozen

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache, TreeMask


@frozen(eq=False)
class Plan:
    """Data for the calls of one step.

    Attributes:
        starts: prefix sums of query lengths, [num_requests + 1].
        lengths: tokens of each request, new tokens included.
        block_table: [num_requests, max_blocks] int32.
        slot_mapping: [num_tokens or more] int64.
        causal: False for encoders.
        tree: the tree of drafts, else None.
        keys_ahead: how many later keys each query token sees, [num_tokens] on the host. None for none.
    """

    starts: list[int]
    lengths: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    tree: TreeMask | None = None
    keys_ahead: torch.Tensor | None = None


class EagerAttention:
    """Attention backend in small steps. Mutants change one of them."""

    def __init__(self, context: AttentionContext) -> None:
        self.block_size = context.kernel_block_size
        self.kv_scales = context.kv_scales

    def plan(self, batch: AttentionBatch) -> Plan:
        """Return the batch as Python lists and the two tensors that kernels index."""
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens.tolist()
        ahead = None if batch.keys_ahead is None else batch.keys_ahead.cpu()
        return Plan(starts, lengths, batch.block_table, batch.slot_mapping, batch.causal, batch.tree, ahead)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        """Store the step's tokens, except those with slot -1."""
        slots = plan.slot_mapping if layer.attention_type == "cross" else plan.slot_mapping[: plan.starts[-1]]
        kept = slots >= 0
        parts = list(zip(cache, (key, value), self.write_scales(layer), strict=True))
        for view, new, scale in parts[:1] if layer.mla else parts:  # latents contain their values
            rows = new[: len(slots)][kept]
            self.store(view, slots[kept], rows if scale is None else rows.float() / scale)

    def scales(self, layer: AttentionLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scales of a layer's cache, None for 1."""
        return self.kv_scales.get(layer.index, (None, None))

    def write_scales(self, layer: AttentionLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the divisors of new keys and values."""
        return self.scales(layer)

    def read_scales(self, layer: AttentionLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the factors of stored keys and values."""
        return self.scales(layer)

    def store(self, view: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
        """Put rows of `new` [n, Hkv, D] into slots [n] of one view of the cache."""
        place = (slots // self.block_size, slots % self.block_size)
        raw(view)[place] = raw(self.narrow(new, view.dtype))

    def narrow(self, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert to the cache's dtype. Values beyond the range of an eight-bit float are clamped to its largest."""
        if dtype.itemsize > 1:
            return new.to(dtype)
        most = torch.finfo(dtype).max
        return new.float().clamp(-most, most).to(dtype)

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
    ) -> torch.Tensor | None:
        """Compute attention of each request in turn. Padded rows and requests without any token become zeros."""
        lse = torch.zeros(layer.num_heads, len(out), device=out.device)
        out[plan.starts[-1] :] = 0
        for request in range(len(plan.lengths)):
            rows = slice(*plan.starts[request : request + 2])
            if plan.lengths[request] == 0:
                out[rows] = 0
            elif rows.start < rows.stop:
                if layer.attention_type == "encoder_only":
                    keys, values, first, length = key[rows], value[rows], 0, rows.stop - rows.start
                else:
                    length = plan.lengths[request]
                    nodes = 0 if plan.tree is None else int(plan.tree.num_nodes[request])
                    first = self.first_key(layer, max(nodes, rows.stop - rows.start), length)
                    keys, values = self.gather(cache, plan, request, first, length)
                    keys, values = self.scaled(layer, keys, values)
                seen = self.visible(layer, plan, rows.stop - rows.start, first, length)
                if plan.keys_ahead is not None and layer.keys_ahead:
                    seen |= self.ahead(plan.keys_ahead[rows], first, length)
                if plan.tree is not None and (nodes := int(plan.tree.num_nodes[request])):
                    seen = self.among_nodes(layer, self.tree_of(plan.tree, request), seen, nodes, first, length)
                own, lse[:, rows] = self.attend(layer, query[rows], keys, values, seen.to(out.device), sinks)
                out[rows] = own.to(out.dtype)
        return lse

    def attention_scores(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        blocks: torch.Tensor,
        num_keys: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return how much the last tokens of a request attend to each key, see `ScoringBackend`."""
        table = blocks[None]
        plan = Plan([0, len(query)], [num_keys], table, table[0, :0], causal=True)
        keys, _ = self.scaled(layer, *self.gather(cache, plan, 0, 0, num_keys))
        seen = self.visible(layer, plan, len(query), 0, num_keys).to(query.device)
        weights, _ = self.softmax(self.scores(layer, query, keys).masked_fill(~seen, -torch.inf), sinks)
        return self.mean_of_window(layer, weights)

    def mean_of_window(self, layer: AttentionLayer, weights: torch.Tensor) -> torch.Tensor:
        """Return the means [n, Hkv] of weights [H, q, n], over queries and over the query heads of each KV head."""
        mean: torch.Tensor = weights.unflatten(0, (layer.num_kv_heads, -1)).mean((1, 2)).T
        return mean

    def scaled(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored values times the layer's scales."""
        both = zip((keys, values), self.read_scales(layer), strict=True)
        keys, values = (stored if scale is None else stored.float() * scale for stored, scale in both)
        return keys, self.latent_values(layer, keys) if layer.mla else values

    def latent_values(self, layer: AttentionLayer, keys: torch.Tensor) -> torch.Tensor:
        """Return the values [n, 1, Dv] that latents contain."""
        return keys[..., : layer.head_size_v]

    def first_key(self, layer: AttentionLayer, num_queries: int, length: int) -> int:
        """Return the first position that any query of a request sees. Blocks before it may have been freed."""
        return 0 if layer.window is None else max(0, length - num_queries - layer.window + 1)

    def ahead(self, keys_ahead: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Return, as [q, n] bool, which of the keys first .. length - 1 come after a query and are seen by it."""
        keys = torch.arange(first, length)[None, :]
        own = torch.arange(length - len(keys_ahead), length)[:, None]
        return (keys > own) & (keys <= own + keys_ahead[:, None])

    def among_nodes(
        self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, nodes: int, first: int, length: int
    ) -> torch.Tensor:
        """Return, as [q, n], which of the keys first ..

        length - 1 are seen if the last `nodes` queries are tree nodes.
        """
        known, position, queries = length - nodes, torch.arange(first, length), min(nodes, len(seen))
        position[known - first :] = self.node_positions(tree, nodes, known)
        seen[-queries:] = True
        seen[-queries:, known - first :] = tree.sees[nodes - queries : nodes, :nodes].cpu()
        if layer.window is not None:
            seen[-queries:] &= self.in_window(position[None, :], position[-queries:, None], layer.window)
        return seen

    def tree_of(self, tree: TreeMask, request: int) -> TreeMask:
        """Return the tree of one request: its own, or that of all."""
        if tree.sees.ndim == 2:
            return tree
        return tree._replace(sees=tree.sees[request], depths=tree.depths[request])

    def node_positions(self, tree: TreeMask, nodes: int, known: int) -> torch.Tensor:
        """Return the positions in a text of a tree's first nodes after `known` tokens, [nodes] int64."""
        return known + tree.depths[:nodes].cpu()

    def gather(
        self, cache: KVCache, plan: Plan, request: int, first: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [n, Hkv, D] and values [n, Hkv, Dv] of positions first .. length - 1."""
        positions = torch.arange(first, length, device=cache.key.device)
        place = (self.blocks(plan, request, positions // self.block_size), positions % self.block_size)
        keys, values = (raw(view)[place].view(view.dtype) for view in cache)
        return keys, values

    def blocks(self, plan: Plan, request: int, indices: torch.Tensor) -> torch.Tensor:
        """Return the ids of some blocks of a request, given by their index in its table: [n] int64."""
        return plan.block_table[request, indices].long()

    def visible(self, layer: AttentionLayer, plan: Plan, num_queries: int, first: int, length: int) -> torch.Tensor:
        """Return, as [q, n] bool, which of the keys first .. length - 1 the last `num_queries` positions see."""
        keys = torch.arange(first, length)[None, :]
        own = torch.arange(length - num_queries, length)[:, None]
        seen = self.not_after(keys, own) if plan.causal else torch.ones(num_queries, length - first, dtype=torch.bool)
        if layer.window is None:
            return seen
        seen = seen & self.in_window(keys, own, layer.window)
        return seen if plan.causal else seen & self.before_window_end(keys, own, layer.window)

    def before_window_end(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        """Return the other end of an encoder's window: as many keys after the query, its own included."""
        return keys < own + window

    def not_after(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the causal mask, from positions of keys [1, n] and queries [q, 1]."""
        return keys <= own

    def in_window(self, keys: torch.Tensor, own: torch.Tensor, window: int) -> torch.Tensor:
        """Return the window's mask: `window` keys, the query's own included."""
        return keys > own - window

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of one request: out [q, H, Dv] and LSE [H, q], float32."""
        scores = self.scores(layer, query, keys).masked_fill(~seen, -torch.inf)
        weights, lse = self.softmax(scores, sinks)
        return self.combine(weights, self.expand(layer, values)), lse

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return scores [H, q, n] float32, after scale and soft cap."""
        products = torch.einsum("qhd,khd->hqk", query.float(), self.expand(layer, keys))
        return self.cap(layer, products * layer.scale)

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        """Apply the soft cap, if the layer has one."""
        return scores if layer.soft_cap is None else layer.soft_cap * torch.tanh(scores / layer.soft_cap)

    def expand(self, layer: AttentionLayer, heads: torch.Tensor) -> torch.Tensor:
        """Expand [n, Hkv, D] to [n, H, D] float32. Query head h reads KV head ``h // (H // Hkv)``."""
        return heads.float().repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)

    def softmax(self, scores: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [H, q, n] and LSE [H, q]. A sink takes part in the sum and has no value."""
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], dim=2)
        weights = torch.softmax(scores, dim=2)
        return weights if sinks is None else weights[:, :, :-1], torch.logsumexp(scores, dim=2)

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Multiply weights [H, q, n] with values [n, H, Dv] to [q, H, Dv]."""
        return torch.einsum("hqk,khd->qhd", weights, values)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, which can be indexed for every dtype."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])
