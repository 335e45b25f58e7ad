"""Copy of the rows' tokens that a drafter may read, so that its writes change no request.

torch has no read-only tensors. The copy follows the rows' tokens step by step. It costs a few numbers for each request,
and the memory of the tokens once more.
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
        self.tensor = torch.from_numpy(self._table)

    def begin(self, row: int) -> None:
        """Start anew for a request that took the row."""
        self._seen[row] = 0

    def follow(self, rows: Int, known: Int) -> None:
        """Copy the new tokens of `rows` [n], up to their `known` [n] tokens."""
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
        """Undo the drafter's changes to the first `known` [n] tokens of `rows` [n]. Return True if there were any."""
        changed = False
        for row, end in zip(rows.tolist(), known.tolist(), strict=True):
            own, theirs = self._rows.token_ids[row, :end], self._table[row, :end]
            if not np.array_equal(own, theirs):
                theirs[:], changed = own, True
        return changed
