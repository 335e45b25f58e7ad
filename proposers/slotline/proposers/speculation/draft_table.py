"""Drafts of all rows, beside the request table, which holds the tokens and their numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request_table import RequestTable
from slotline.proposers.speculation.draft_tree import DraftTree, TreesByRow

Int = npt.NDArray[np.int64]


class DraftTable:
    """What is known of the drafts in `RequestTable.token_ids`, by row.

    Attributes:
        rows: the request table.
        entry: [max_requests] int64, of the row in the drafter's last proposal, -1 if that came without distributions.
        num_guesses: [max_requests] int64, of the drafts, those that a drafter proposed. Further drafts only fill a
            captured batch.
        forced: [max_requests] bool, True if a grammar forces the drafts, so that they say nothing of the drafter.
        tree: the form of all drafts if they are no chain. They are then in the order of its nodes.
        trees: the form of each row's drafts, where each request has a tree of its own. `tree` is None then.
    """

    def __init__(self, rows: RequestTable, trees: TreesByRow | None = None) -> None:
        self.rows = rows
        self.entry = np.full(rows.max_requests, -1, np.int64)
        self.num_guesses = np.zeros(rows.max_requests, np.int64)
        self.forced = np.zeros(rows.max_requests, bool)
        self.tree: DraftTree | None = None
        self.trees = trees

    def write(self, rows: Int, token_ids: Int, counts: Int, *, forced: bool = False) -> None:
        """Put drafts after the known tokens of `rows`: the first `counts` [n] of `token_ids` [n, k]."""
        self.rows.num_spec_tokens[rows] = self.num_guesses[rows] = counts
        if self.trees is not None:
            self.trees.straighten(rows)
        self.forced[rows] = forced
        self.rows.write_spec_tokens(rows, token_ids, np.arange(token_ids.shape[1]) < counts[:, None])

    def keep_chains(self, rows: Int) -> Int:
        """Cut the drafts of `rows` [n] to the first that form a chain. Return how many each may have from now on."""
        most = np.full(len(rows), self.rows.max_model_len)
        chained = most if self.tree is None else np.full(len(rows), self.tree.num_chained)
        if self.trees is not None:
            chained = self.trees.num_chained(rows)
            self.trees.straighten(rows)
        self.rows.num_spec_tokens[rows] = np.minimum(self.rows.num_spec_tokens[rows], chained)
        return most if self.tree is None else chained

    def forget(self) -> None:
        """Forget all drafts. Tokens that a grammar forces later would be cut to the form of a tree that stayed."""
        self.rows.num_spec_tokens[:] = 0
        self.entry[:] = -1
        self.tree = None
