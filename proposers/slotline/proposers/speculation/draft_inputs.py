"""Inputs passed to a drafter: the requests that want drafts, and a step's computed states."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.sampling.sampler import uniforms
from slotline.proposers.speculation.draft_attention import stored_by
from slotline.proposers.speculation.draft_history import DraftHistory
from slotline.proposers.speculation.hidden_states import ComputedStates, HiddenStates
from slotline.registry.contracts import ComputedTokens, DraftBatch

Int = npt.NDArray[np.int64]
_EMBEDDING = ("multimodal", "prompt_embeds")
"""Extensions that replace embeddings of a step's tokens."""
_DRAW = np.uint64(0xD6E8FEB86659FD93)
"""Separates the drafter's random numbers from the sampler's."""


def draft_batch(
    table: RequestTable,
    rows: Int,
    known: Int,
    hidden_states: HiddenStates | None,
    num_tokens: int,
    device: str,
    history: DraftHistory,
) -> DraftBatch:
    """Build a request for up to `num_tokens` drafts after the `known` [n] tokens of `rows` [n].

    Args:
        table: the request table.
        rows: [n], the requests' rows.
        known: [n], number of known tokens.
        hidden_states: of the last accepted position of each. None if the drafter reads none.
        num_tokens: most drafts for each request.
        device: torch device string.
        history: the copy of the tokens, which the drafter may overwrite.
    """
    newest = table.token_ids[rows, known - 1].astype(np.int64)
    places = known[:, None] + np.arange(num_tokens)
    return DraftBatch(
        rows=torch.from_numpy(rows.copy()),
        token_table=history.tensor,
        num_tokens=torch.from_numpy(history.lengths(rows, known).astype(np.int32)),
        last_token_ids=torch.from_numpy(newest).to(device),
        positions=torch.from_numpy(known - 1).to(device),
        hidden_states=None if hidden_states is None else hidden_states.last,
        layer_hidden_states=None if hidden_states is None else hidden_states.layers,
        computed_index=None if hidden_states is None else hidden_states.index,
        temperature=torch.from_numpy(table.temperature[rows]).to(device),
        uniforms=uniforms(table.seed[rows][:, None] ^ _DRAW, places),
    )


def computed_tokens(
    states: ComputedStates,
    following: torch.Tensor,
    device: str,
    *,
    embed: Callable[[torch.Tensor], torch.Tensor] | None,
    hidden_states: bool,
    attends: bool,
    served: npt.NDArray[np.bool_],
) -> ComputedTokens:
    """Build the drafter's view of a computed step.

    Args:
        states: the step's inputs and hidden states.
        following: [num_padded_tokens] int64 on the device, the token after each.
        device: torch device string.
        embed: embeds tokens, for drafters that see multimodal inputs and prompts of embeddings one token ahead.
        hidden_states: True if the drafter reads the hidden states.
        attends: True if it has its own attention layers.
        served: [max_requests], rows whose requests the drafter admitted.
    """
    inputs = states.inputs
    starts = inputs.query_start_loc_cpu[: len(inputs.rows) + 1]
    next_embeds = None
    for name in _EMBEDDING if embed is not None else ():
        shown = inputs.extras.get(name)
        if shown is not None and (ahead := shown.following()) is not None:
            others = next_embeds
            next_embeds = ahead.merged(embed if others is None else lambda _, kept=others: kept, following)
    return ComputedTokens(
        rows=torch.from_numpy(inputs.rows.copy()),
        served=torch.from_numpy(served[inputs.rows]),
        query_start_loc=torch.from_numpy(starts.astype(np.int64)),
        token_ids=states.token_ids.to(device),
        positions=inputs.positions.to(device),
        next_token_ids=following,
        next_embeds=next_embeds,
        hidden_states=states.hidden if hidden_states else None,
        layer_hidden_states=states.layers,
        attend=states.attend if attends else None,
        store=stored_by(states.attend) if attends else None,
    )


def following_tokens(table: RequestTable, inputs: ModelInputs) -> Int:
    """Return the token after each of a step's [num_padded_tokens], as far as the host knows it."""
    rows, counts, starts = inputs.rows, inputs.num_scheduled, inputs.query_start_loc_cpu[: len(inputs.rows)]
    first = inputs.seq_lens_cpu[: len(rows)] - counts
    places = np.repeat(first - starts, counts) + np.arange(1, inputs.num_tokens + 1)
    following = np.zeros(inputs.num_padded_tokens, np.int64)
    following[: inputs.num_tokens] = table.token_ids[
        np.repeat(rows, counts), np.minimum(places, table.max_model_len - 1)
    ]
    return following
