"""Operations of overlapping steps on drafts: find which are accepted, and keep the next ones for the next step.

The device does each as one operation of `DeviceOps`, since it has nothing else to do meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slotline.core.batch.placeholder_tokens import PlaceholderTokens


class AcceptedDrafts(NamedTuple):
    """What a verified step gave each row that samples, [m] int64 on the device.

    `last` is the place among the logits of the last token that stands, `newest` that token, 0 where the request ends
    with an error, `positions` where it lies in its text, `fallen` how many drafts did not stand, and `previous` the
    token in front of the newest.
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
    """Which drafts stand, as `verification.standing` finds it; the table then knows each row's newest token.

    Args:
        sampled: [num_logits] int64, the token of each place; negative where nothing could be drawn.
        drafts: [num_logits] int64, the draft at each place, -1 behind a row's last; None where nothing was drafted.
        on_device: [6, m] int64, `Settled.on_device`: of each row its first place, its drafts, its known tokens and its
            stand-in, and two that are not read here.
        rows: [m] int64, distinct permanent rows.
        places: [num_logits] int64, index in `rows` of each place.
        input_ids: [num_tokens] int64, the step's tokens, or what stands for them in the table.
        logits_indices: [num_logits] int64, the token of each place.
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
        table.fallen,
        table.max_drafts,
    )
    return AcceptedDrafts(*found)


def keep_drafts(
    found: torch.Tensor, newest: torch.Tensor, stand_ins: torch.Tensor, table: PlaceholderTokens, vocab_size: int
) -> torch.Tensor:
    """What the drafter said, and behind it the drafts as the next step reads them, [n, columns + max_drafts] int64.

    The table keeps the latter. What is no token, and what only fills a captured batch, is the newest token again: as
    good a guess as any.

    Args:
        found: [n, columns] integers, at most `table.max_drafts` columns.
        newest, stand_ins: [n] int64.
    """
    return table.ops.fill_drafts(found, newest, stand_ins, table.tokens, table.max_drafts, vocab_size)
