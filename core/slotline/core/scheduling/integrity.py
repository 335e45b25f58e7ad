"""The integrity checker: rows, blocks, encoder outputs and references must agree.

Tests run it after every step; the engine can too.
"""

from __future__ import annotations

from slotline.core.scheduling.request import Status
from slotline.core.scheduling.scheduler import Scheduler
from slotline.registry.errors import IntegrityError


def check_integrity(scheduler: Scheduler) -> None:
    """Check everything that the scheduler, the rows and the cache say about each other.

    Raises:
        IntegrityError: naming what disagrees.
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
    running = {request.row for request in scheduler.running}
    for row, request in enumerate(rows.requests):
        if request is not None and row not in running and request.status is not Status.PREEMPTED:
            raise IntegrityError(
                f"row {row} is held by request {request.request_id!r}, which is {request.status.value}"
            )
        if request is not None and not rows.num_computed_tokens[row] <= rows.num_tokens[row] <= rows.max_model_len:
            raise IntegrityError(
                f"row {row}: {rows.num_computed_tokens[row]} computed of {rows.num_tokens[row]} tokens"
            )
        partner = int(rows.partner[row])
        if partner >= 0 and (
            rows.partner[partner] != row
            or rows.num_tokens[row] - rows.num_prompt_tokens[row]
            != rows.num_tokens[partner] - rows.num_prompt_tokens[partner]
        ):
            raise IntegrityError(f"rows {row} and {partner} are a pair and do not have the same outputs")
    scheduler.cache.check(rows)
    if scheduler.encoder_cache is not None:
        scheduler.encoder_cache.check()
        for request in scheduler.running:
            scheduler.encoder_cache.check_request(request, int(rows.num_computed_tokens[request.row]))
