"""Data of async scheduling with drafts: inputs of a verification on the device, a proposal on its way to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.device.transfer_buffer import Download
from slotline.proposers.speculation.draft_attention import StagedAttention

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class Proposal:
    """Drafts on their way to the host.

    Attributes:
        rows: [n] int64, the rows that the drafts belong to.
        generations: [n], the rows' generations when the drafter was called.
        found: [n, columns + k] int64: the drafter's output, then the drafts as the next step reads them.
        columns: width of the first part.
    """

    rows: Int
    generations: Int
    found: Download
    columns: int


@frozen(kw_only=True, eq=False)
class VerifiedDrafts:
    """Inputs of a step's verification and of the proposal after it, made once the previous step was processed.

    Attributes:
        rows: [m] int64, the rows that sample.
        verified: [m], the rows' drafts in this step.
        num_requests: requests of the step.
        on_device: [6, m] int64 on the device, for each row: the index of its first logits, its drafts, its known
            tokens,
            its next token's placeholder, its position among the step's requests, and its tokens in the step.
        rows_device: [m] int64 on the device.
        places: [num_logits] on the device, for each of the logits the index in `rows`.
        drafts: [num_logits] int64 on the device, the draft verified by each of the logits, -1 after a row's last draft.
        asked: [n] int64, indices into `rows` of the rows that get drafts.
        asked_device: `asked` on the device. None for all rows.
        room: [n] int64, maximum drafts per request. 0 if the request is included only to keep the batch uniform.
        temperature: [n] float32 on the device.
        following: [num_padded_tokens] int64 on the device, the token after each of the step's, as far as the host
            knows.
        input_ids, logits_indices: of the step, on the device.
        attend: plans the drafter's own attention, if it has any, from the positions [n] of the newest tokens.
    """

    rows: Int
    verified: Int
    num_requests: int
    on_device: torch.Tensor
    rows_device: torch.Tensor
    places: torch.Tensor
    drafts: torch.Tensor | None
    asked: Int
    asked_device: torch.Tensor | None
    room: Int
    temperature: torch.Tensor
    following: torch.Tensor | None
    input_ids: torch.Tensor
    logits_indices: torch.Tensor
    attend: StagedAttention | None
