"""Bans the token that would complete a bad word, which is a sequence of tokens, or a text however it is tokenised."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from slotline.plugins.logits_processors.bad_words.texts import BadText, Tails
from slotline.plugins.logits_processors.bad_words.vocabulary import Vocabulary, pieces_of
from slotline.plugins.logits_processors.bans import ban
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError

_KEPT = 256
"""Texts that are kept for later requests."""


class BadWords:
    """Banned words of each row. A match may begin in the prompt, as in transformers.

    A text is banned at every position, also inside a longer word, with or without a space before it. This needs the
    model's tokenizer. Without one only the words' own tokens are banned.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._max_requests = context.max_requests
        self._tokenizer = context.tokenizer
        self._vocabulary: Vocabulary | None = None
        self._known: OrderedDict[str, BadText] = OrderedDict()
        self._words: dict[int, RowValues] = {}  # by length, so that long words do not widen short ones
        self._texts: dict[int, list[BadText]] = {}  # by row
        self._tails: Tails | None = None

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that token ids are in the vocabulary. `SamplingParams` checks their form."""
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
            self._texts[row] = list(texts.values())
        for text in texts.values():
            text.set(row, True)
        return bool(words or texts)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Set tokens that would complete a word to minus infinity, in place, all rows at once per length of word."""
        tail = batch.tail(max(self._words, default=1))
        for length, words in self._words.items():
            entries, tokens = words.take(batch.rows)  # [m], [m, length]
            begun = (tail[entries, tail.shape[1] - length + 1 :] == tokens[:, :-1]).all(axis=1)
            ban(logits, entries[begun], tokens[begun, -1])
        if self._texts:
            self._ban_texts(logits, batch)
        return logits

    def release(self, row: int) -> None:
        """Forget the row's words."""
        for text in self._texts.pop(row, ()):
            text.set(row, False)
        for words in self._words.values():
            words.drop(row)

    def _ban_texts(self, logits: torch.Tensor, batch: LogitsBatch) -> None:
        """Ban the tokens that would complete a text, for all rows of a text at once."""
        assert self._tails is not None
        tails = self._tails.of(batch.tail(self._tails.num_tokens))
        live = [text for text in self._known.values() if text.users]
        found = [pair for text in live for pair in text.banned(batch.rows, tails)]
        if found:
            entries, tokens = zip(*found, strict=True)
            ban(logits, np.concatenate(entries), np.concatenate(tokens))

    def _text(self, word: str) -> BadText | None:
        """Return the text of a word, without the space before it, or None without a tokenizer."""
        stripped = word.lstrip()
        if self._tokenizer is None or not stripped:
            return None
        found = self._known.get(stripped)
        if found is None:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(pieces_of(self._tokenizer, self._vocab_size))
            text = stripped.encode(errors="surrogatepass")
            found = self._known[stripped] = BadText(text, self._vocabulary, self._max_requests)
            if self._tails is None or len(text) - 1 > self._tails.width:
                self._tails = Tails(self._vocabulary, len(text) - 1)
            self._forget()
        self._known.move_to_end(stripped)
        return found

    def _forget(self) -> None:
        """Forget the texts that were named longest ago, of those that no request has."""
        unused = [word for word, text in self._known.items() if not text.users]
        for word in unused[: max(0, len(self._known) - _KEPT)]:
            if word != next(reversed(self._known)):
                del self._known[word]
