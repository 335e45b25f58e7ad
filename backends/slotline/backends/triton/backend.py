"""The backend around the kernels: which blocks of queries, how many splits, and the launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from slotline.backends.triton import kernels
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache

MAX_SPLITS = 32
MAX_SPLIT_ROWS = 4096
"""Query tokens times splits beyond which joining would cost more than splitting gains."""
ENOUGH, AIM = 2, 16
"""Programs for each multiprocessor from which on keys are not split, and how many to aim at where they are."""


class Shape(NamedTuple):
    """Sizes of a kernel: keys of a tile, warps of a program, stages of its pipeline."""

    tile: int
    warps: int
    stages: int


DECODE = Shape(64, 2, 4)
PREFILL = Shape(64, 4, 3)
LARGE = Shape(32, 4, 2)
"""For heads above 128, and float32."""


class Launch(NamedTuple):
    """Requests `first` .. `end`, served by `blocks` blocks of `block_q` query tokens in `splits` splits of the keys.

    Their query tokens are `first_token` .. `first_token + tokens`; `single` says that each has one.
    """

    first: int
    end: int
    first_token: int
    tokens: int
    blocks: int
    block_q: int
    splits: int
    single: bool
    shape: Shape


class Plan(NamedTuple):
    """One step. What changes between replays of a captured forward is read from the batch's tensors on the device."""

    batch: AttentionBatch
    launches: tuple[Launch, ...]


class TritonBackend:
    """Paged attention on a GPU. Implements `AttentionBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        self._page = context.kernel_block_size
        self._group = layer.num_heads // layer.num_kv_heads
        self._kv_heads = layer.num_kv_heads
        self._exact = context.dtype == "float32"
        cores = 8
        if context.device.startswith("cuda"):
            cores = torch.cuda.get_device_properties(context.device).multi_processor_count
        self._cores = cores
        self._largest = 64 if layer.head_size <= 128 else 32  # rows of a block of queries
        large = self._exact or max(layer.head_size, layer.head_size_v) > 128
        self._shapes = (LARGE, LARGE) if large else (DECODE, PREFILL)

    def plan(self, batch: AttentionBatch) -> Plan:
        decodes, requests = batch.num_decodes, batch.num_requests
        launches = []
        if decodes:
            launches.append(self._launch(batch, 0, decodes, 0, decodes, 1))
        if decodes < requests and batch.num_tokens > decodes:
            rest = batch.num_tokens - decodes
            launches.append(self._launch(batch, decodes, requests, decodes, rest, batch.max_query_len))
        return Plan(batch, tuple(launches))

    def _launch(
        self, batch: AttentionBatch, first: int, end: int, first_token: int, tokens: int, query_len: int
    ) -> Launch:
        most = max(1, self._largest // self._group)
        block_q = min(triton.next_power_of_2(query_len), 2 ** (most.bit_length() - 1))
        single = query_len == 1 and tokens == end - first
        blocks = tokens if single else tokens // block_q + end - first
        shape, programs, splits = self._shapes[query_len > 1], blocks * self._kv_heads, 1
        if programs < ENOUGH * self._cores:
            tiles = triton.cdiv(batch.max_seq_len, shape.tile)
            splits = max(1, min(triton.cdiv(AIM * self._cores, programs), tiles, MAX_SPLITS, MAX_SPLIT_ROWS // tokens))
        return Launch(first, end, first_token, tokens, blocks, block_q, splits, single, shape)

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        tokens = plan.batch.num_tokens
        if not tokens:
            return
        key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
        kernels.store[(tokens,)](
            key,
            value,
            cache.key,
            cache.value,
            plan.batch.slot_mapping,
            key.stride(0),
            value.stride(0),
            key.stride(1),
            value.stride(1),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            num_heads=layer.num_kv_heads,
            size=layer.head_size,
            size_v=layer.head_size_v,
            padded_heads=triton.next_power_of_2(layer.num_kv_heads),
            padded=triton.next_power_of_2(layer.head_size),
            padded_v=triton.next_power_of_2(layer.head_size_v),
            page=self._page,
        )

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
        batch = plan.batch
        if out.shape[0] > batch.num_tokens:
            out[batch.num_tokens :].zero_()
        lse = torch.empty((layer.num_heads, out.shape[0]), dtype=torch.float32, device=out.device)
        query = query if query.stride(2) == 1 else query.contiguous()
        target = out if out.stride(2) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
        for launch in plan.launches:
            self._attend(layer, query, cache, batch, launch, target, lse, sinks)
        if target is not out:
            out[: batch.num_tokens] = target[: batch.num_tokens]
        return lse

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        padded_v = max(16, triton.next_power_of_2(layer.head_size_v))
        parts, norms = lse, lse  # not read unless split
        if launch.splits > 1:
            rows = (batch.num_tokens, layer.num_heads, launch.splits)
            parts = torch.empty((*rows, padded_v), dtype=torch.float32, device=out.device)
            norms = torch.empty((*rows, 2), dtype=torch.float32, device=out.device)
        kernels.attend[(launch.blocks, layer.num_kv_heads, launch.splits)](
            query,
            cache.key,
            cache.value,
            out,
            lse,
            parts,
            norms,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            lse if sinks is None else sinks,
            launch.first,
            launch.end,
            layer.scale if layer.soft_cap else layer.scale * kernels.LOG2E,
            layer.soft_cap or 1.0,
            query.stride(0),
            query.stride(1),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            batch.block_table.stride(0),
            layer.num_heads,
            launch.splits,
            layer.window or 0,
            group=self._group,
            size=layer.head_size,
            size_v=layer.head_size_v,
            padded=max(16, triton.next_power_of_2(layer.head_size)),
            padded_v=padded_v,
            page=self._page,
            tile=launch.shape.tile,
            block_q=launch.block_q,
            block_m=max(16, triton.next_power_of_2(launch.block_q * self._group)),
            single=launch.single,
            has_window=layer.window is not None,
            has_cap=layer.soft_cap is not None,
            has_sinks=sinks is not None,
            causal=batch.causal,
            split=launch.splits > 1,
            exact=self._exact,
            num_warps=launch.shape.warps,
            num_stages=launch.shape.stages,
        )
        if launch.splits > 1:
            kernels.join[(launch.tokens, layer.num_heads)](
                out,
                lse,
                parts,
                norms,
                lse if sinks is None else sinks,
                launch.first_token,
                out.stride(0),
                out.stride(1),
                lse.stride(0),
                layer.num_heads,
                launch.splits,
                size_v=layer.head_size_v,
                padded_v=padded_v,
                padded_splits=triton.next_power_of_2(launch.splits),
                has_sinks=sinks is not None,
            )
