"""Comparison of the rows of ranks, for the integrity checker."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput

Tables = Mapping[str, npt.NDArray[np.int64]]
_TABLES = ("num_tokens", "num_computed_tokens", "num_spec_tokens", "generation")
_SCHEDULED = "scheduled tokens"
_TOKENS = "token"


def digest_of(rows: RequestTable, schedule: SchedulerOutput | None) -> str:
    """Return a digest of what ranks must have in common: lengths and tokens of all rows, and what is scheduled."""
    digest = hashlib.blake2b(digest_size=16)
    for name in _TABLES:
        digest.update(getattr(rows, name).tobytes())
    for row, request in enumerate(rows.requests):
        if request is not None:
            digest.update(rows.token_ids[row, : rows.num_tokens[row]].tobytes())
    if schedule is not None:
        digest.update(schedule.rows.tobytes())
        digest.update(schedule.num_scheduled.tobytes())
    return digest.hexdigest()


def tables_of(rows: RequestTable, schedule: SchedulerOutput | None) -> Tables:
    """Return the same as arrays by name: of each row [n], and the tokens [n, longest] with -1 where there are none."""
    found: dict[str, npt.NDArray[np.int64]] = {name: getattr(rows, name).copy() for name in _TABLES}
    found[_SCHEDULED] = np.zeros(rows.max_requests, np.int64)
    if schedule is not None:
        found[_SCHEDULED][schedule.rows] = schedule.num_scheduled
    held = np.array([one is not None for one in rows.requests])
    there = np.arange(rows.max_model_len) < np.where(held, rows.num_tokens, 0)[:, None]
    found[_TOKENS] = np.where(there, rows.token_ids, -1)[:, : int(there.sum(1).max(initial=0))]
    return found


def difference(first: Tables, other: Tables, rank: int) -> str:
    """Return the first place where the rows of a rank differ from those of rank 0."""
    for name in (*_TABLES, _SCHEDULED):
        if (rows := np.flatnonzero(first[name] != other[name])).size:
            row = rows[0]
            return f"row {row} has {name} {other[name][row]} on rank {rank} and {first[name][row]} on rank 0"
    width = min(first[_TOKENS].shape[1], other[_TOKENS].shape[1])
    places = np.argwhere(first[_TOKENS][:, :width] != other[_TOKENS][:, :width])
    if not len(places):
        return "the order of their batches differs"
    row, place = places[0]
    theirs, ours = other[_TOKENS][row, place], first[_TOKENS][row, place]
    return f"row {row} has token {theirs} at position {place} on rank {rank} and {ours} on rank 0"
