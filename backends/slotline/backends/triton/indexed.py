"""The backend for latents among which an index picks: how keys are scored and picked, and the launches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from attrs import frozen

from slotline.backends.triton import index_kernels, index_scores, kernels, latent_kernels
from slotline.backends.triton.latents import EXACT, FEW, MANY, MAX_SPLITS, TritonLatents, splits_of
from slotline.backends.triton.trees import Nodes, nodes_of
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer
from slotline.registry.contracts.cache_tensors import CacheTensors

SCORE_TILE = 64
"""Keys that a program scores at a time."""
PICK_WARPS = 16
"""Warps that pick among a token's scores."""
SCORE_BLOCK = 8
"""Query tokens of a request that a program scores one after another with the same keys."""
SCORE_PLACES = 4
"""Programs that score at a time on a multiprocessor."""
EXACT_TILE = 16
"""For float32."""


@frozen
class Part:
    """Requests `first` .. `end` whose query tokens are scored in `blocks` blocks and `splits` splits of keys.

    Their query tokens are `first_token` .. `first_token + tokens`. `single` means that each has one.
    """

    first: int
    end: int
    first_token: int
    tokens: int
    blocks: int
    splits: int
    single: bool


class Room(NamedTuple):
    """Memory of some query tokens: scores [tokens, keys] float32, and the lists of `pick_keys`.

    These are best [tokens, listed] float32 and slots [tokens, listed] int32, of no columns if there are none.
    """

    scores: torch.Tensor
    best: torch.Tensor
    slots: torch.Tensor


class Plan(NamedTuple):
    """One step. `picks` has slots [tokens, most] int32 and their numbers [tokens] int32, by layer."""

    batch: AttentionBatch
    parts: tuple[Part, ...]
    picks: dict[int, tuple[torch.Tensor, torch.Tensor]]
    nodes: Nodes | None = None


@lru_cache(maxsize=4096)
def score_splits(blocks: int, tiles: int, places: int) -> int:
    """Return the number of splits of the keys that ends first, if programs run in waves that fill the places."""
    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=lambda n: -(-blocks * n // places) * (-(-tiles // n) + 1))


class TritonIndexed(TritonLatents):
    """Attention to the latents that an index picks. Implements `AttentionBackend`.

    Raises PluginError for latents that the kernel's shared memory cannot hold.
    """

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._most = min(context.layers[0].index_topk or 0, context.max_model_len)
        self._workspace = context.workspace

    def plan(self, batch: AttentionBatch) -> Plan:  # type: ignore[override]
        decodes, requests = batch.num_decodes, batch.num_requests
        parts = []
        if decodes:
            parts.append(self._part(batch, 0, decodes, 0, decodes, single=True))
        if decodes < requests and batch.num_tokens > decodes:
            parts.append(self._part(batch, decodes, requests, decodes, batch.num_tokens - decodes, single=False))
        return Plan(batch, tuple(parts), {}, nodes_of(batch, self._device))

    def _part(
        self, batch: AttentionBatch, first: int, end: int, first_token: int, tokens: int, *, single: bool
    ) -> Part:
        blocks = tokens if single else tokens // SCORE_BLOCK + end - first
        tiles: int = triton.cdiv(max(batch.max_seq_len, 1), EXACT_TILE if self._exact else SCORE_TILE)
        splits = score_splits(blocks, tiles, SCORE_PLACES * self._cores)
        return Part(first, end, first_token, tokens, blocks, splits, single)

    def write(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: Plan,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        tokens = plan.batch.num_tokens
        if not tokens:
            return
        stored = [(key, cache["key"])]
        if inputs is not None:
            stored.append((inputs["index_key"], cache["index_key"]))
        for new, kept in stored:
            new = new if new.stride(-1) == 1 else new.contiguous()
            latent_kernels.store_latents[(tokens,)](
                new,
                kept,
                plan.batch.slot_mapping,
                new.stride(0),
                *kept.stride()[:2],
                size=new.shape[-1],
                padded=triton.next_power_of_2(new.shape[-1]),
                page=self._page,
            )

    def forward(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: CacheTensors,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        tokens = plan.batch.num_tokens
        if out.shape[0] > tokens:
            out[tokens:].zero_()
        lse = torch.empty((layer.num_heads, out.shape[0]), dtype=torch.float32, device=out.device)
        if not tokens:
            return lse
        if layer.index_from is None:
            assert inputs is not None
            plan.picks[layer.index] = self._pick(cache["index_key"], plan, inputs)
        picks = plan.picks[layer.index if layer.index_from is None else layer.index_from]
        query = query if query.stride(2) == 1 else query.contiguous()
        target = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._attend_picks(layer, query, cache["key"], plan.batch, picks, target, lse)
        if target is not out:
            out[:tokens] = target[:tokens]
        return lse

    def _pick(
        self, keys: torch.Tensor, plan: Plan, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots [tokens, most] int32 of the keys that each token attends to, and how many they are."""
        batch, device = plan.batch, keys.device
        query, weight = inputs["index_query"], inputs["index_weight"]
        query = query if query.stride(2) == 1 else query.contiguous()
        room = self._room(batch, device)
        picks = torch.empty((batch.num_tokens, self._most), dtype=torch.int32, device=device)
        counts = torch.empty(batch.num_tokens, dtype=torch.int32, device=device)
        for part in plan.parts:
            last = part.first_token + part.tokens
            for low in range(part.first_token, last, len(room.scores)):
                high = min(last, low + len(room.scores))
                self._score(part, low, high, query, weight, keys, room.scores, plan)
                self._pick_keys(part, low, high, room, picks, counts, plan)
        return picks, counts

    def _room(self, batch: AttentionBatch, device: torch.device) -> Room:
        """Return memory for scores of as many query tokens at a time as fit."""
        keys = index_scores.round_up(batch.max_seq_len)
        lists = index_scores.listed(batch.max_seq_len, self._most)
        size = index_scores.row_bytes(batch.max_seq_len, self._most)
        memory = self._workspace
        if memory is None or memory.nbytes < size:  # outside of an engine
            rows = min(batch.num_tokens, max(1, index_scores.MOST_BYTES // size))
            memory = torch.empty(rows * size, dtype=torch.uint8, device=device)
        rows = min(batch.num_tokens, memory.nbytes // size)
        parts = memory[: rows * size].view(torch.float32).split([rows * keys, rows * lists, rows * lists])
        best, slots = (part.view(rows, lists) for part in parts[1:])
        return Room(parts[0].view(rows, keys), best, slots.view(torch.int32))

    def _score(
        self,
        part: Part,
        low: int,
        high: int,
        query: torch.Tensor,
        weight: torch.Tensor,
        keys: torch.Tensor,
        scores: torch.Tensor,
        plan: Plan,
    ) -> None:
        """Score the keys of query tokens `low` .. `high`."""
        batch, (heads, size) = plan.batch, query.shape[1:]
        index_kernels.score_keys[(part.blocks, part.splits)](
            query,
            weight,
            keys,
            scores,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            *(plan.nodes or (scores, scores, 0, 0)),
            part.first,
            part.end,
            low,
            high,
            query.stride(0),
            query.stride(1),
            weight.stride(0),
            weight.stride(1),
            *keys.stride()[:2],
            scores.stride(0),
            batch.block_table.stride(0),
            part.splits,
            heads=heads,
            padded_heads=max(16, triton.next_power_of_2(heads)),
            size=size,
            padded=max(16, triton.next_power_of_2(size)),
            page=self._page,
            tile=EXACT_TILE if self._exact else SCORE_TILE,
            block_q=1 if part.single else SCORE_BLOCK,
            single=part.single,
            has_tree=plan.nodes is not None,
            exact=self._exact,
        )

    def _pick_keys(
        self,
        part: Part,
        low: int,
        high: int,
        room: Room,
        picks: torch.Tensor,
        counts: torch.Tensor,
        plan: Plan,
    ) -> None:
        """Pick among the scored keys of query tokens `low` .. `high`."""
        batch, nodes = plan.batch, plan.nodes
        rows = part.tokens if part.single else part.tokens + part.end - part.first
        turns: tuple[tuple[str, int], ...] = (("only", 1),)
        best, best_slots = room.scores, picks  # not read unless there are lists
        if room.best.shape[1]:
            best, best_slots = room.best, room.slots
            turns = ("first", best.shape[1] // self._most), ("last", 1)
        for turn, programs in turns:
            index_kernels.pick_keys[(rows, programs)](
                room.scores,
                batch.block_table,
                best,
                best_slots,
                picks,
                counts,
                batch.seq_lens,
                batch.query_start_loc,
                *(nodes or (counts, counts, 0, 0)),
                part.first,
                part.end,
                low,
                high,
                self._most,
                room.scores.stride(0),
                batch.block_table.stride(0),
                best.stride(0),
                picks.stride(0),
                page=self._page,
                tile=index_scores.PICK_TILE,
                padded_nodes=0 if nodes is None else triton.next_power_of_2(nodes.most),
                single=part.single,
                turn=turn,
                num_warps=PICK_WARPS,
            )

    def _attend_picks(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        latents: torch.Tensor,
        batch: AttentionBatch,
        picks: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        slots, counts = picks
        tokens, heads, rank = batch.num_tokens, layer.num_heads, layer.head_size_v
        shape = EXACT if self._exact else FEW if heads <= FEW.rows else MANY
        blocks = tokens * int(triton.cdiv(heads, shape.rows))
        tiles: int = triton.cdiv(max(1, min(self._most, batch.max_seq_len)), shape.tile)
        splits = splits_of(blocks, tiles, self._cores * shape.resident)
        padded: int = max(16, triton.next_power_of_2(rank))
        parts, norms = lse, lse  # not read unless split
        if splits > 1:
            parts = torch.empty((tokens, heads, splits, padded), dtype=torch.float32, device=out.device)
            norms = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=out.device)
        index_kernels.attend_picks[(blocks, splits)](
            query,
            latents,
            out,
            lse,
            parts,
            norms,
            slots,
            counts,
            layer.scale * kernels.LOG2E,
            query.stride(0),
            query.stride(1),
            *latents.stride()[:2],
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            slots.stride(0),
            splits,
            heads=heads,
            rank=rank,
            rope=layer.head_size - rank,
            padded=padded,
            padded_rope=max(16, triton.next_power_of_2(layer.head_size - rank)),
            page=self._page,
            tile=shape.tile,
            block_m=shape.rows,
            split=splits > 1,
            exact=self._exact,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
        if splits > 1:
            self._join(layer, out, lse, parts, norms, first_token=0, tokens=tokens, splits=splits)
