"""Drafts that the last rank of a pipeline proposes: the other ranks are told of each proposal and write it alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.proposers.speculation.draft_tree import DraftTree
from slotline.registry.contracts import Draft, DraftBatch

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class Proposed:
    """A drafter's proposal after a step, checked.

    Attributes:
        rows: [n], the requests that get drafts.
        token_ids: [n, k] int64.
        counts: [n], how many of them are verified.
        tree: their form. None for chains.
        parents: [n, k] int64, their forms where each request has a tree of its own. None for chains.
        probabilities: [n, k, vocab_size], as in `Draft`. The rank that proposes alone has them.
    """

    rows: Int
    token_ids: Int
    counts: Int
    tree: DraftTree | None = None
    parents: Int | None = None
    probabilities: torch.Tensor | None = None

    def told(self) -> Proposed:
        """Return what other ranks are told."""
        return evolve(self, probabilities=None)


class Elsewhere:
    """Stand-in for a drafter that works on another rank. Implements `Drafter`."""

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose nothing."""
        return Draft(token_ids=torch.zeros(len(batch.rows), 0, dtype=torch.int64))

    def release(self, row: int) -> None:
        """Do nothing."""
