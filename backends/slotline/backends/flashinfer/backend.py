"""FlashInfer's paged kernels as an attention backend (Ye et al. 2025, FlashInfer)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slotline.backends.flashinfer import FlashInferOptions
from slotline.backends.flashinfer.modules import compile_kernels
from slotline.backends.flashinfer.pages import join
from slotline.backends.flashinfer.plans import Planner
from slotline.backends.sinks import add_sinks
from slotline.backends.triton.backend import Plan as StorePlan
from slotline.backends.triton.backend import TritonBackend
from slotline.kernels.triton_launcher import next_power_of_2
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.errors import ConfigError

LONG_QUERY = 64
"""Mean query tokens from which `auto` takes fa3: its tiles hold 128 and it does not split keys."""
CASCADE_PREFIX, CASCADE_READS = 1024, 65_536
"""Shared tokens, and these times the requests that share them, from which on a common prefix is served apart."""


class Part(NamedTuple):
    """Query tokens `first` .. `end` of a step, and the planned wrapper that computes them."""

    first: int
    end: int
    wrapper: Any


class Plan(NamedTuple):
    """One step."""

    store: StorePlan
    parts: tuple[Part, ...]
    prefix: Part | None = None


class FlashInferBackend:
    """Paged attention by FlashInfer. Implements `AttentionBackend` and `CascadeBackend`.

    Requests at the front of a batch that decode go to the decode wrapper, the others to the prefill wrapper.

    Raises:
        ConfigError: if `prefill = "fa3"` cannot run here.
        PluginError: if FlashInfer's kernels cannot be compiled.
    """

    def __init__(self, context: AttentionContext) -> None:
        options = context.options or FlashInferOptions()
        self._store = TritonBackend(context)
        self._hopper = _takes_fa3(options.prefill, context)
        self._long = 0 if options.prefill == "fa3" else LONG_QUERY
        compile_kernels(context, ("fa2", "fa3") if self._hopper else ("fa2",))  # decode runs on fa2's
        self._planner = Planner(context)

    def plan(self, batch: AttentionBatch) -> Plan:
        decodes, parts = batch.num_decodes, []
        if decodes:
            parts.append(Part(0, decodes, self._planner.decode(batch, decodes)))
        if batch.num_tokens > decodes:
            wrapper = self._planner.prefill(batch, decodes, self._kernel(batch))
            parts.append(Part(decodes, batch.num_tokens, wrapper))
        prefix = None
        if batch.common_prefix_len:
            long = self._hopper and batch.num_tokens >= self._long
            prefix = Part(0, batch.num_tokens, self._planner.prefix(batch, "fa3" if long else "fa2"))
        return Plan(StorePlan(batch, ()), tuple(parts), prefix)

    def use_cascade(
        self, common_prefix_len: int, query_lens: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64]
    ) -> bool:
        """Return True if the prefix is long and read by many. docs/performance.md has the measurement."""
        return common_prefix_len >= CASCADE_PREFIX and common_prefix_len * len(query_lens) >= CASCADE_READS

    def _kernel(self, batch: AttentionBatch) -> str:
        """Return fa3 for long queries. It gives NaN for a padded request, which has no key."""
        rest = batch.num_decodes
        mean = (batch.num_tokens - rest) / (batch.num_requests - rest)
        return "fa3" if self._hopper and mean >= self._long and batch.seq_lens_cpu[rest:].all() else "fa2"

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        self._store.write(layer, key, value, cache, plan.store)

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
        tokens = plan.store.batch.num_tokens
        if out.shape[0] > tokens:
            out[tokens:].zero_()
        lse = torch.empty((out.shape[0], layer.num_heads), dtype=torch.float32, device=out.device)
        query = query if query.stride(2) == 1 else query.contiguous()
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        pages = (cache.key, cache.value)
        for first, end, wrapper in plan.parts:
            wrapper.run(query[first:end], pages, out=target[first:end], lse=lse[first:end], return_lse=True)
        if plan.prefix is not None:
            self._join_prefix(plan.prefix, query, pages, target, lse)
        if sinks is not None:
            lse[:tokens] = add_sinks(target[:tokens], lse[:tokens], sinks, base="2")
        if target is not out:
            out[:tokens] = target[:tokens]
        return lse.T

    def _join_prefix(
        self,
        prefix: Part,
        query: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge attention over the common prefix with attention over the keys after it."""
        tokens, heads, size = prefix.end, out.shape[1], out.shape[2]
        apart, apart_lse = out.new_empty((tokens, heads, size)), lse.new_empty((tokens, heads))
        prefix.wrapper.run(query[:tokens], pages, out=apart, lse=apart_lse, return_lse=True)
        width = next_power_of_2(size)
        join[(tokens * heads,)](out, lse, apart, apart_lse, heads, size, out.stride(0), out.stride(1), width=width)


def _takes_fa3(asked: str, context: AttentionContext) -> bool:
    """Return True if fa3 is allowed and runs."""
    hopper = torch.cuda.get_device_capability(context.device)[0] == 9
    runs = hopper and context.dtype == context.kv_dtype
    if asked == "fa3" and not runs:
        raise ConfigError(
            f"backend.flashinfer.prefill = 'fa3' runs on Hopper with a cache in the dtype of the model, this is "
            f"{torch.cuda.get_device_name(context.device)} with a cache in {context.kv_dtype}",
            fix="set it to 'auto' or 'fa2'",
        )
    return runs and asked != "fa2"
