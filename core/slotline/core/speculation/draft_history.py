"""The tokens that a drafter is shown: a table of its own, so that what it writes there changes no request.

torch has no tensors that cannot be written to. The table follows the rows' tokens step by step, at the price of a few
numbers for each request and of memory for the tokens once more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.request_table import RequestTable

Int = npt.NDArray[np.int64]
_FEW = 16
"""Most new tokens of a row that are copied together with those of other rows."""


class DraftHistory:
    """A copy of the rows' tokens.

    Attributes:
        tensor: [max_requests, max_model_len] int32 on the host, as `DraftBatch.token_table`.
    """

    def __init__(self, rows: RequestTable) -> None:
        self._rows = rows
        self._table = np.zeros_like(rows.token_ids)
        self._seen = np.zeros(rows.max_requests, np.int64)
        self.tensor = torch.from_numpy(self._table)

    def begin(self, row: int) -> None:
        """Start anew for a request that took the row."""
        self._seen[row] = 0

    def follow(self, rows: Int, known: Int) -> None:
        """Copy what `rows` [n] have got since, up to their `known` [n] tokens."""
        seen, tokens = self._seen[rows], self._rows.token_ids
        new = known - seen
        most = int(new.max(initial=0))
        if most <= _FEW:
            places = np.minimum(seen[:, None] + np.arange(most), tokens.shape[1] - 1)
            self._table[rows[:, None], places] = tokens[rows[:, None], places]
        else:
            for row, first, end in zip(rows.tolist(), seen.tolist(), known.tolist(), strict=True):
                self._table[row, first:end] = tokens[row, first:end]
        self._seen[rows] = known

    def restore(self, rows: Int, known: Int) -> bool:
        """Return whether the drafter changed the tokens of `rows` [n] up to their `known` [n], and undo it."""
        changed = False
        for row, end in zip(rows.tolist(), known.tolist(), strict=True):
            own, theirs = self._rows.token_ids[row, :end], self._table[row, :end]
            if not np.array_equal(own, theirs):
                theirs[:], changed = own, True
        return changed
