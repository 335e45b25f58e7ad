"""Bans the last token of a bad word where the tokens before it stand at the end of the history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.plugins.logits_processors.bans import ban
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError


class BadWords:
    """Each row's words as sequences of token ids; a word may begin in the prompt, as in transformers."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._max_requests = context.max_requests
        self._words: dict[int, RowValues] = {}  # by length, so that long words do not widen short ones

    def validate(self, params: Mapping[str, Any]) -> None:
        """Token ids must be in the vocabulary; their form is checked by `SamplingParams`."""
        for word in params.get("bad_words_token_ids") or ():
            for token in word:
                if token >= self._vocab_size:
                    raise RequestError(
                        f"bad_words_token_ids names token {token}", fix=f"token ids are 0 to {self._vocab_size - 1}"
                    )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Keep the request's words by length."""
        words = set(params.get("bad_words_token_ids") or ())
        for length in {len(word) for word in words}:
            if length not in self._words:
                self._words[length] = RowValues(self._max_requests, width=length)
            self._words[length].set(row, sorted(word for word in words if len(word) == length))
        return bool(words)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Set what would complete a word to minus infinity, in place; all rows at once for each length of word."""
        tail = batch.tail(max(self._words, default=1))
        for length, words in self._words.items():
            entries, tokens = words.take(batch.rows)  # [m], [m, length]
            begun = (tail[entries, tail.shape[1] - length + 1 :] == tokens[:, :-1]).all(axis=1)
            ban(logits, entries[begun], tokens[begun, -1])
        return logits

    def release(self, row: int) -> None:
        """Forget the row's words."""
        for words in self._words.values():
            words.drop(row)
