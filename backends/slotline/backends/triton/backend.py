"""The backend around the kernels: which blocks of queries, how many splits, and the launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
from attrs import evolve, frozen

from slotline.backends import cache_codes
from slotline.backends.alibi import slopes_of
from slotline.backends.triton import TritonOptions, decode_codes, kernels
from slotline.backends.triton.prompts import PromptAttention
from slotline.backends.triton.single_tokens import Single, SingleTokens
from slotline.backends.triton.trees import node_counts
from slotline.backends.window_scores import window_scores
from slotline.kernels.attention_edges import turned
from slotline.kernels.gluon_support import device_has_hopper_kernels
from slotline.registry.contracts.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    LayerCache,
)
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.contracts.cache_tensors import PLAIN, CacheTensors
from slotline.registry.contracts.prefix_groups import PrefixGroups

if TYPE_CHECKING:
    from slotline.backends.triton.decode_hopper import HopperDecodes

MAX_SPLITS = 32
MAX_SPLIT_ROWS = 4096
"""Query tokens times splits beyond which joining would cost more than splitting gains."""
ENOUGH, AIM = 2, 16
"""Programs for each multiprocessor from which on keys are not split, and how many to aim at where they are."""
ENOUGH_DECODES, AIM_DECODES = 1.75, 4
NARROW_PLACES, NARROW_LAST, WIDE_PLACES = 4, 2.2, 3.2
"""The same for single query tokens. And for each multiprocessor: programs with narrow tiles that it holds, how many of
them must be in their last round for narrow tiles to take less time than wide ones, and programs up to which wide ones
begin all at once."""
LONG_QUERY, LONG_AIM = 64, 1
"""Query tokens from which on joining splits soon costs more than idle multiprocessors, and how many to aim at then."""
EARLIEST, MANY, FEW = (9, 0), 6, 2
"""The compute capability from which a kernel may start before the one in front of it ends; and programs for each
multiprocessor from which on attention does so: fewer would be placed unevenly, beside what is still running. But for a
single token up to so few programs: beside the products of one row, which take little of a multiprocessor, they do."""
CASCADE_PREFIX, CASCADE_TOKENS = 1024, 8
"""Shortest common prefix, and fewest query tokens, that are worth two more kernels."""
CASCADE_AIM, CASCADE_AIM_FEW = 1, 2
"""Programs for each multiprocessor to aim at for a common prefix; and where query tokens are few, whose splits cost
little to join."""


CODES = {torch.int8: "bytes", torch.float8_e4m3fn: "bytes", torch.uint8: "nibbles"}
"""How the kernels read codes with a scale for each token and KV head, by their dtype."""


class Shape(NamedTuple):
    """Sizes of a kernel.

    These are keys of a tile, warps of a program, stages of its pipeline, and most rows (query tokens times query heads
    of a KV head).
    """

    tile: int
    warps: int
    stages: int
    rows: int


DECODE = Shape(64, 2, 4, 64)
WIDE = Shape(128, 4, 3, 64)
SHORT = Shape(64, 4, 3, 64)
PREFILL = Shape(64, 8, 3, 256)
PREFIX = Shape(64, 8, 3, 128)
CODED = Shape(decode_codes.TILE, decode_codes.WARPS, decode_codes.STAGES, 64)
LARGE = Shape(32, 4, 2, 32)
"""For heads above 128, and float32."""


@frozen(kw_only=True)
class Launch:
    """Launch for requests `first` ..

    `end`, in `blocks` blocks of `block_q` query tokens and `splits` splits of the keys.

    Their query tokens are `first_token` .. `first_token + tokens`. `single` means that each has one, `early` that the
    kernel starts while the previous one ends. `cascade` is the part of the keys: "" for all, "prefix" and "rest" where
    all requests share one, "segments" and "own" where groups of requests do. Segments take the place of requests in
    their launch. The results are the parts from `first_part` on of `num_parts`.
    """

    first: int
    end: int
    first_token: int
    tokens: int
    blocks: int
    block_q: int
    splits: int
    single: bool
    early: bool
    shape: Shape
    cascade: str = ""
    first_part: int = 0
    num_parts: int


class Plan(NamedTuple):
    """Plan of one step.

    Values that change between replays of a captured forward are read from the batch's device tensors.

    Results of the launches of one tuple are merged. Each tuple has its own query tokens. `prompts` are requests at the
    end of the batch whose keys are all from this step, and `decodes` are requests of one token each at its front.
    `singles` is the launch in place of all of these for calls with edges.
    """

    batch: AttentionBatch
    launches: tuple[tuple[Launch, ...], ...]
    prompts: Launch | None = None
    decodes: Launch | None = None
    nodes: torch.Tensor | None = None
    singles: Single | None = None

    @property
    def takes_edges(self) -> bool:
        """Whether one launch does the step's attention and what is at its edges."""
        return self.singles is not None


class TritonBackend:
    """Paged attention on a GPU. Implements `AttentionBackend` and `CascadeBackend`."""

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        self._page = context.kernel_block_size
        self._group = layer.num_heads // layer.num_kv_heads
        self._kv_heads = layer.num_kv_heads
        self._exact = context.dtype == "float32"
        self._device, self._on_gpu = context.device, context.device.startswith("cuda")
        cores = 8
        if self._on_gpu:
            cores = torch.cuda.get_device_properties(context.device).multi_processor_count
        self._cores = cores
        self._large = self._exact or max(layer.head_size, layer.head_size_v) > 128
        self._scales = context.kv_scales
        self._codes, self._rotates = "", False
        if context.cache_format != PLAIN:
            codes: torch.dtype = getattr(torch, context.kv_dtype)
            self._codes, self._rotates = CODES[codes], cache_codes.is_rotated(codes)
        self._in_words = decode_codes.codes_of(context)
        self._slopes = slopes_of(context)
        self._invariant = context.batch_invariant
        early = self._on_gpu and torch.cuda.get_device_capability(context.device) >= EARLIEST
        self._early = early
        self._stream = torch.cuda.Stream(self._device) if self._on_gpu else None
        options = context.options if isinstance(context.options, TritonOptions) else TritonOptions()
        self._prompts = PromptAttention(context, self._group) if options.prompts == "step" else None
        self._decodes = _hopper_decodes(context, cores) if options.decodes == "hopper" else None
        serves = (early or not self._on_gpu) and SingleTokens.serves(context)
        self._singles = SingleTokens(context, cores, early=early) if serves else None

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Return True if the prefix is long and read by many. docs/performance.md has the measurement."""
        tokens = int(query_lens.sum())
        few_parts = 2 * tokens <= MAX_SPLIT_ROWS
        return common_prefix_len >= CASCADE_PREFIX and tokens >= CASCADE_TOKENS and len(query_lens) > 1 and few_parts

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = self._planned(batch)
        return plan if batch.tree is None else plan._replace(nodes=node_counts(batch.tree, self._device))

    def _planned(self, batch: AttentionBatch) -> Plan:
        decodes, requests = batch.num_decodes, batch.num_requests
        if self._invariant:
            return Plan(batch, ((self._invariant_launch(batch),),) if batch.num_tokens else ())
        if batch.common_prefix_len:
            return Plan(batch, (self._cascade(batch),))
        if (shared := batch.prefix_groups) is not None and 2 * batch.num_tokens <= MAX_SPLIT_ROWS:
            return Plan(batch, (self._segments(batch, shared),))
        launches, apart = [], None
        if decodes:
            single = self._launch(batch, 0, decodes, 0, decodes, 1)
            if self._decodes is not None and batch.tree is None and self._decodes.takes(decodes):
                apart = single
            else:
                launches.append((single,))
        whole = self._prompts if batch.tree is None else None  # the kernel for whole prompts knows no trees
        fresh = requests if whole is None else whole.first(batch, ENOUGH * self._cores)
        begin, prompts = batch.num_tokens, None
        if fresh < requests:
            begin = int(batch.query_start_loc_cpu[fresh])
        if decodes < fresh and begin > decodes:
            longest = int(np.diff(batch.query_start_loc_cpu[decodes : fresh + 1]).max())
            launches.append((self._launch(batch, decodes, fresh, decodes, begin - decodes, longest),))
        if begin < batch.num_tokens:
            prompts = self._launch(batch, fresh, requests, begin, batch.num_tokens - begin, batch.max_query_len)
        singles = None if self._singles is None or apart is not None else self._singles.launch_of(batch)
        return Plan(batch, tuple(launches), prompts, apart, singles=singles)

    def _launch(
        self, batch: AttentionBatch, first: int, end: int, first_token: int, tokens: int, query_len: int
    ) -> Launch:
        single = query_len == 1 and tokens == end - first
        shape = self._decode_shape(tokens) if single else self._shape(query_len, tokens)
        block_q = self._block_q(query_len, shape)
        blocks = tokens if single else tokens // block_q + end - first
        programs, splits = blocks * self._kv_heads, 1
        enough, aim = (ENOUGH_DECODES, AIM_DECODES) if single else (ENOUGH, AIM)
        if programs < enough * self._cores:
            aim = LONG_AIM if query_len >= LONG_QUERY else aim
            splits = self._splits(aim, programs, batch.max_seq_len, shape, tokens)
        alone = single and tokens == 1 and 1 < splits <= FEW * self._cores / programs
        return Launch(
            first=first,
            end=end,
            first_token=first_token,
            tokens=tokens,
            blocks=blocks,
            block_q=block_q,
            splits=splits,
            single=single,
            early=self._early and (programs >= MANY * self._cores or alone),
            shape=shape,
            num_parts=splits,
        )

    def _invariant_launch(self, batch: AttentionBatch) -> Launch:
        """Return a launch with the same tiles in the same order for a token in any batch.

        Blocks have one size, and keys are not split. Rows of a block are independent, and tiles of keys that a row does
        not see do not change it in any bit.
        """
        shape = LARGE if self._large else SHORT
        block_q = self._block_q(shape.rows, shape)
        requests, tokens = batch.num_requests, batch.num_tokens
        return Launch(
            first=0,
            end=requests,
            first_token=0,
            tokens=tokens,
            blocks=tokens // block_q + requests,
            block_q=block_q,
            splits=1,
            single=False,
            early=False,
            shape=shape,
            num_parts=1,
        )

    def _cascade(self, batch: AttentionBatch) -> tuple[Launch, Launch]:
        """Return launches for the common prefix with all query tokens, and for the rest request by request.

        A capture has the longest prefix, and its replays may have a short prefix and a long rest.
        """
        keys, tokens, requests = batch.common_prefix_len, batch.num_tokens, batch.num_requests
        behind = evolve(batch, max_seq_len=max(batch.max_seq_len - keys, batch.max_seq_len // 4))
        rest = self._launch(behind, 0, requests, 0, tokens, batch.max_query_len)
        shape = LARGE if self._large else PREFIX if tokens * self._group > SHORT.rows else SHORT
        block_q = self._block_q(tokens, shape)
        blocks = triton.cdiv(tokens, block_q)
        splits = self._splits(_cascade_aim(shape), blocks * self._kv_heads, keys, shape, tokens)
        parts = rest.splits + splits
        prefix = evolve(
            rest,
            blocks=blocks,
            block_q=block_q,
            splits=splits,
            single=False,
            early=False,
            shape=shape,
            cascade="prefix",
            first_part=rest.splits,
            num_parts=parts,
        )
        return prefix, evolve(rest, cascade="rest", num_parts=parts)

    def _segments(self, batch: AttentionBatch, shared: PrefixGroups) -> tuple[Launch, Launch]:
        """Return launches for the segments of groups, and for the rest request by request.

        Their sizes hold for all replays of a captured shape: programs of segments that a step does not have end at
        once. How many splits fill the device is estimated for groups that fill their blocks of queries.
        """
        tokens, requests, segments = batch.num_tokens, batch.num_requests, len(shared.segments_cpu)
        own = int((batch.seq_lens_cpu[:requests] - shared.own_cpu).max(initial=0))
        rest = self._launch(
            evolve(batch, max_seq_len=max(own, batch.max_seq_len // 4)), 0, requests, 0, tokens, batch.max_query_len
        )
        shape = LARGE if self._large else PREFIX if tokens * self._group > SHORT.rows else SHORT
        block_q = self._block_q(tokens, shape)
        longest = int((shared.segments_cpu[:, 2] - shared.segments_cpu[:, 1]).max())
        splits = self._splits(
            _cascade_aim(shape), triton.cdiv(tokens, block_q) * self._kv_heads, longest, shape, shared.levels * tokens
        )
        parts = rest.splits + shared.levels * splits
        prefixes = evolve(
            rest,
            first=0,
            end=segments,
            blocks=len(shared.tokens_cpu) // block_q + segments,
            block_q=block_q,
            splits=splits,
            single=False,
            early=False,
            shape=shape,
            cascade="segments",
            first_part=rest.splits,
            num_parts=parts,
        )
        return prefixes, evolve(rest, cascade="own", num_parts=parts)

    def _shape(self, query_len: int, tokens: int) -> Shape:
        """Return the kernel's sizes for requests of up to this many query tokens. Large blocks must fill the device."""
        if self._large:
            return LARGE
        if query_len == 1:
            return DECODE
        programs = tokens * self._group // PREFILL.rows * self._kv_heads
        return PREFILL if query_len * self._group > SHORT.rows and programs >= ENOUGH * self._cores else SHORT

    def _decode_shape(self, tokens: int) -> Shape:
        """Return the kernel's sizes for single query tokens, by the number of programs for each multiprocessor."""
        if self._in_words:
            return CODED
        if self._large:
            return LARGE
        load = tokens * self._kv_heads / self._cores
        last = load % NARROW_PLACES or NARROW_PLACES
        narrow = load < ENOUGH_DECODES or (load > WIDE_PLACES and last >= NARROW_LAST)
        return DECODE if narrow else WIDE

    def _block_q(self, query_len: int, shape: Shape) -> int:
        """Return the query tokens of a block, a power of two."""
        most: int = 1 << (max(1, shape.rows // self._group).bit_length() - 1)
        needed: int = triton.next_power_of_2(query_len)
        return min(needed, most)

    def _splits(self, aim: int, programs: int, keys: int, shape: Shape, tokens: int) -> int:
        tiles: int = triton.cdiv(keys, shape.tile)
        wanted = round(aim * self._cores / programs)
        return max(1, min(wanted, tiles, MAX_SPLITS, MAX_SPLIT_ROWS // tokens))

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, plan: Plan
    ) -> None:
        tokens = plan.batch.num_tokens
        if not tokens:
            return
        key, value = (cache_codes.turned(t) if self._rotates else t for t in (key, value))
        key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
        strides: tuple[int, ...] = (key.stride(0), value.stride(0), key.stride(1), value.stride(1))
        strides += (*cache.key.stride()[:3], *cache.value.stride()[:3])
        sizes = {
            "num_heads": layer.num_kv_heads,
            "size": layer.head_size,
            "size_v": layer.head_size_v,
            "padded_heads": triton.next_power_of_2(layer.num_kv_heads),
            "padded": max(2, triton.next_power_of_2(layer.head_size)),
            "padded_v": max(2, triton.next_power_of_2(layer.head_size_v)),
            "page": self._page,
        }
        slots = plan.batch.slot_mapping
        if isinstance(cache, CacheTensors):
            scales = cache["key_scale"], cache["value_scale"]
            strides += (*scales[0].stride(), *scales[1].stride())
            most = cache_codes.MOST[cache.key.dtype]
            kernels.encode[(tokens,)](
                key, value, cache.key, cache.value, slots, *scales, *strides, **sizes, most=most, codes=self._codes
            )
            return
        factors, dtype = self._scales.get(layer.index), cache.key.dtype
        kernels.store[(tokens,)](
            key,
            value,
            cache.key,
            cache.value,
            slots,
            *(factors or (key, value)),
            *strides,
            **sizes,
            most=torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
            has_scales=factors is not None,
        )

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
        edges: AttentionEdges | None = None,
    ) -> torch.Tensor:
        batch = plan.batch
        if out.shape[0] > batch.num_tokens:
            out[batch.num_tokens :].zero_()
        if edges is not None:
            if self._singles is not None and plan.singles is not None and out.stride(2) == 1:
                states = query, key, value
                return self._singles.attend(layer, states, cache, batch, plan.singles, out, sinks, self._slopes, edges)
            query, key = turned(query, key, edges)  # which the plan has left to the model
            self.write(layer, key, value, cache, plan)
        lse = torch.empty((layer.num_heads, out.shape[0]), dtype=torch.float32, device=out.device)
        query = cache_codes.rotate(query) if self._rotates else query
        query = query if query.stride(2) == 1 else query.contiguous()
        target = out
        if self._rotates or out.stride(2) != 1:
            dtype = torch.float32 if self._rotates else out.dtype
            target = torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
        if (decodes := plan.decodes) is not None and not (
            self._decodes is not None and self._decodes.attend(layer, query, cache, batch, decodes.end, target, lse)
        ):
            self._attend(layer, query, cache, plan, (decodes,), target, lse, sinks)
        for launches in plan.launches:
            self._attend(layer, query, cache, plan, launches, target, lse, sinks)
        if (prompts := plan.prompts) is not None:
            if self._prompts is not None and self._prompts.takes(layer, key, value, cache):
                self._prompts.forward(layer, query, key, value, batch, prompts, target, lse, sinks)
            else:
                self._attend(layer, query, cache, plan, (prompts,), target, lse, sinks)
        if target is not out:
            result = target[: batch.num_tokens]
            out[: batch.num_tokens] = cache_codes.rotate(result) if self._rotates else result
        return lse

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        launches: tuple[Launch, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        padded_v = _padded_v(layer)
        count = launches[0].num_parts
        parts, norms = lse, lse  # not read unless split
        if count > 1:
            rows = (plan.batch.num_tokens, layer.num_heads, count)
            parts = torch.empty((*rows, padded_v), dtype=torch.float32, device=out.device)
            norms = torch.empty((*rows, 2), dtype=torch.float32, device=out.device)
        with self._beside(launches):  # a prefix has operations for few programs, the rest reads: both fill the device
            for launch in launches[:-1]:
                self._parts(layer, query, cache, plan, launch, out, lse, parts, norms, sinks)
        self._parts(layer, query, cache, plan, launches[-1], out, lse, parts, norms, sinks)
        if self._stream is not None and len(launches) > 1:
            torch.cuda.current_stream().wait_stream(self._stream)
        shared = plan.batch.prefix_groups if launches[0].cascade == "segments" else None
        if count > 1:
            kernels.join[(launches[0].tokens, layer.num_heads)](
                out,
                lse,
                parts,
                norms,
                lse if sinks is None else sinks,
                lse if shared is None else shared.depths,
                launches[-1].splits,
                launches[0].splits,
                launches[0].first_token,
                out.stride(0),
                out.stride(1),
                lse.stride(0),
                layer.num_heads,
                count,
                size_v=layer.head_size_v,
                padded_v=padded_v,
                padded_splits=triton.next_power_of_2(count),
                has_sinks=sinks is not None,
                has_depths=shared is not None,
                **_start(early=self._early and len(launches) == 1),
            )

    @contextmanager
    def _beside(self, launches: tuple[Launch, ...]) -> Iterator[None]:
        """Launch beside the last of several launches, on a stream of the backend's own. The caller waits for it."""
        if self._stream is None or len(launches) == 1:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def _parts(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        cache: LayerCache,
        plan: Plan,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
        parts: torch.Tensor,
        norms: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        batch, factors = plan.batch, self._scales.get(layer.index)
        scales: tuple[torch.Tensor, torch.Tensor] = factors or (lse, lse)
        of_scales: tuple[int, ...] = (0,) * 6
        if isinstance(cache, CacheTensors):
            scales = cache["key_scale"], cache["value_scale"]
            of_scales = (*scales[0].stride(), *scales[1].stride())
        shared = batch.prefix_groups if launch.cascade in ("segments", "own") else None
        is_prefix, starts, prefix = launch.cascade in ("prefix", "segments"), batch.query_start_loc, batch.common_prefix
        if shared is not None:
            starts, prefix = (shared.starts, shared.segments) if is_prefix else (starts, shared.own)
        tree = None if is_prefix else batch.tree
        words = None
        if self._in_words and launch.single and tree is None:
            words = decode_codes.in_words(cache.key, cache.value)
        keys, values = (cache.key, cache.value) if words is None else words
        tensors = (
            query,
            keys,
            values,
            out,
            lse,
            parts,
            norms,
            batch.block_table,
            batch.seq_lens,
            starts,
            lse if sinks is None else sinks,
            lse if self._slopes is None else self._slopes,
        )
        numbers = (
            layer.scale if layer.soft_cap else layer.scale * kernels.LOG2E,
            layer.soft_cap or 1.0,
            query.stride(0),
            query.stride(1),
            *keys.stride()[:3],
            *values.stride()[:3],
            *of_scales,
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            batch.block_table.stride(0),
            layer.num_heads,
            launch.splits,
            launch.first_part,
            launch.num_parts,
            layer.window or 0,
        )
        sizes = {
            "group": self._group,
            "size": layer.head_size,
            "size_v": layer.head_size_v,
            "page": self._page,
            "tile": launch.shape.tile,
            "block_m": max(16, triton.next_power_of_2(launch.block_q * self._group)),
            "has_window": layer.window is not None,
            "has_cap": layer.soft_cap is not None,
            "has_sinks": sinks is not None,
            "has_slopes": self._slopes is not None,
            "split": launch.num_parts > 1,
            "cascade": launch.cascade,
            "num_warps": launch.shape.warps,
            "num_stages": launch.shape.stages,
            **_start(early=launch.early),
        }
        prefix = lse if prefix is None else prefix
        grid = launch.blocks * layer.num_kv_heads, launch.splits
        if words is not None:
            padded, padded_v = decode_codes.sizes_of(layer, self._in_words)
            decode_codes.decode_codes[grid](
                *tensors,
                prefix,
                *scales,
                launch.first,
                *numbers,
                padded=padded,
                padded_v=padded_v,
                parts_row=_padded_v(layer),
                codes=self._in_words,
                scaled="token" if self._codes else "layer" if factors else "",
                **sizes,
            )
            return
        nodes, sees, depths = (lse,) * 3 if tree is None else (plan.nodes, tree.sees.view(torch.uint8), tree.depths)
        kernels.attend[grid](
            *tensors,
            nodes,
            sees,
            depths,
            depths.shape[-1],
            depths.shape[-1] if depths.ndim > 1 else 0,
            launch.first,
            launch.end,
            prefix,
            lse if shared is None else shared.tokens,
            *scales,
            *numbers,
            padded=max(16, triton.next_power_of_2(layer.head_size)),
            padded_v=_padded_v(layer),
            block_q=launch.block_q,
            single=launch.single,
            has_scales=factors is not None,
            causal=batch.causal and not is_prefix,
            has_tree=tree is not None,
            exact=self._exact,
            codes=self._codes,
            peel=launch.shape in (PREFILL, PREFIX) or tree is not None,  # in verification of chains it costs a tenth
            **sizes,
        )


def _cascade_aim(shape: Shape) -> int:
    """Return the programs of a common prefix for each multiprocessor."""
    return CASCADE_AIM if shape is PREFIX else CASCADE_AIM_FEW


def _hopper_decodes(context: AttentionContext, cores: int) -> HopperDecodes | None:
    """Return the launcher of Hopper's own kernel for single query tokens, or None if it does not support the group."""
    if not device_has_hopper_kernels(context.device):
        return None
    from slotline.backends.triton.decode_hopper import HopperDecodes

    return HopperDecodes(context, cores) if HopperDecodes.serves(context) else None


def _start(*, early: bool) -> dict[str, bool]:
    """Return a launch's options. Programmatic dependent launch is set only if the device has it."""
    return {"early": True, "launch_pdl": True} if early else {"early": False}


def _padded_v(layer: AttentionLayer) -> int:
    """Return the padded size of a value head in the kernels."""
    return max(16, int(triton.next_power_of_2(layer.head_size_v)))
