"""Comparison of two proposals for the same request, which must be equal."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slotline.testing.check import Failed, NotApplicable, Run
from slotline.testing.environments.drafter import Request, RowDraft
from slotline.testing.oracles.drafter import PROBABILITY_ERRORS


def must_forget(run: Run) -> None:
    """Skip a check in which requests leave for drafters that remember them.

    Raises:
        NotApplicable: for a drafter that declares `remembers`.
    """
    if run.subject.capabilities.remembers:
        raise NotApplicable("remembers: requests that left may change a draft")


def same_drafts(
    requests: Mapping[int, Request], expected: Mapping[int, RowDraft], found: Mapping[int, RowDraft], what: str
) -> None:
    """Compare the proposals of the rows that both have.

    Raises:
        Failed: naming the row, its history and the first difference.
    """
    for row in expected.keys() & found.keys():
        same_draft(expected[row], found[row], f"row {row}, history {list(requests[row].tokens)}: {what}")


def same_draft(expected: RowDraft, found: RowDraft, where: str) -> None:
    """Compare two proposals: token ids and parents exactly, probabilities up to rounding."""
    if (expected.token_ids, expected.parents) != (found.token_ids, found.parents):
        raise Failed(f"{where}: the draft is {_described(found)}, it was {_described(expected)}")
    if expected.probabilities is not None and found.probabilities is not None:
        allowed = PROBABILITY_ERRORS * torch.finfo(torch.float32).eps
        for position, errors in enumerate((expected.probabilities - found.probabilities).abs()):
            worst = float(errors.max())
            if not worst <= allowed:
                raise Failed(f"{where}: a probability at draft position {position} differs by {worst:.3g}")


def _described(draft: RowDraft) -> str:
    """Return the ids, and the tree's parents if there are any."""
    parents = "" if draft.parents is None else f" with parents {list(draft.parents)}"
    return f"{list(draft.token_ids)}{parents}"
