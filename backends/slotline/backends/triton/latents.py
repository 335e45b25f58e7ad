"""The backend for multi-head latent attention: how rows and keys are cut into programs, and the launches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from attrs import frozen

from slotline.backends.triton import kernels, latent_kernels
from slotline.backends.triton.trees import Nodes, nodes_of
from slotline.kernels.gluon_support import device_has_hopper_kernels
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.errors import PluginError

if TYPE_CHECKING:
    from slotline.backends.triton.latent_hopper import HopperLatents

MOST_RANK, MOST_ROPE = 512, 64
"""What fits into a multiprocessor's shared memory."""
MAX_SPLITS = 64
SPLIT_COST = 4
"""What writing and joining a split costs, in tiles."""


class Shape(NamedTuple):
    """Sizes of a kernel.

    These are keys of a tile, rows (query tokens times heads), warps, stages of the pipeline, and programs that one
    multiprocessor holds at a time.
    """

    tile: int
    rows: int
    warps: int
    stages: int
    resident: int


FEW = Shape(32, 16, 4, 3, 2)
"""Up to 16 rows of a request: the memory's speed decides."""
MANY = Shape(64, 64, 8, 2, 1)
"""A block of rows, its latents twice, and its queries fill a multiprocessor's shared memory."""
EXACT = Shape(16, 16, 4, 1, 1)
"""For float32."""


@frozen(kw_only=True)
class Launch:
    """Requests `first` .. `end` in `blocks` blocks of rows and `splits` splits of the keys.

    Their query tokens are `first_token` .. `first_token + tokens`. `single` means that each has one.
    """

    first: int
    end: int
    first_token: int
    tokens: int
    blocks: int
    splits: int
    single: bool
    shape: Shape


class Plan(NamedTuple):
    """One step. What changes between replays of a captured forward is read from the batch's tensors on the device."""

    batch: AttentionBatch
    launches: tuple[Launch, ...]
    nodes: Nodes | None = None


@lru_cache(maxsize=4096)
def splits_of(blocks: int, tiles: int, places: int) -> int:
    """Return the number of splits for this number of tiles of keys that finishes first.

    Blocks of rows are assumed to run in waves that fill the device's places.
    """

    def time(splits: int) -> int:
        waves: int = triton.cdiv(blocks * splits, places)
        return waves * (int(triton.cdiv(tiles, splits)) + (SPLIT_COST if splits > 1 else 0))

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=time)


class TritonLatents:
    """Attention over latents on a GPU, "absorbed" in decode and prefill alike. Implements `AttentionBackend`.

    Raises PluginError for latents that the kernel's shared memory cannot hold.
    """

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        rank, rope = layer.head_size_v, layer.head_size - layer.head_size_v
        if rank > MOST_RANK or rope > MOST_ROPE:
            raise PluginError(
                f"backend 'triton' holds latents of {MOST_RANK} and {MOST_ROPE} numbers at most; layer "
                f"{layer.name!r} has {rank} and {rope}",
                fix="choose the backend 'torch'",
            )
        self._page, self._device = context.kernel_block_size, context.device
        self._heads = layer.num_heads
        self._exact = context.dtype == "float32"
        self._cores = 8
        self._hopper = _hopper_kernel(context)
        if context.device.startswith("cuda"):
            self._cores = torch.cuda.get_device_properties(context.device).multi_processor_count

    def plan(self, batch: AttentionBatch) -> Plan:
        decodes, requests = batch.num_decodes, batch.num_requests
        launches = []
        if decodes:
            launches.append(self._launch(batch, 0, decodes, 0, decodes, 1))
        if decodes < requests and batch.num_tokens > decodes:
            rest = batch.num_tokens - decodes
            launches.append(self._launch(batch, decodes, requests, decodes, rest, batch.max_query_len))
        return Plan(batch, tuple(launches), nodes_of(batch, self._device))

    def _launch(
        self, batch: AttentionBatch, first: int, end: int, first_token: int, tokens: int, query_len: int
    ) -> Launch:
        rows = query_len * self._heads
        shape = EXACT if self._exact else FEW if rows <= FEW.rows else MANY
        single = query_len == 1 and tokens == end - first
        each: int = triton.cdiv(self._heads, shape.rows)
        blocks = tokens * each if single else tokens * self._heads // shape.rows + end - first
        return Launch(
            first=first,
            end=end,
            first_token=first_token,
            tokens=tokens,
            blocks=blocks,
            splits=splits_of(
                self._busy(end - first, tokens, query_len, shape),
                triton.cdiv(batch.max_seq_len, shape.tile),
                self._cores * shape.resident,
            ),
            single=single,
            shape=shape,
        )

    def _busy(self, requests: int, tokens: int, query_len: int, shape: Shape) -> int:
        """Return the approximate number of blocks of rows that have rows."""
        if tokens == requests * query_len:
            return requests * int(triton.cdiv(query_len * self._heads, shape.rows))
        return int(triton.cdiv(tokens * self._heads, shape.rows))

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        tokens = plan.batch.num_tokens
        if not tokens:
            return
        key = key if key.stride(2) == 1 else key.contiguous()
        latent_kernels.store_latents[(tokens,)](
            key,
            cache.key,
            plan.batch.slot_mapping,
            key.stride(0),
            *cache.key.stride()[:2],
            size=layer.head_size,
            padded=triton.next_power_of_2(layer.head_size),
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
            self._attend(layer, query, cache, plan, launch, target, lse)
        if target is not out:
            out[: batch.num_tokens] = target[: batch.num_tokens]
        return lse

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        batch, shape, splits, rank = plan.batch, launch.shape, launch.splits, layer.head_size_v
        padded: int = max(16, triton.next_power_of_2(rank))
        parts, norms = lse, lse  # not read unless split
        if splits > 1:
            rows = (batch.num_tokens, layer.num_heads, splits)
            parts = torch.empty((*rows, padded), dtype=torch.float32, device=out.device)
            norms = torch.empty((*rows, 2), dtype=torch.float32, device=out.device)
        tensors = (layer, query, cache, batch, launch, out, lse, parts, norms)
        hopper = self._hopper if shape == MANY and plan.nodes is None else None  # which knows no trees
        if hopper is None or not hopper.attend(*tensors):
            self._portable(*tensors, plan.nodes)
        if splits > 1:
            first, tokens = launch.first_token, launch.tokens
            self._join(layer, out, lse, parts, norms, first_token=first, tokens=tokens, splits=splits)

    def _join(
        self,
        layer: AttentionLayer,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor,
        norms: torch.Tensor,
        *,
        first_token: int,
        tokens: int,
        splits: int,
    ) -> None:
        """Merge the splits of some tokens."""
        kernels.join[(tokens, layer.num_heads)](
            out,
            lse,
            parts,
            norms,
            lse,
            lse,
            splits,
            0,
            first_token,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            layer.num_heads,
            splits,
            size_v=layer.head_size_v,
            padded_v=parts.shape[-1],
            padded_splits=triton.next_power_of_2(splits),
            has_sinks=False,
            has_depths=False,
            early=False,
        )

    def _portable(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor,
        norms: torch.Tensor,
        nodes: Nodes | None,
    ) -> None:
        shape, splits, rank = launch.shape, launch.splits, layer.head_size_v
        latent_kernels.attend_latents[(launch.blocks, splits)](
            query,
            cache.key,
            out,
            lse,
            parts,
            norms,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            *(nodes or (lse, lse, 0, 0)),
            launch.first,
            launch.end,
            layer.scale * kernels.LOG2E,
            query.stride(0),
            query.stride(1),
            *cache.key.stride()[:2],
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            batch.block_table.stride(0),
            splits,
            heads=layer.num_heads,
            rank=rank,
            rope=layer.head_size - rank,
            padded=max(16, triton.next_power_of_2(rank)),
            padded_rope=max(16, triton.next_power_of_2(layer.head_size - rank)),
            page=self._page,
            tile=shape.tile,
            block_m=shape.rows,
            single=launch.single,
            has_tree=nodes is not None,
            split=splits > 1,
            exact=self._exact,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )


def _hopper_kernel(context: AttentionContext) -> HopperLatents | None:
    """Return the launcher of Hopper's own kernel, or None if it does not support the group."""
    layer = context.layers[0]
    page = context.kernel_block_size
    sizes = (layer.head_size_v, layer.head_size - layer.head_size_v)
    if {context.dtype, context.kv_dtype} != {"bfloat16"} or sizes != (MOST_RANK, MOST_ROPE):
        return None
    if page not in (16, 32) and page % MANY.tile:
        return None
    if not device_has_hopper_kernels(context.device):
        return None
    from slotline.backends.triton.latent_hopper import HopperLatents

    return HopperLatents(page)
