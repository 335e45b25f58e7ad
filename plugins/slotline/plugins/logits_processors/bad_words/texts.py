"""Words as texts: which tokens would complete one, however it is cut into tokens.

A word is searched at the end of each row's text, in bytes, for all rows at once. The number of matched bytes determines
the tokens that complete it: those that begin with the rest, and those that contain the word (compare Knuth, Morris and
Pratt, SIAM J. Comput. 6, 1977).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import numpy as np
import numpy.typing as npt

from slotline.plugins.logits_processors.bad_words.vocabulary import Vocabulary

Int = npt.NDArray[np.int64]
NO_BYTE = 256
"""Stands where a text has no byte."""
_EMPTY = 8
"""Most tokens without bytes, as special ones are, that are seen through among the bytes of a word."""


class BadText:
    """Banned word, and the rows whose requests name it.

    Args:
        text: the word's bytes, at least one.

    Attributes:
        rows: [max_requests] bool.
        users: number of these rows.
    """

    def __init__(self, text: bytes, vocabulary: Vocabulary, max_requests: int) -> None:
        self.text = text
        self.rows = np.zeros(max_requests, bool)
        self.users = 0
        self._vocabulary = vocabulary
        self._holding = vocabulary.holding(text)
        self._completing: dict[int, Int] = {}
        width = len(text) - 1
        bytes_of_text = np.frombuffer(text, np.uint8).astype(np.int16)
        self._beginnings = np.full((width, width), NO_BYTE, np.int16)  # the first 1, 2, .. bytes, aligned to the right
        for length in range(1, width + 1):
            self._beginnings[length - 1, width - length :] = bytes_of_text[:length]
        self._lengths = np.arange(1, width + 1)

    def set(self, row: int, named: bool) -> None:
        """Set if the request of a row names the word."""
        self.users += int(named) - int(self.rows[row])
        self.rows[row] = named

    def banned(self, rows: Int, tails: npt.NDArray[np.int16]) -> Iterator[tuple[Int, Int]]:
        """Yield entries and tokens, [m] each, that would complete the word in those of `rows` [n] that name it.

        Args:
            rows: [n] rows of the logits.
            tails: [n, width] the last bytes of each text, aligned to the right. The width is the word's length minus
                one.
        """
        entries = np.flatnonzero(self.rows[rows])
        matched = self._matched(tails[entries])
        for length in np.unique(matched).tolist():
            which, tokens = entries[matched == length], self._tokens(length)
            yield np.repeat(which, len(tokens)), np.tile(tokens, len(which))

    def _matched(self, tails: npt.NDArray[np.int16]) -> Int:
        """Return the most bytes of the word that each of `tails` [n, width] ends with, [n], but not the whole of it."""
        width = len(self._lengths)
        if not width or not len(tails):
            return np.zeros(len(tails), np.int64)
        own = tails[:, tails.shape[1] - width :][:, None]
        ends = ((own == self._beginnings) | (self._beginnings == NO_BYTE)).all(axis=2)  # [n, lengths]
        most: Int = (ends * self._lengths).max(axis=1)
        return most

    def _tokens(self, matched: int) -> Int:
        """Return the tokens that complete the word after its first `matched` bytes."""
        found = self._completing.get(matched)
        if found is None:
            lengths = [n for n in range(1, matched + 1) if self.text[:matched].endswith(self.text[:n])]
            parts = [self._vocabulary.beginning_with(self.text[length:]) for length in lengths]
            found = self._completing[matched] = reduce(np.union1d, parts, self._holding)
        return found


class Tails:
    """The last bytes of texts, from their tokens.

    Args:
        width: bytes.
    """

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        self.num_tokens = width + _EMPTY
        self.width = width
        self._lengths = np.zeros(len(vocabulary.pieces) + 1, np.int64)  # the last entry is of no token
        self._bytes = np.full((len(vocabulary.pieces) + 1, max(width, 1)), NO_BYTE, np.int16)
        for token, piece in enumerate(vocabulary.pieces):
            if end := piece[-width:] if width else b"":
                self._lengths[token] = len(end)
                self._bytes[token, -len(end) :] = np.frombuffer(end, np.uint8)

    def of(self, tokens: Int) -> npt.NDArray[np.int16]:
        """Return the last bytes [n, width] of texts whose last tokens are `tokens` [n, num_tokens], -1 for none."""
        known = np.where(tokens < len(self._lengths) - 1, tokens, -1)
        behind = np.cumsum(self._lengths[known[:, ::-1]], axis=1)  # bytes from each token on, the last token first
        place = np.arange(self.width)  # from the text's end
        token = (behind[:, :, None] <= place).sum(axis=1)  # [n, width], which token from the end has the byte
        inside = token < behind.shape[1]
        token = np.minimum(token, behind.shape[1] - 1)
        before = np.where(token > 0, np.take_along_axis(behind, np.maximum(token - 1, 0), axis=1), 0)
        ids = np.take_along_axis(known[:, ::-1], token, axis=1)
        column = np.clip(self._bytes.shape[1] - 1 - (place - before), 0, None)
        found: npt.NDArray[np.int16] = np.where(inside, self._bytes[ids, column], NO_BYTE).astype(np.int16)
        return found[:, ::-1]
