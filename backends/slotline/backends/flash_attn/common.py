"""Common parts of the versions of FlashAttention: the division of a step into calls, and the use of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from slotline.backends.sinks import add_sinks
from slotline.backends.triton.backend import Plan as StorePlan
from slotline.backends.triton.backend import TritonBackend
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache


class Part(NamedTuple):
    """Requests `first` .. `end` of a step and their query tokens, `first_token` .. `end_token`.

    Attributes:
        query_len: query tokens of each request. 0 if they differ, which requires the two prefix sums query_starts and
            key_starts, [end - first + 1] int32, and `longest`, the most query tokens of one request.
    """

    first: int
    end: int
    first_token: int
    end_token: int
    query_len: int
    query_starts: torch.Tensor | None = None
    key_starts: torch.Tensor | None = None
    longest: int = 0


class Plan(NamedTuple):
    """One step. A replayed part reads lengths and block tables from the batch's tensors on the device."""

    store: StorePlan
    parts: tuple[Part, ...]


class FlashBackend(ABC):
    """Paged attention by FlashAttention. Implements `AttentionBackend`. A version adds its calls.

    Batches of equal query lengths take one call, which splits keys over the device. In other batches the decoding
    requests at the front take one call, and the rest another.
    """

    def __init__(self, context: AttentionContext) -> None:
        self._store = TritonBackend(context)

    def plan(self, batch: AttentionBatch) -> Plan:
        return Plan(StorePlan(batch, ()), tuple(_parts(batch)))

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
        batch = plan.store.batch
        if out.shape[0] > batch.num_tokens:
            out[batch.num_tokens :].zero_()
        lse = torch.empty((out.shape[0], layer.num_heads), dtype=torch.float32, device=out.device)
        for part in plan.parts:
            tokens = slice(part.first_token, part.end_token)
            found, norms = self._attend(layer, query[tokens], cache, batch, part)
            lse[tokens] = norms if sinks is None else add_sinks(found, norms, sinks)
            out[tokens] = found
        return lse.T

    @abstractmethod
    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, cache: KVCache, batch: AttentionBatch, part: Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a part's attention [tokens, num_heads, head_size] and natural log-sum-exp [tokens, num_heads]."""


def shared_arguments(layer: AttentionLayer, batch: AttentionBatch) -> dict[str, Any]:
    """Return the common arguments of all calls of all versions."""
    return {
        "softmax_scale": layer.scale,
        "causal": batch.causal,
        "window_size": (-1, -1) if layer.window is None else (layer.window - 1, 0),
        "softcap": layer.soft_cap or 0.0,
    }


def _parts(batch: AttentionBatch) -> list[Part]:
    requests, tokens, longest = batch.num_requests, batch.num_tokens, batch.max_query_len
    if tokens == 0:
        return []
    counts = np.diff(batch.query_start_loc_cpu[: requests + 1])
    if (counts == longest).all():
        return [Part(0, requests, 0, tokens, longest)]
    first, parts = batch.num_decodes, []
    if first:
        parts.append(Part(0, first, 0, first, 1))
    if tokens > first:
        query_starts = batch.query_start_loc[first : requests + 1] - first
        key_starts = torch.zeros_like(query_starts)
        torch.cumsum(batch.seq_lens[first:requests], 0, dtype=torch.int32, out=key_starts[1:])
        # At least 2: for 1 the library takes every request to have a token, and here some have none.
        parts.append(Part(first, requests, first, tokens, 0, query_starts, key_starts, max(longest, 2)))
    return parts
