"""Choice of the requests for the kernel for whole prompts, and its launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from slotline.backends.triton.kernels import LOG2E
from slotline.backends.triton.prompt_kernels import attend_prompts
from slotline.kernels.gluon_support import device_has_hopper_kernels
from slotline.kernels.graph_capture_state import is_replayed
from slotline.kernels.triton_launcher import Boxes, Launcher, next_power_of_2
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, LayerCache

if TYPE_CHECKING:
    from slotline.backends.triton.backend import Launch
    from slotline.backends.triton.prompt_hopper import HopperPrompts

COPY_ENGINE = (9, 0)
"""The compute capability from which a kernel can fetch a box of a tensor."""
SIZES = (64, 128)
"""Head sizes whose boxes and results fit."""


class PromptShape(NamedTuple):
    """Rows of a block (query tokens times query heads of a KV head), keys of a tile, warps, stages of the pipeline."""

    rows: int
    tile: int
    warps: int
    stages: int


SHAPE = PromptShape(64, 64, 4, 3)


class PromptAttention:
    """Attention of requests that have nothing in the cache yet, over the step's new keys and values.

    Args:
        context: of the attention group, whose layers are equal in all that matters here.
        group: query heads of a KV head.
    """

    def __init__(self, context: AttentionContext, group: int) -> None:
        layer = context.layers[0]
        fits = layer.head_size == layer.head_size_v and layer.head_size in SIZES and group <= SHAPE.rows
        plain = layer.window is None and layer.soft_cap is None and layer.alibi_slopes is None and not context.kv_scales
        self._serves = fits and plain and context.dtype in ("bfloat16", "float16")
        if context.device.startswith("cuda"):
            self._serves &= torch.cuda.get_device_capability(context.device) >= COPY_ENGINE
        self._launch, self._boxes = Launcher(attend_prompts), Boxes((SHAPE.tile, layer.head_size))
        self._group, self._kv_heads = group, layer.num_kv_heads
        self._block_q = 1 << ((SHAPE.rows // group).bit_length() - 1) if self._serves else 1
        self._hopper = _hopper_kernel(context, group) if self._serves else None

    def first(self, batch: AttentionBatch, programs: int) -> int:
        """Return the first of the requests at the end of a batch that use this kernel, `num_requests` for none.

        They must fill a minimum number of programs, because large blocks are slower for a few tokens.
        """
        decodes, requests = batch.num_decodes, batch.num_requests
        if not self._serves or not batch.causal or batch.max_query_len == 1:
            return requests
        starts = batch.query_start_loc_cpu
        cached = np.flatnonzero(batch.seq_lens_cpu[decodes:requests] != np.diff(starts)[decodes:requests])
        first = decodes + (int(cached[-1]) + 1 if len(cached) else 0)
        tokens = batch.num_tokens - int(starts[first])
        return first if tokens // self._block_q * self._kv_heads >= programs else requests

    def takes(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: LayerCache) -> bool:
        """Return True if these tensors equal the cache's contents, and boxes of them can be loaded.

        False in a graph, because its replays may have other requests, with keys in the cache.
        """
        if layer.shares_kv_with is not None or cache.key.dtype != key.dtype or cache.value.dtype != value.dtype:
            return False
        if is_replayed():
            return False
        return all(map(_is_boxed, (key, value)))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
        launch: Launch,
        out: torch.Tensor,
        lse: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Compute the launch's attention into `out` [num_tokens, heads, size] and `lse` [heads, num_tokens]."""
        tensors = layer, query, key, value, batch, launch, out, lse
        if self._hopper is not None and sinks is None and self._hopper.attend(*tensors):
            return
        blocks = launch.tokens // self._block_q + launch.end - launch.first
        self._launch(
            (blocks * self._kv_heads,),
            query,
            key,
            value,
            self._boxed(key),
            self._boxed(value),
            out,
            lse,
            batch.query_start_loc,
            lse if sinks is None else sinks,
            launch.first,
            launch.end,
            layer.scale * LOG2E,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            out.stride(0),
            out.stride(1),
            lse.stride(0),
            self._kv_heads,
            self._group,
            layer.head_size,
            SHAPE.tile,
            self._block_q,
            max(16, next_power_of_2(self._block_q * self._group)),
            sinks is not None,
            num_warps=SHAPE.warps,
            num_stages=SHAPE.stages,
        )

    def _boxed(self, states: torch.Tensor) -> Any:
        """Return boxes of `SHAPE.tile` tokens and one head out of [num_tokens, heads, size]."""
        tokens, heads, size = states.shape
        return self._boxes(states, (tokens, heads * size), (states.stride(0), 1))


def _hopper_kernel(context: AttentionContext, group: int) -> HopperPrompts | None:
    """Return the launcher of Hopper's own kernel, or None if it does not support the group. It has no sinks."""
    if group & (group - 1) or not device_has_hopper_kernels(context.device):
        return None
    from slotline.backends.triton.prompt_hopper import SIZE, HopperPrompts

    if context.layers[0].head_size != SIZE:
        return None
    return HopperPrompts(group, context.device, torch.cuda.get_device_properties(context.device).multi_processor_count)


def _is_boxed(states: torch.Tensor) -> bool:
    """Return True if the heads of [num_tokens, heads, size] are contiguous, at multiples of 16 bytes.

    The tokens of an expanded tensor are not.
    """
    _, heads, size = states.shape
    aligned = states.data_ptr() % 16 == 0 and states.stride(0) * states.element_size() % 16 == 0
    return aligned and states.stride(0) > 0 and states.stride(2) == 1 and (heads == 1 or states.stride(1) == size)
