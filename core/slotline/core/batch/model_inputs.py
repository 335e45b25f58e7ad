"""What a forward pass and the sampling behind it read of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.draft_tree import DraftTree
from slotline.core.batch.embeds import Embeds
from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.logprobs import ScoredPlaces
from slotline.core.batch.rejections import Rejections
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.registry.contracts import AttentionBatch, StateBatch

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class ModelInputs:
    """Everything a forward pass reads. What changes it makes another.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order.
        num_scheduled: [num_requests] int64.
        pending: [num_requests] bool, requests whose drafts are verified by a step in flight: what the host says of
            their lengths and places is an upper bound; None where all is exact.
        num_tokens: tokens without padding; `num_padded_tokens` with it.
        input_ids, positions: [num_padded_tokens] int64 on the device; over several stages on the first one's.
        logits_indices: [num_logits] int64 on the device, over several stages on the last one's: the last token of each
            request whose known tokens all are computed by this step, and each of its drafts; other requests are
            mid-prompt and sample nothing. `logits_indices_cpu` is the same on the host.
        logits_rows: [num_logits] int64, the permanent rows of those.
        draft_positions: [num_logits] int64, drafts that each assumes: 0 for the known tokens' last, 1 for the first
            draft and so on; None where nothing is drafted.
        draft_nodes: [num_logits] int64, 0 for the known tokens' last, then 1 + the node of the tree that each stands
            behind; the same as `draft_positions` for a chain.
        tree: the form of the drafts, None for chains.
        drafts: [num_logits] int64, the draft that each judges, -1 behind a request's last; None as before.
        rejections: which of them rejection sampling decides; None for none.
        query_start_loc: [num_requests + 1] int32 on the last stage's device, padded requests included;
            `query_start_loc_cpu` and `seq_lens_cpu` [num_requests] int32 on the host.
        batches: what attention sees, by cache group; then for each later stage those of the cache groups it reads; then
            what layers without a cache see, where the model has such.
        wanted: the `logits_indices` by request, where the model may leave out other tokens at its end; else None.
        states: what state layers see, where the model has any.
        shape: the captured shape that they are padded to, None to run eagerly.
        stand_ins: [num_logits] int64 on the device of `input_ids`, what stands for the tokens that are about to be
            sampled where the next step is prepared before they are known; else None.
        sampling: the sampling parameters of the logits' rows.
        sampling_params: the same, [num_logits, PACKED_WIDTH] int32 on the device of `logits_indices`; None where all
            rows are greedy.
        scored: which of the logits' rows want log-probabilities; None for none.
        embeds: embeddings of inputs besides text among the tokens; never with a shape.
        following: those among the tokens that follow each, where a drafter looks at these.
        encoder_states: [n, hidden_size], what cross-attention makes the keys of that it stores in this step; None for
            none.
        lora_slots: [num_padded_tokens] int64 on the device, the slot of each token's adapter, -1 for none; None where
            the step runs without adapters.
        single_slot: the slot of all tokens that have one, where the step is run for one adapter; else None.
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
    draft_positions: Int | None
    draft_nodes: Int | None
    tree: DraftTree | None
    drafts: Int | None
    rejections: Rejections | None
    query_start_loc: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    seq_lens_cpu: npt.NDArray[np.int32]
    batches: tuple[AttentionBatch, ...]
    states: StateBatch | None
    shape: GraphShape | None
    stand_ins: torch.Tensor | None
    sampling: SamplingMetadata
    sampling_params: torch.Tensor | None
    scored: ScoredPlaces | None
    embeds: Embeds | None = None
    following: Embeds | None = None
    encoder_states: torch.Tensor | None = None
    lora_slots: torch.Tensor | None = None
    single_slot: int | None = None
    wanted: FastPrefillBatch | None = None
    pending: npt.NDArray[np.bool_] | None = None

    @property
    def all_sample(self) -> bool:
        """Whether every token is one of `logits_indices`: the first ones of the padded tokens, in order."""
        return len(self.logits_rows) == self.num_tokens


def even_split(num_tokens: int, num_requests: int) -> list[int]:
    """Query lengths of a made-up batch: as even as can be; they sum to `num_tokens`."""
    each, rest = divmod(num_tokens, num_requests)
    return [each] * (num_requests - rest) + [each + 1] * rest
