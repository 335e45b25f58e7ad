"""Operations of overlapping steps on drafts: find which are accepted, and keep the next ones for the next step.

Each of the two functions is one operation of `DeviceOps`, since the device has nothing else to do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slotline.core.batch.placeholder_tokens import PlaceholderTokens


class AcceptedDrafts(NamedTuple):
    """Result of a verified step for each row that samples, [m] int64 on the device.

    `last` is the index of the last accepted token among the logits. `newest` is that token, or 0 if the request ends
    with an error, `positions` its position in the text, and `previous` the token before it. `fallen` is the number of
    rejected drafts.
    """

    last: torch.Tensor
    newest: torch.Tensor
    positions: torch.Tensor
    fallen: torch.Tensor
    previous: torch.Tensor


def find_accepted(
    sampled: torch.Tensor,
    drafts: torch.Tensor | None,
    on_device: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    input_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    table: PlaceholderTokens,
) -> AcceptedDrafts:
    """Find the accepted drafts, as `verification.standing` does, and record each row's newest token in the table.

    Args:
        sampled: [num_logits] int64, the sampled tokens. Negative if nothing could be drawn.
        drafts: [num_logits] int64, the draft verified by each of the logits, -1 after a row's last. None without
            drafts.
        on_device: [6, m] int64, `VerifiedDrafts.on_device`. Its first four rows are read: the index of each row's first
            logits, its drafts, its known tokens and its placeholder.
        rows: [m] int64, distinct permanent rows.
        places: [num_logits] int64, for each of the logits the index in `rows`.
        input_ids: [num_tokens] int64, the step's tokens, or their placeholders in the table.
        logits_indices: [num_logits] int64, for each of the logits the index of its token.
        table: the placeholder tokens.
    """
    found = table.ops.verify_drafts(
        sampled,
        drafts,
        on_device,
        rows,
        places,
        input_ids,
        logits_indices,
        table.tokens,
        table.rejected,
        table.max_spec_tokens,
    )
    return AcceptedDrafts(*found)


def keep_drafts(
    found: torch.Tensor, newest: torch.Tensor, stand_ins: torch.Tensor, table: PlaceholderTokens, vocab_size: int
) -> torch.Tensor:
    """Store the next step's drafts. Return the drafter's output and these drafts, [n, columns + max_spec_tokens] int64.

    The table keeps the drafts. Invalid entries and padding are filled with the newest token.

    Args:
        found: [n, columns] integers, at most `table.max_spec_tokens` columns.
        newest, stand_ins: [n] int64, the newest tokens and their placeholders.
        table: the placeholder tokens.
        vocab_size: size of the vocabulary.
    """
    return table.ops.fill_drafts(found, newest, stand_ins, table.tokens, table.max_spec_tokens, vocab_size)
