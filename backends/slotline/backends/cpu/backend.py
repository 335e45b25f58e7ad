"""Attention on a CPU: compiled kernels for short queries, PyTorch's flash attention for long ones.

A decode step is bound by reading keys and values, so the kernels read them once, where they lie, in the type they have.
A prefill is bound by arithmetic, so its keys are gathered once and left to oneDNN and MKL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slotline.backends import cache_codes
from slotline.backends.alibi import slopes_of
from slotline.backends.cpu import kernels
from slotline.backends.cpu.prefill import Prefill, cut_prefills, run_prefill
from slotline.backends.cpu.tiles import TILE
from slotline.backends.keys_ahead import through_torch
from slotline.backends.window_scores import window_scores
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerCache
from slotline.registry.contracts.attention_edges import AttentionEdges, HeadNorm
from slotline.registry.contracts.cache_tensors import PLAIN, CacheTensors

NO_FACTORS = np.zeros(4, np.float32)
"""Epsilons and offsets where nothing is normed."""
NO_SINKS_AT = (kernels.NO_SINKS.ctypes.data, 0)
"""What the kernel is told of no sinks."""
MAX_KERNEL_QUERY = 16
"""Query tokens of one request that the kernels take; above it, gathering for flash attention pays."""


class Plan(NamedTuple):
    """Plan of one step: `rows` [n, 3] int64 (token, block, offset) to store, the kernel's arrays, the long queries.

    `told` are the kernel's addresses and sizes of its arrays, those of trees included. `all_rows` is True if they and
    the prefills cover every query token.
    """

    num_tokens: int
    rows: npt.NDArray[np.int64]
    arrays: tuple[npt.NDArray[Any], ...]
    told: tuple[int, ...]
    prefills: list[Prefill]
    all_rows: bool


class Bound(NamedTuple):
    """Facts of a layer's cache for the kernels. Holds the cache, so that its addresses stay valid."""

    cache: LayerCache
    shape: npt.NDArray[np.int64]
    scalars: npt.NDArray[np.float32]
    told: tuple[int, ...]


class CpuBackend:
    """Paged attention on a CPU. Implements `AttentionBackend`.

    Threads: numba's, as many as torch has when the backend is built.
    """

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        self._block_size = context.kernel_block_size
        self._kv_heads = layer.num_kv_heads
        self._window = layer.window or 0
        slopes = slopes_of(context)
        self._slopes = kernels.NO_SLOPES if slopes is None else slopes.numpy()
        # Flash attention knows no soft cap, no ALiBi, and no value head of another size.
        flash = layer.soft_cap is None and slopes is None and layer.head_size == layer.head_size_v
        self._longest = MAX_KERNEL_QUERY if flash else context.max_model_len
        self._piece, self._min_split = MAX_KERNEL_QUERY, kernels.MIN_SPLIT
        if context.batch_invariant:  # every query token by itself, its keys in one go: nothing else has a say in it
            self._longest, self._piece, self._min_split = context.max_model_len, 1, context.max_model_len + 1
        self._read_new = context.dtype == context.kv_dtype
        self._bound: dict[int, Bound] = {}
        threads = torch.get_num_threads()
        self._threads = kernels.use_threads(threads)
        torch.set_num_threads(threads)  # numba's pool, when it starts, sets OpenMP's number of threads for the process
        self._sizes = layer.head_size, layer.head_size_v
        coded = context.cache_format != PLAIN
        self._store = (kernels.compile_encode if coded else kernels.compile_store)(*self._sizes)
        rotates = cache_codes.is_rotated(getattr(torch, context.kv_dtype))
        sizes = [size + size % 2 if rotates else size for size in self._sizes]  # two codes are in a byte
        rows = MAX_KERNEL_QUERY * (layer.num_heads // layer.num_kv_heads)
        self._work = np.empty((self._threads, rows * (sum(sizes) + TILE + 2)), np.float32)
        self._parts = np.empty((2 * self._threads, rows * (sizes[1] + 2)), np.float32)
        self._room = [told for room in (self._work, self._parts) for told in (room.ctypes.data, room.shape[1])]

    def plan(self, batch: AttentionBatch) -> Plan:
        slots = batch.slot_mapping[: batch.num_tokens].numpy()
        rows = np.empty((slots.shape[0], 3), np.int64)
        rows = rows[: kernels.cut_rows(slots, self._block_size, rows)]
        arrays, told, taken = self._kernel_arrays(batch)
        prefills: list[Prefill] = []
        if taken < batch.num_tokens:
            prefills = cut_prefills(batch, self._longest, self._window, self._block_size)  # none has nodes of a tree
        done = taken + sum(prefill.query_len for prefill in prefills)
        return Plan(batch.num_tokens, rows, arrays, told, prefills, done == batch.num_tokens)

    def _kernel_arrays(self, batch: AttentionBatch) -> tuple[tuple[npt.NDArray[Any], ...], tuple[int, ...], int]:
        """Return the arrays for `kernels.attend`, their addresses and sizes, and the number of query tokens covered."""
        starts = np.ascontiguousarray(batch.query_start_loc_cpu)
        lens = np.ascontiguousarray(batch.seq_lens[: batch.num_requests].numpy())  # exact, unlike the host's
        pieces = np.empty((batch.num_requests + batch.num_tokens // self._piece, 6), np.int64)
        nodes = np.zeros_like(lens) if batch.tree is None else np.ascontiguousarray(batch.tree.num_nodes)
        count = kernels.cut_pieces(starts, lens, nodes, self._piece, self._longest, self._window, pieces)
        if not count:
            return (), (), 0
        pieces = pieces[:count]
        items = np.empty((count * self._kv_heads + self._threads, 5), np.int64)
        bins = np.empty(self._threads + 1, np.int64)
        kernels.partition(pieces, self._kv_heads, self._threads, self._min_split, items, bins)
        taken = int(pieces[:, kernels.QUERY_LEN].sum())
        tables = np.ascontiguousarray(batch.block_table.numpy())
        masks, trees = _trees(batch)
        arrays = (items, pieces, tables, bins, *masks)
        at = [array.ctypes.data for array in arrays]
        return arrays, (*at[:3], tables.shape[1], at[3], self._threads, *self._room, *trees), taken

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, plan: Plan
    ) -> None:
        bound = self._bind(layer, cache)
        if isinstance(cache, CacheTensors) and cache.key.dtype != torch.int8:
            tokens, blocks, offsets = torch.from_numpy(plan.rows).unbind(1)
            for name, new in (("key", key), ("value", value)):
                cache_codes.store(cache, name, new[tokens], blocks, offsets)
            return
        dtype = key.dtype if isinstance(cache, CacheTensors) else cache.key.dtype
        key, value = (_packed(t if t.dtype == dtype else t.to(dtype)) for t in (key, value))
        addresses = (key.data_ptr(), value.data_ptr(), *bound.told[-4:])  # the cache's keys and values, their scales
        strides = (key.stride(0), value.stride(0))
        self._store(plan.rows, self._kv_heads, bound.shape, addresses, strides, kernels.TAGS[dtype])

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
        return window_scores(layer, query, cache, blocks, num_keys, sinks)

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
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor:
        if edges is not None:
            return self._at_edges(layer, (query, key, value), cache, plan, out, sinks, edges)
        lse = torch.empty((layer.num_heads, query.shape[0]), dtype=torch.float32)
        if not plan.all_rows or out.shape[0] != plan.num_tokens:
            out.zero_()  # padding, and requests that have no key at all
            lse.fill_(-torch.inf)
        if plan.arrays:
            self._attend(self._bind(layer, cache), _packed(query), plan, out, lse, sinks)
        for prefill in plan.prefills:
            fresh = (key, value) if self._read_new and prefill.complete else None
            run_prefill(prefill, layer, query, fresh, cache, out, lse, sinks)
        return lse

    def _at_edges(
        self,
        layer: AttentionLayer,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
        plan: Plan,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        edges: AttentionEdges,
    ) -> torch.Tensor:
        """Compute attention and what the model left to it, and store the step's keys and values."""
        query, key, value = states
        if edges.query_norm is None and edges.cos is None:
            self.write(layer, key, value, cache, plan)
        else:
            query, key = self._turn(layer, query, key, value, cache, plan, edges)
        if edges.gate is None and edges.scales is None:
            return self.forward(layer, query, key, value, cache, plan, out, sinks)
        whole = torch.empty(out.shape, dtype=query.dtype)
        lse = self.forward(layer, query, key, value, cache, plan, whole, sinks)
        _finish(whole, edges, plan.num_tokens, out)
        return lse

    def _turn(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        edges: AttentionEdges,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys normed and rotated, and store keys and values."""
        bound, dtype = self._bind(layer, cache), query.dtype
        query, key = (part if part.stride(2) == 1 else part.contiguous() for part in (query, key))
        value = _packed(value)
        stored = not isinstance(cache, CacheTensors) and cache.key.dtype == dtype
        turned = torch.empty(query.shape, dtype=dtype), torch.empty(key.shape, dtype=dtype)
        cos, sin = (key[:0], key[:0]) if edges.cos is None or edges.sin is None else (edges.cos, edges.sin)
        norms = edges.query_norm, edges.key_norm
        factors = NO_FACTORS if norms == (None, None) else _factors(norms)
        told = (
            *(query.data_ptr(), *query.stride()[:2], key.data_ptr(), *key.stride()[:2]),
            *(value.data_ptr(), value.stride(0)),
            *(cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[-1] if len(cos) else 0, edges.rotary_size),
            *(0 if norm is None else norm.weight.data_ptr() for norm in norms),
            *(turned[0].data_ptr(), turned[1].data_ptr(), *bound.told[-4:-2]),
            *(plan.num_tokens, layer.num_heads, self._kv_heads),
        )
        rows = plan.rows if stored else plan.rows[:0]
        compiled = kernels.compile_turn(layer.head_size, layer.head_size_v)
        compiled(np.array(told, np.int64), factors, rows, bound.shape, kernels.TAGS[dtype])
        if not stored:
            self.write(layer, turned[1], value, cache, plan)
        return turned

    def _attend(
        self,
        bound: Bound,
        query: torch.Tensor,
        plan: Plan,
        out: torch.Tensor,
        lse: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        target = _packed(out)  # or out itself
        logits = None if sinks is None else sinks.detach().float().contiguous()
        told = (
            *plan.told,
            *bound.told,
            *(NO_SINKS_AT if logits is None else (logits.data_ptr(), logits.shape[0])),
            *(query.data_ptr(), query.stride(0), target.data_ptr(), target.stride(0), lse.data_ptr(), lse.stride(0)),
        )
        compiled = kernels.compile_attend(*self._sizes, query.dtype, bound.cache.key.dtype)
        kernels.attend(compiled.address, np.array(told, np.int64), self._threads)
        if target is not out:
            out.copy_(target)

    def _bind(self, layer: AttentionLayer, cache: LayerCache) -> Bound:
        bound = self._bound.get(layer.index)
        if bound is None or bound.cache is not cache:
            bound = self._bound[layer.index] = _bind(layer, cache, self._block_size, self._slopes)
        return bound


def _bind(layer: AttentionLayer, cache: LayerCache, block_size: int, slopes: npt.NDArray[np.float32]) -> Bound:
    group = layer.num_heads // layer.num_kv_heads
    strides = (*cache.key.stride()[:3], *cache.value.stride()[:3])
    scaled, of_scales = [0] * 7, (kernels.NO_SINKS.ctypes.data,) * 2
    if isinstance(cache, CacheTensors):
        scales = cache["key_scale"], cache["value_scale"]
        scaled, of_scales = [1, *scales[0].stride(), *scales[1].stride()], (scales[0].data_ptr(), scales[1].data_ptr())
    shape = np.array([block_size, layer.window or 0, group, *strides, *scaled], np.int64)
    scalars = np.array([layer.scale, layer.soft_cap or 0.0], np.float32)
    addresses = (cache.key.data_ptr(), cache.value.data_ptr(), *of_scales)
    return Bound(
        cache, shape, scalars, (shape.ctypes.data, scalars.ctypes.data, slopes.ctypes.data, len(slopes), *addresses)
    )


def _factors(norms: tuple[HeadNorm | None, HeadNorm | None]) -> npt.NDArray[np.float32]:
    """Return epsilon and offset of the queries' norm, then of the keys'."""
    return np.array([n for norm in norms for n in ((0, 0) if norm is None else (norm.eps, norm.offset))], np.float32)


def _trees(batch: AttentionBatch) -> tuple[tuple[npt.NDArray[Any], ...], tuple[int, ...]]:
    """Return the masks and depths of a batch's trees, and what the kernel is told of them."""
    if batch.tree is None:
        return (), (kernels.NO_SINKS.ctypes.data, 0, kernels.NO_SINKS.ctypes.data, 0, 0)
    sees, depths = (np.ascontiguousarray(part.numpy()) for part in batch.tree[:2])
    most, own = depths.shape[-1], depths.ndim > 1
    return (sees, depths), (sees.ctypes.data, most * most * own, depths.ctypes.data, most * own, most)


def _finish(whole: torch.Tensor, edges: AttentionEdges, num_tokens: int, out: torch.Tensor) -> None:
    """Gate and round outputs [tokens, H, Dv], into `out`. Padded rows become zeros."""
    out[num_tokens:] = 0
    gate, scales = edges.gate, edges.scales
    gate = gate if gate is None or gate.stride(2) == 1 else gate.contiguous()
    result = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    told = (
        whole.data_ptr(),
        *((0, 0, 0) if gate is None else (gate.data_ptr(), *gate.stride()[:2])),
        *(result.data_ptr(), 0 if scales is None else scales.data_ptr(), num_tokens, whole[0:1].numel()),
        *(1 if scales is None else scales.shape[1], whole.shape[2]),
    )
    kernels.finish(np.array(told, np.int64), kernels.TAGS[whole.dtype])
    if result is not out:
        out[:num_tokens] = result[:num_tokens]


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` [tokens, heads, size] itself if a token's heads are contiguous, else a copy."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


build = through_torch(CpuBackend)
