"""Prompt lookup decoding (Saxena 2023), over prompt and output, compiled: one pass over each request's tokens."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange

from slotline.kernels.numba_cache import cached_njit
from slotline.proposers.ngram import NgramOptions
from slotline.registry.contracts import Draft, DraftBatch, DrafterContext

_MANY_TOKENS = 1 << 22


class NgramDrafter:
    """Implements `Drafter`. Keeps nothing between steps: the history is in the rows."""

    def __init__(self, context: DrafterContext) -> None:
        options: NgramOptions = context.options or NgramOptions()
        self._shortest, self._longest = options.min_tokens, options.max_tokens
        self._num_tokens = context.num_tokens
        none = np.zeros(0, np.int64)  # compiled now, so that no request waits for it
        look_up(none, np.zeros((1, 1), np.int32), none.astype(np.int32), 1, 1, np.zeros((0, 1), np.int64))

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the tokens after the best earlier place of each request's last tokens, or none without a match."""
        drafts = np.full((len(batch.rows), self._num_tokens), -1, np.int64)
        rows, table, known = batch.rows.numpy(), batch.token_table.numpy(), batch.num_tokens.numpy()
        # Threads cost more than they save where others want the cores too, unless there is much to read.
        find = look_up if int(known.sum()) < _MANY_TOKENS else look_up_on_all_cores
        find(rows, table, known, self._shortest, self._longest, drafts)
        return Draft(token_ids=torch.from_numpy(drafts))

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""


@cached_njit(nogil=True)
def _place(tokens: Any, shortest: int, longest: int) -> int:
    """Return the index after the earlier place of the longest possible end of `tokens`, the latest of equals, or -1."""
    count = len(tokens)
    best, place = shortest - 1, -1
    last = tokens[count - 1]
    for end in range(count - 2, -1, -1):
        if tokens[end] != last:
            continue
        length = 1
        while length < longest and length <= end and tokens[end - length] == tokens[count - 1 - length]:
            length += 1
        if length > best:
            best, place = length, end + 1
            if best == longest:
                break
    return place


def _look_up(rows: Any, table: Any, known: Any, shortest: int, longest: int, drafts: Any) -> None:
    """Fill drafts [n, k], which holds -1, for permanent rows [n] of `table` with `known` [n] tokens each."""
    for index in prange(len(rows)):
        count = known[index]
        tokens = table[rows[index], :count]
        place = _place(tokens, shortest, longest)
        if place >= 0:
            for i in range(min(drafts.shape[1], count - place)):
                drafts[index, i] = tokens[place + i]


look_up = cached_njit(nogil=True)(_look_up)
look_up_on_all_cores = cached_njit(nogil=True, parallel=True)(_look_up)
