"""Bans the token that would repeat a sequence of n tokens (Paulus et al. 2017, section 2.5, for any n)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.plugins.logits_processors.bans import ban
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr


class NoRepeatNGram:
    """Ban of repeated n-grams, with each row's n. The whole history counts, prompt included, as in transformers."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._sizes = np.zeros(context.max_requests, np.int64)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that the size is an integer. 0 means none."""
        size = params.get("no_repeat_ngram_size", 0)
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 2**31:
            raise RequestError(
                f"no_repeat_ngram_size={safe_repr(size, 80)} is not allowed",
                fix="give an integer from 1 to 2147483647, or 0 for no limit",
            )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's size."""
        self._sizes[row] = params.get("no_repeat_ngram_size", 0)
        return bool(self._sizes[row])

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Set tokens that would repeat an n-gram to minus infinity, in place, all rows of one size at once."""
        sizes, history = self._sizes[batch.rows], batch.tail()
        width = history.shape[1]
        for size in np.unique(sizes[sizes <= width]).tolist():
            entries = np.flatnonzero(sizes == size)
            tokens = history[entries]  # [m, width]
            begins = width - size + 1  # places where a sequence of `size` tokens may begin
            repeats = tokens[:, size - 1 :] >= 0
            for offset in range(size - 1):
                last = tokens[:, width - size + 1 + offset, None]
                repeats &= (tokens[:, offset : offset + begins] == last) & (last >= 0)
            which, place = np.nonzero(repeats)
            ban(logits, entries[which], tokens[which, place + size - 1])
        return logits

    def release(self, row: int) -> None:
        """Do nothing, because the next request of the row writes its own size."""
