"""The data of one scheduled step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from slotline.core.batch.request import Request

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class SchedulerOutput:
    """Rows and tokens that one step computes.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order. Single-token requests come first, in descending order
            of computed tokens.
        num_scheduled: [num_requests] int64, tokens of each, at least 1.
        num_computed: [num_requests] int64, tokens of each that were computed before.
        num_tokens: sum of `num_scheduled`, tokens to verify included.
        num_decodes: leading requests with one token.
        admitted, preempted: requests that joined or lost their blocks in this step.
        failed: requests that could not be scheduled, with the reason. They keep the resources that they held before.
            They end before the step runs.
        eager: whether it cannot replay a graph.
        same_batch: whether it computes the next token of each request of the step scheduled before, in the same order,
            and nothing else.
    """

    rows: Int
    num_scheduled: Int
    num_computed: Int
    num_tokens: int
    num_decodes: int
    admitted: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = field(default=())
    failed: tuple[tuple[Request, Exception], ...] = ()
    eager: bool = False
    same_batch: bool = False

    def without(self, rows: Sequence[int] | Int) -> SchedulerOutput:
        """Return the same step without some of its rows."""
        if len(rows) == 0:
            return self
        kept = ~np.isin(self.rows, rows)
        counts = self.num_scheduled[kept]
        return evolve(
            self,
            rows=self.rows[kept],
            num_scheduled=counts,
            num_computed=self.num_computed[kept],
            num_tokens=int(counts.sum()),
            num_decodes=int((counts == 1).sum()),
            same_batch=False,
        )
