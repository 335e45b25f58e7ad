"""FlashInfer's wrappers, planned without waiting for the device.

A plan of FlashInfer is host code. It writes the schedule of a step to a pinned buffer and copies it to the device. A
second plan must not write there before that copy has finished (both here and for our own arrays: two buffers in turn,
each with an event). In a captured graph the schedule is read from a buffer of fixed address. Wrappers of decode steps
are therefore created once for each number of requests, share those buffers, and are planned again before each replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    fast_decode_plan,
)

from slotline.backends.flashinfer.pages import Pages, line_up, pages_of, prefix_pages
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext

SCHEDULE_BYTES = 8 << 20
"""What FlashInfer itself reserves for the schedule of a plan."""


class Pinned:
    """Pinned host buffers used in turn, each again only once the copy from it is over.

    Args:
        size: bytes of each.
        count: how many.
    """

    def __init__(self, size: int, count: int = 2) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    def take(self) -> torch.Tensor:
        """Return the next buffer, after waiting for the last copy from it, but not for the device."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def copied(self) -> None:
        """Record that the copy from the last buffer has been launched."""
        self._copied[self._turn].record()


class Buffers:
    """The device side of page lists, at fixed addresses, for up to `rows` requests of `width` pages each."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._meta = torch.zeros(3 * rows + 1, dtype=torch.int32, device=device)
        self._pinned = Pinned(4 * self._meta.numel())
        self.indices = torch.zeros(rows * width, dtype=torch.int32, device=device)
        self.schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=device)
        self.schedule_pinned = Pinned(SCHEDULE_BYTES)

    def indptr(self, rows: int) -> torch.Tensor:
        return self._meta[: rows + 1]

    def last_page_len(self, rows: int) -> torch.Tensor:
        return self._meta[rows + 1 : 2 * rows + 1]

    def fill(self, pages: Pages, table: torch.Tensor) -> None:
        """Copy the lists to the device and concatenate the pages there, without waiting for the device."""
        rows = len(pages.skipped)
        packed = np.concatenate([pages.indptr, pages.last_page_len, pages.skipped])
        host = self._pinned.take().view(torch.int32)[: len(packed)]
        host.numpy()[:] = packed
        self._meta[: len(packed)].copy_(host, non_blocking=True)
        self._pinned.copied()
        skipped = self._meta[2 * rows + 1 : 3 * rows + 1]
        line_up[(rows,)](table, table.stride(0), self.indptr(rows), skipped, self.indices, block=256)


class Planner:
    """Plans of one attention group.

    Args:
        context: the group's context. Its layers need the same plans.
    """

    def __init__(self, context: AttentionContext) -> None:
        layer = context.layers[0]
        self._page, self._window = context.kernel_block_size, layer.window
        self._shape = (layer.num_heads, layer.num_kv_heads, layer.head_size, context.kernel_block_size)
        self._device = torch.device(context.device)
        self._fixed = {
            "window_left": -1 if layer.window is None else layer.window - 1,
            "logits_soft_cap": layer.soft_cap,
            "sm_scale": layer.scale,
            "q_data_type": getattr(torch, context.dtype),
            "kv_data_type": getattr(torch, context.kv_dtype),
        }
        width = -(-context.max_model_len // self._page) + 1
        self._workspace = torch.zeros(workspace_bytes(context), dtype=torch.uint8, device=self._device)
        self._decodes = Buffers(context.max_requests, width, self._device)
        self._others = Buffers(context.max_requests, width, self._device)
        self._prefix = Buffers(1, width, self._device)
        self._by_rows: dict[int, Any] = {}
        self._prefix_by_rows: dict[int, Any] = {}
        self._by_kernel: dict[tuple[str, bool], Any] = {}

    def decode(self, batch: AttentionBatch, end: int) -> Any:
        """Return a planned decode wrapper for the first `end` requests, one query token each."""
        buffers, pages = self._decodes, pages_of(batch, 0, end, self._page, self._window)
        buffers.fill(pages, batch.block_table[:end])
        indptr, last = torch.from_numpy(pages.indptr), torch.from_numpy(pages.last_page_len)
        wrapper = self._by_rows.get(end)
        if wrapper is None:
            wrapper = self._by_rows[end] = BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=buffers.indptr(end),
                paged_kv_indices_buffer=buffers.indices,
                paged_kv_last_page_len_buffer=buffers.last_page_len(end),
                backend="fa2",
            )
            wrapper._int_workspace_buffer = buffers.schedule
            wrapper._pin_memory_int_workspace_buffer = buffers.schedule_pinned.take()
            wrapper.plan(indptr, buffers.indices[:0], last, *self._shape, **self._fixed)
        else:  # without the checks of `plan`, which walk over the requests one by one
            wrapper._pin_memory_int_workspace_buffer = buffers.schedule_pinned.take()
            fast_decode_plan(
                wrapper,
                indptr,
                buffers.indices[:0],
                last,
                *self._shape,
                **self._fixed,
                global_override_indptr_cpu=indptr,
            )
        buffers.schedule_pinned.copied()
        return wrapper

    def prefill(self, batch: AttentionBatch, first: int, kernel: str) -> Any:
        """Return a planned prefill wrapper for the requests from `first` on, for eager calls."""
        end = batch.num_requests
        pages = pages_of(batch, first, end, self._page, self._window)
        self._others.fill(pages, batch.block_table[first:end])
        starts = batch.query_start_loc_cpu[first : end + 1] - batch.query_start_loc_cpu[first]
        return self._planned(self._others, pages, starts.astype(np.int32), kernel, batch.causal)

    def prefix(self, batch: AttentionBatch, kernel: str) -> Any:
        """Return a planned prefill wrapper for all query tokens over the common prefix, which each of them sees whole.

        A decode step's wrapper uses `fa2` and may be captured. A prompt with a fixed number of query tokens has the
        same tiles for any keys, and a graph's plan always splits them over the same number of places.
        """
        pages = prefix_pages(batch.common_prefix_len, self._page)
        self._prefix.fill(pages, batch.block_table[:1])
        rows = batch.num_tokens
        starts = np.array([0, rows], np.int32)
        if rows > batch.num_decodes:
            return self._planned(self._prefix, pages, starts, kernel, causal=False)
        wrapper = self._prefix_by_rows.get(rows)
        if wrapper is None:
            wrapper = self._prefix_by_rows[rows] = BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=torch.from_numpy(starts).to(self._device),
                paged_kv_indptr_buf=self._prefix.indptr(1),
                paged_kv_indices_buf=self._prefix.indices,
                paged_kv_last_page_len_buf=self._prefix.last_page_len(1),
                backend="fa2",
            )
            wrapper._int_workspace_buffer = self._prefix.schedule
        return self._plan(wrapper, self._prefix, self._prefix.indices[:0], pages, starts, causal=False)

    def _planned(self, buffers: Buffers, pages: Pages, starts: npt.NDArray[np.int32], kernel: str, causal: bool) -> Any:
        key = kernel, buffers is self._prefix  # both may be planned for one step
        wrapper = self._by_kernel.get(key)
        if wrapper is None:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=kernel)
            wrapper._int_workspace_buffer = buffers.schedule
            self._by_kernel[key] = wrapper
        indices = buffers.indices[: int(pages.indptr[-1])]
        return self._plan(wrapper, buffers, indices, pages, starts, causal)

    def _plan(
        self,
        wrapper: Any,
        buffers: Buffers,
        indices: torch.Tensor,
        pages: Pages,
        starts: npt.NDArray[np.int32],
        causal: bool,
    ) -> Any:
        wrapper._pin_memory_int_workspace_buffer = buffers.schedule_pinned.take()
        wrapper.plan(
            torch.from_numpy(starts),
            torch.from_numpy(pages.indptr),
            indices,
            torch.from_numpy(pages.last_page_len),
            *self._shape,
            **self._fixed,
            causal=causal,
            seq_lens=torch.from_numpy(pages.lens),
            max_token_per_sequence=int(np.diff(starts).max()),
        )
        buffers.schedule_pinned.copied()
        return wrapper


def workspace_bytes(context: AttentionContext) -> int:
    """Return the bytes for the partial results of split keys, float32, by FlashInfer's own rule.

    There is a tile of query rows for each place of its schedule, which has two places for each multiprocessor and, in a
    graph, at least one for each request.
    """
    layer = context.layers[0]
    group = layer.num_heads // layer.num_kv_heads
    places = 2 * torch.cuda.get_device_properties(context.device).multi_processor_count // layer.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else 128
    decode = tile * max(places, -(-context.max_requests * group // tile) + context.max_requests - 1)
    rows = max(decode, 128 * places)
    return layer.num_heads * rows * (layer.head_size_v + 1) * 4 + (1 << 20)
