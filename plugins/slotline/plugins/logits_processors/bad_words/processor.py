"""Bans the token that would complete a bad word, which is a sequence of tokens, or a text however it is tokenised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.plugins.logits_processors.bad_words.texts import BadText, RowTexts
from slotline.plugins.logits_processors.bad_words.vocabulary import Vocabulary, pieces_of
from slotline.plugins.logits_processors.bans import ban
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError

_KEPT = 256
"""Texts that are kept for later requests."""


class BadWords:
    """Each row's words; one may begin in the prompt, as in transformers.

    A text is banned wherever it would stand, inside of a longer word too, with or without a space before it. It needs
    the model's tokenizer; without one the words' own tokens are all that is banned.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._max_requests = context.max_requests
        self._tokenizer = context.tokenizer
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[str, BadText] = OrderedDict()
        self._words: dict[int, RowValues] = {}  # by length, so that long words do not widen short ones
        self._texts: dict[int, RowTexts] = {}

    def validate(self, params: Mapping[str, Any]) -> None:
        """Token ids must be in the vocabulary; their form is checked by `SamplingParams`."""
        for word in params.get("bad_words_token_ids") or ():
            for token in word:
                if token >= self._vocab_size:
                    raise RequestError(
                        f"bad_words_token_ids names token {token}", fix=f"token ids are 0 to {self._vocab_size - 1}"
                    )
        for word in params.get("bad_words") or ():
            self._text(word)  # a new one takes milliseconds, the first one more: not in a step

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Keep the request's words: those of tokens by length, and texts."""
        words = set(params.get("bad_words_token_ids") or ())
        for length in {len(word) for word in words}:
            if length not in self._words:
                self._words[length] = RowValues(self._max_requests, width=length)
            self._words[length].set(row, sorted(word for word in words if len(word) == length))
        texts = {text.text: text for word in params.get("bad_words") or () if (text := self._text(word)) is not None}
        if texts:
            self._texts[row] = RowTexts(list(texts.values()))
        return bool(words or texts)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Set what would complete a word to minus infinity, in place; all rows at once for each length of word."""
        tail = batch.tail(max(self._words, default=1))
        for length, words in self._words.items():
            entries, tokens = words.take(batch.rows)  # [m], [m, length]
            begun = (tail[entries, tail.shape[1] - length + 1 :] == tokens[:, :-1]).all(axis=1)
            ban(logits, entries[begun], tokens[begun, -1])
        if found := list(self._completing(batch)) if self._texts else []:
            entries = np.repeat([entry for entry, _ in found], [len(tokens) for _, tokens in found])
            ban(logits, entries, np.concatenate([tokens for _, tokens in found]))
        return logits

    def release(self, row: int) -> None:
        """Forget the row's words."""
        self._texts.pop(row, None)
        for words in self._words.values():
            words.drop(row)

    def _completing(self, batch: LogitsBatch) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield, for each row of logits whose request has texts, the tokens that would complete one there."""
        known, drafted, drafts = batch.num_tokens.tolist(), batch.draft_positions.tolist(), batch.draft_token_ids
        for entry, row in enumerate(batch.rows.tolist()):
            if (texts := self._texts.get(row)) is not None:
                assumed = [] if drafts is None else drafts[entry, : drafted[entry]].tolist()
                yield entry, texts.banned(batch.token_table[row], known[entry], assumed)

    def _text(self, word: str) -> BadText | None:
        """Return what is known of a word, without the space before it; None where there is no tokenizer."""
        stripped = word.lstrip()
        if self._tokenizer is None or not stripped:
            return None
        found = self._known.get(stripped)
        if found is None:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(pieces_of(self._tokenizer, self._vocab_size))
            found = self._known[stripped] = BadText(stripped.encode(errors="surrogatepass"), self._vocabulary)
        self._known.move_to_end(stripped)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found
