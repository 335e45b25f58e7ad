"""The integrity checker: rows, blocks and references must agree.

Tests run it after every step, and the engine can run it too.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request import Status
from slotline.core.scheduler.scheduler import Scheduler
from slotline.registry.errors import IntegrityError


def check_integrity(scheduler: Scheduler, in_flight: Collection[int] | npt.NDArray[np.int64] = ()) -> None:
    """Check everything that the scheduler, the rows and the cache say about each other.

    Args:
        in_flight: rows of steps whose results are not handed out. Their tokens to verify may be computed already.

    Raises:
        IntegrityError: naming the parts that disagree.
    """
    rows = scheduler.rows
    for row, request in enumerate(rows.requests):
        if request is not None and request.row != row:
            raise IntegrityError(
                f"row {row} names request {request.request_id!r}, which thinks it holds row {request.row}"
            )
    held = sum(request is not None for request in rows.requests)
    if held + rows.num_free != rows.max_requests:
        raise IntegrityError(f"{held} rows are held and {rows.num_free} free, of {rows.max_requests}")
    for request in scheduler.running:
        if request.status is not Status.RUNNING or request.row < 0 or rows.requests[request.row] is not request:
            raise IntegrityError(
                f"running request {request.request_id!r} is {request.status.value} in row {request.row}"
            )
    started = set(map(int, in_flight))
    _check_progress(scheduler, started)
    running = {request.row for request in scheduler.running}
    for row, request in enumerate(rows.requests):
        if request is not None and row not in running and request.status is not Status.PREEMPTED:
            raise IntegrityError(
                f"row {row} is held by request {request.request_id!r}, which is {request.status.value}"
            )
        if request is None:
            continue
        verifies = row in started and not rows.num_pending[row]
        known = rows.max_model_len if verifies else rows.num_tokens[row]
        if not (rows.num_computed_tokens[row] <= known and rows.num_tokens[row] <= rows.max_model_len):
            raise IntegrityError(
                f"row {row}: {rows.num_computed_tokens[row]} computed of {rows.num_tokens[row]} tokens"
            )
    scheduler.cache.check(rows)
    for check in scheduler.extensions.check:
        check()


def _check_progress(scheduler: Scheduler, in_flight: set[int]) -> None:
    """Raise IntegrityError for a running request that no step would ever compute or hand out a token of."""
    rows = scheduler.rows
    for request in scheduler.running:
        row = request.row
        if row in in_flight:
            continue
        if rows.num_pending[row]:
            raise IntegrityError(
                f"request {request.request_id!r} expects {rows.num_pending[row]} tokens of a step in flight, and there "
                "is none"
            )
        if rows.num_computed_tokens[row] >= rows.num_tokens[row]:
            raise IntegrityError(
                f"request {request.request_id!r} is running, all of its {rows.num_tokens[row]} tokens are computed, "
                "and no step is in flight that would give it another"
            )
