"""Words as texts: which tokens would complete one, however it is cut into tokens.

A word is looked for in the bytes of a request's text as Knuth, Morris and Pratt do (SIAM J. Comput. 6, 1977): what is
remembered between two steps is how much of it the text ends with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from slotline.plugins.logits_processors.bad_words.vocabulary import Vocabulary

Int = npt.NDArray[np.int64]


class BadText:
    """One word; what is found of it is kept for all requests that name it.

    Args:
        text: the word's bytes, at least one.
    """

    def __init__(self, text: bytes, vocabulary: Vocabulary) -> None:
        self.text = text
        self.vocabulary = vocabulary
        self._shorter = _shorter_matches(text)
        self._holding = vocabulary.holding(text)
        self._completing: dict[int, Int] = {}
        self._moves: dict[tuple[int, int], int] = {}

    def completing(self, matched: int) -> Int:
        """Return the tokens that complete the word behind a text that ends with its first `matched` bytes."""
        found = self._completing.get(matched)
        if found is None:
            parts, length = [self._holding], matched
            while length:
                parts.append(self.vocabulary.beginning_with(self.text[length:]))
                length = self._shorter[length - 1]
            found = self._completing[matched] = reduce(np.union1d, parts)
        return found

    def behind(self, matched: int, token: int) -> int:
        """Return how many bytes of the word the text ends with behind a token."""
        key = matched, token
        found = self._moves.get(key)
        if found is None:
            piece = self.vocabulary.pieces[token] if token < len(self.vocabulary.pieces) else b""
            found = self._moves[key] = self._after(matched, piece)
        return found

    def _after(self, matched: int, piece: bytes) -> int:
        for byte in piece:
            while matched and self.text[matched] != byte:
                matched = self._shorter[matched - 1]
            matched += self.text[matched] == byte
            if matched == len(self.text):
                matched = self._shorter[matched - 1]
        return matched


class RowTexts:
    """The words of one request, and how much of each its text ends with."""

    def __init__(self, words: Sequence[BadText]) -> None:
        self._words = tuple(words)
        self._longest = max(len(word.text) for word in words)
        self._known = -1  # tokens that `_matched` stands behind
        self._matched = (0,) * len(words)

    def banned(self, tokens: npt.NDArray[np.int32], known: int, drafts: Iterable[int]) -> Int:
        """Return the tokens that would complete a word behind the first `known` of a row's tokens and some drafts."""
        if not 0 <= self._known <= known:
            self._begin(tokens, known)
        for token in tokens[self._known : known].tolist():
            self._matched = self._behind(self._matched, token)
        self._known = known
        matched = self._matched
        for token in drafts:
            matched = self._behind(matched, token)
        found = [word.completing(length) for word, length in zip(self._words, matched, strict=True)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _begin(self, tokens: npt.NDArray[np.int32], known: int) -> None:
        """Start so far back that every word that may have begun is seen from its first byte."""
        vocabulary = self._words[0].vocabulary.pieces
        first, length = known, 0
        while first and length < self._longest:
            first -= 1
            token = int(tokens[first])
            length += len(vocabulary[token]) if token < len(vocabulary) else 0
        self._known, self._matched = first, (0,) * len(self._words)

    def _behind(self, matched: tuple[int, ...], token: int) -> tuple[int, ...]:
        return tuple(word.behind(length, token) for word, length in zip(self._words, matched, strict=True))


def _shorter_matches(text: bytes) -> list[int]:
    """Return, for each beginning of a text, the length of its longest proper beginning that it also ends with."""
    found, length = [0] * len(text), 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = found[length - 1]
        length += text[place] == text[length]
        found[place] = length
    return found
