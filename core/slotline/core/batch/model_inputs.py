"""Inputs of a step's forward pass and of its sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen

from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.logprobs import ScoredPlaces
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.registry.contracts import AttentionBatch

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class ModelInputs:
    """All inputs of a forward pass.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order.
        num_scheduled: [num_requests] int64.
        pending: [num_requests] bool, requests whose tokens a step in flight verifies. Their lengths and places on the
            host are upper bounds. None if all are exact.
        num_tokens: tokens without padding. `num_padded_tokens` includes it.
        input_ids, positions: [num_padded_tokens] int64 on the device, with several stages on that of the first.
        logits_indices: [num_logits] int64 on the device, with several stages on that of the last: the last token of
            each request whose known tokens are all computed by this step, and each token after them that it verifies.
            Other requests are mid-prompt and sample nothing. `logits_indices_cpu` is the same on the host.
        logits_rows: [num_logits] int64, the permanent rows of the logits.
        spec_positions: [num_logits] int64, the verified tokens that each assumes: 0 after the last known token, 1 after
            the first one to verify, and so on. None if the step verifies none.
        spec_paths: [num_logits, most] int64, the indices of these tokens among the row's, in order, then -1. None if
            each assumes the first ones.
        num_verified: [num_sampling] int64, the tokens that each request that samples verifies. None for none.
        query_start_loc: [num_requests + 1] int32 on the last stage's device, padded requests included.
            `query_start_loc_cpu` and `seq_lens_cpu` [num_requests] int32 are on the host.
        batches: the attention inputs, by cache group. Then for each later stage those of the cache groups it reads.
            Then those of layers without a cache, if the model has any.
        wanted: the `logits_indices` by request if the model may leave out other tokens in its last layers, else None.
        shape: the captured shape that the inputs are padded to, None to run eagerly.
        stand_ins: [num_logits] int64 on the device of `input_ids`, placeholder ids for tokens not sampled yet (async
            scheduling only), else None.
        sampling: the sampling parameters of the logits' rows.
        sampling_params: the same, [num_logits, PACKED_WIDTH] int32 on the device of `logits_indices`. None if all rows
            are greedy.
        scored: the logits' rows that want log-probabilities. None for none.
        embeds: [num_padded_tokens, hidden_size] in the model's dtype, embeddings that the model reads in place of those
            of the tokens, never with a shape. None for the tokens' own.
        extras: what `gather` of extensions returned, by the extension's name.
        made_up: whether the step is made up for profiling, warm-up or capture.
    """

    rows: Int
    num_scheduled: Int
    num_tokens: int
    num_padded_tokens: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    logits_indices_cpu: Int
    logits_rows: Int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    batches: tuple[AttentionBatch, ...]
    shape: GraphShape | None
    stand_ins: torch.Tensor | None
    sampling: SamplingMetadata
    sampling_params: torch.Tensor | None
    scored: ScoredPlaces | None
    embeds: torch.Tensor | None = None
    wanted: FastPrefillBatch | None = None
    pending: npt.NDArray[np.bool_] | None = None
    spec_positions: Int | None = None
    spec_paths: Int | None = None
    num_verified: Int | None = None
    extras: Mapping[str, Any] = field(factory=dict)
    made_up: bool = False

    @property
    def all_sample(self) -> bool:
        """True if the tokens are exactly `logits_indices`: the first ones of the padded tokens, in order."""
        return len(self.logits_rows) == self.num_tokens
