"""Copy of the rows' tokens that a drafter may read, so that its writes change no request.

torch has no read-only tensors. The copy follows the rows' tokens step by step. It costs a few numbers for each request,
and the memory of the tokens once more. The row of a prompt of embeddings, which has no tokens, begins with the output.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.request_table import RequestTable

Int = npt.NDArray[np.int64]
_FEW = 16
"""Most new tokens per row that are copied for all rows at once."""


class DraftHistory:
    """A copy of the rows' tokens.

    Attributes:
        tensor: [max_requests, max_model_len] int32 on the host, as `DraftBatch.token_table`.
    """

    def __init__(self, rows: RequestTable) -> None:
        self._rows = rows
        self._table = np.zeros_like(rows.token_ids)
        self._seen = np.zeros(rows.max_requests, np.int64)
        self._first = np.zeros(rows.max_requests, np.int64)  # of each row's tokens that are copied
        self.tensor = torch.from_numpy(self._table)

    def begin(self, row: int, first: int = 0) -> None:
        """Start anew for a request that took the row, with its token at `first`."""
        self._seen[row], self._first[row] = 0, first

    def lengths(self, rows: Int, known: Int) -> Int:
        """Return how many [n] of the `known` [n] tokens of `rows` [n] are in the copy."""
        found: Int = known - self._first[rows]
        return found

    def follow(self, rows: Int, known: Int) -> None:
        """Copy the new tokens of `rows` [n], up to their `known` [n] tokens."""
        seen, first, tokens = self._seen[rows], self._first[rows], self._rows.token_ids
        new = known - first - seen
        most = int(new.max(initial=0))
        if most <= _FEW:
            places = np.minimum(seen[:, None] + np.arange(most), tokens.shape[1] - 1 - first[:, None])
            self._table[rows[:, None], places] = tokens[rows[:, None], first[:, None] + places]
        else:
            for row, start, at, count in zip(*(x.tolist() for x in (rows, seen, first, new)), strict=True):
                self._table[row, start : start + count] = tokens[row, at + start : at + start + count]
        self._seen[rows] = known - first

    def restore(self, rows: Int, known: Int) -> bool:
        """Undo the drafter's changes to the first `known` [n] tokens of `rows` [n]. Return True if there were any."""
        changed = False
        for row, end in zip(rows.tolist(), known.tolist(), strict=True):
            first = int(self._first[row])
            own, theirs = self._rows.token_ids[row, first:end], self._table[row, : end - first]
            if not np.array_equal(own, theirs):
                theirs[:], changed = own, True
        return changed
