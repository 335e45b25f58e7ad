"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding", section 3) over bounded memory, compiled.

The paper descends suffix trees with counts. The same descent needs the earlier places of the longest end of the text.
The tokens after them vote, and the places that agree continue. Places are found by hash chains, as in Deflate (RFC
1951, section 4): a table has the latest place of each hash of `min_tokens` tokens, and each place links to the previous
one. This takes one step for each new token, and memory independent of the text: 8 bytes per token.
"""

from __future__ import annotations

import numpy as np
import torch

from slotline.proposers.suffix import SuffixOptions
from slotline.proposers.suffix.chains import extend, propose, remember
from slotline.registry.contracts import Draft, DraftBatch, DrafterContext

_MOST_BUCKETS = 1 << 15


class SuffixDrafter:
    """Implements `Drafter`. Keeps each request's tokens until it leaves, and the last outputs of those that left."""

    def __init__(self, context: DrafterContext) -> None:
        self._options: SuffixOptions = context.options or SuffixOptions()
        self._num_tokens = context.num_tokens
        shape = (context.max_requests, context.max_model_len)
        # Memory that no request reaches is never touched, so the system gives none for it.
        self._tokens = np.empty(shape, np.int32)
        self._before = np.empty(shape, np.int32)  # the place before with the same hash, -1 for none
        self._latest = np.empty((context.max_requests, _buckets(context.max_model_len)), np.int32)  # place by hash
        self._known = np.zeros(context.max_requests, np.int64)
        self._first = np.zeros(context.max_requests, np.int64)  # where what is remembered of the row begins
        past = self._options.past_tokens
        self._past = np.full(past, -1, np.int32)  # a ring; -1 lies between two requests
        self._past_gap = np.zeros(past, np.int32)  # tokens back to the place before with the same hash, 0 for none
        self._past_latest = np.full(_buckets(past), -1, np.int64)  # counted from the first token ever kept
        self._past_end = 0
        self._compile()

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Start an empty text. The prompt is read with the first proposal."""
        self._latest[row] = -1
        self._known[row] = 0
        self._first[row] = max(0, len(prompt_token_ids) - self._options.max_depth)

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the tokens that most places agree on, or none if the end of the text did not occur before."""
        options, rows = self._options, batch.rows.numpy()
        extend(
            *(rows, batch.token_table.numpy(), batch.num_tokens.numpy()),
            *(self._tokens, self._before, self._latest, self._known, options.min_tokens),
        )
        drafts = np.full((len(rows), self._num_tokens), -1, np.int64)
        propose(
            *(rows, self._known, self._tokens, self._before, self._latest),
            *(self._past, self._past_gap, self._past_latest, self._past_end),
            *(options.min_tokens, options.max_depth, options.max_places, options.factor, options.min_probability),
            drafts,
        )
        return Draft(token_ids=torch.from_numpy(drafts))

    def release(self, row: int) -> None:
        """Store the output, as far as the last proposal saw it, with the end of the prompt before it."""
        first, end = int(self._first[row]), int(self._known[row])
        if len(self._past) and end - first > self._options.min_tokens:
            self._past_end = remember(
                *(self._tokens[row, first:end], self._past, self._past_gap, self._past_latest, self._past_end),
                self._options.min_tokens,
            )

    def _compile(self) -> None:
        """Compile before the first request: with no request, and with an empty text."""
        none = torch.zeros(0, dtype=torch.int64)
        table = torch.zeros(1, 1, dtype=torch.int32)
        self.propose(
            DraftBatch(rows=none, token_table=table, num_tokens=none.int(), last_token_ids=none, positions=none)
        )
        if len(self._past):
            parts = (self._past, self._past_gap, self._past_latest, self._past_end)
            remember(self._tokens[0, :0], *parts, self._options.min_tokens)


def _buckets(num_tokens: int) -> int:
    """Return a power of two of about one bucket per token, so that chains are short."""
    return int(min(_MOST_BUCKETS if num_tokens < _MOST_BUCKETS << 5 else 1 << 18, 1 << max(num_tokens, 1).bit_length()))
